"""What every request passes: its id, the API key, the limits on its body, its line in the log, its count."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_runtime.server.contract import BadRequest
from engine_runtime.server.errors import error_response
from engine_runtime.server.logs import request_id

OPEN_PATHS = {"/health", "/health/live", "/health/ready", "/ready"}  # answered without a key
BODY_SECONDS = 60.0  # for the whole body of a request to arrive
MAX_ID = 128  # characters of a client's own request id

_log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware. api_keys: none lets everybody in. count: told (method, route, status, seconds)."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_body_bytes: int,
        count: Callable[[str, str, int, float], None],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body = max_body_bytes
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = _client_id(headers) or uuid.uuid4().hex
        token = request_id.set(name)
        start, status = time.monotonic(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await error_response(scope, refusal)(scope, receive, send_noting)
            else:
                await self._app(scope, self._bounded(receive), send_noting)
        except Exception as error:
            response = error_response(scope, error)  # logs it
            if status == 0:
                await response(scope, receive, send_noting)
            else:
                raise
        finally:
            seconds = time.monotonic() - start
            route = getattr(scope.get("route"), "path", "other")
            self._count(scope["method"], route, status, seconds)
            fields = {"method": scope["method"], "path": scope["path"][:200], "status": status}
            # probes come every few seconds and would hide the rest
            level = logging.DEBUG if scope["path"] in OPEN_PATHS and status < 400 else logging.INFO
            _log.log(level, "request", extra={"fields": {**fields, "seconds": round(seconds, 4)}})
            request_id.reset(token)

    def _refusal(self, scope: Scope, headers: Headers) -> BadRequest | None:
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return BadRequest("a valid API key is required: Authorization: Bearer KEY", None, 401, "invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            return self._too_large()
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
        # all keys are compared, so that the time does not tell which one came close
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0

    def _too_large(self) -> BadRequest:
        return BadRequest(f"the body is larger than {self._max_body} bytes", None, 413, "request_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that refuses a body that is too large or does not come."""
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._max_body:
                raise HTTPException(413, str(self._too_large()))
            return message

        return bounded


def _client_id(headers: Headers) -> str | None:
    """The request id that the client sent, if it is fit to be logged and sent back."""
    name = headers.get("x-request-id", "")
    return name if 0 < len(name) <= MAX_ID and name.isascii() and name.isprintable() else None
