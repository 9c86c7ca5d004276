"""Every error as the envelope that the client's SDK expects: OpenAI's, and Anthropic's under /v1/messages.

Messages are this project's own sentences. What a library or a fault of this program says goes to the log only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from engine_runtime.server.contract import BadRequest, EngineUnavailable
from engine_runtime.server.sse import JSON, ClientGone, JSONBytes

STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PROBES = ("/health", "/health/ready", "/ready")
_log = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {405: "invalid_request_error", 500: "api_error", 503: "overloaded_error"}


class GenerationFailed(RuntimeError):
    """The engine gave up a generation that had begun; the message is fit for the client."""


class ErrorBody(BaseModel):
    """param: the part of the request that is wrong. code: a name for programs, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorBody


def envelope(path: str, status: int, message: str, param: str | None = None, code: str | None = None) -> JSON:
    """The body of an error response to a request for `path`."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(status) or _TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, str, str | None, str | None]:
    """(status, message, param, code) to tell a client about `error`."""
    if isinstance(error, BadRequest):
        return error.status, str(error), error.param, error.code
    if isinstance(error, EngineUnavailable):
        return error.status, str(error), None, "queue_full" if error.status == 429 else "engine_unavailable"
    if isinstance(error, GenerationFailed):
        return 500, str(error), None, "generation_failed"
    _log.error("request failed", exc_info=error)
    return 500, "internal error; the server's log has the details", None, None


def error_envelope(path: str, error: Exception) -> JSON:
    """`envelope` of `error`."""
    return envelope(path, *describe(error))


def error_response(scope: Scope, error: Exception) -> JSONBytes:
    """The response that tells `error`."""
    status, message, param, code = describe(error)
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, EngineUnavailable) else None
    return JSONBytes(envelope(scope["path"], status, message, param, code), status, headers)


def _validation_sentence(error: Mapping[str, Any], body: Any) -> tuple[str, str | None]:
    """One error of pydantic about `body` as (sentence, parameter)."""
    name = _place(error["loc"][1:], body, error["type"] == "missing")
    if not name:
        return "the body must be a JSON object, sent with content-type application/json", None
    found = error.get("input")
    shown = f", found {found!r}"[:100] if isinstance(found, str | int | float) else ""
    return f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}"[:400] + shown, name


def _place(path: Sequence[str | int], body: Any, missing: bool) -> str:
    """The place in `body` as a client would write it, `messages[0].role`. pydantic's path also names the branches of
    unions; what of it does not lead further into the body is left out. missing: the last part is what is not there."""
    name, value = "", body
    for part in path[:-1] if missing else path:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            name, value = f"{name}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            name, value = f"{name}.{part}", value[part]
    return (f"{name}.{path[-1]}" if missing and path else name).removeprefix(".")[:200]


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """The same under /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorBody


def declare(schema: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI `schema` of the application with these envelopes as what every operation answers beside success."""
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    for model in (ErrorResponse, AnthropicErrorResponse):
        definition = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts |= definition.pop("$defs", {})
        parts[model.__name__] = definition
    for path, operations in schema["paths"].items():
        name = "AnthropicErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
        # a probe's 503 is its health, not an envelope
        body: dict[str, Any] = {} if path in PROBES else {"$ref": f"#/components/schemas/{name}"}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            content = {"application/json": {"schema": body}}
            operation["responses"]["default"] = {"description": "An error", "content": content}
            if path in STREAMED:
                operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return schema


def install(app: FastAPI) -> None:
    """Answer every error of `app` with an envelope, and say so in its schema."""
    plain = app.openapi
    app.openapi = lambda: app.openapi_schema or declare(plain())  # type: ignore[method-assign]

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONBytes:
        # of a union every branch complains; the one that got deepest is the one that was meant
        deepest = max(error.errors(), key=lambda entry: len(entry["loc"]))
        sentence, param = _validation_sentence(deepest, error.body)
        return error_response(request.scope, BadRequest(sentence, param))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONBytes:
        path = request.scope["path"]
        sentences = {404: f"no such path: {path[:200]}", 405: f"{request.method} is not allowed for {path[:200]}"}
        message = sentences.get(error.status_code, str(error.detail))
        return JSONBytes(envelope(path, error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def _(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it; it is what the log and the metrics count

    for kind in (BadRequest, EngineUnavailable):

        @app.exception_handler(kind)
        async def _(request: Request, error: Exception) -> JSONBytes:
            return error_response(request.scope, error)
