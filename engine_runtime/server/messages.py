"""POST /v1/messages and /v1/messages/count_tokens: events of the chat core as content blocks, whole or streamed."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_runtime.generation import RequestUsage
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import (
    ChatEvent,
    ChatJob,
    ContentDelta,
    Finished,
    ReasoningDelta,
    StepTokens,
    ToolCallDelta,
    ToolCallStart,
)
from engine_runtime.server.errors import GenerationFailed, error_envelope
from engine_runtime.server.messages_request import CountRequest, MessagesRequest, to_job
from engine_runtime.server.routes import JSONRoute
from engine_runtime.server.services import Services
from engine_runtime.server.sse import JSONBytes, event, open_stream, until_gone

PATH = "/v1/messages"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def router(services: Services) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute)

    @routes.post(PATH, tags=["anthropic"])
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation in Anthropic's format."""
        body.warn_of_unknown_fields()
        services.check_model(body.model)
        job, answer = to_job(body, _params(body, services.defaults)), Answer(services.model.name)
        if not body.stream:
            return JSONBytes(await until_gone(request, _collect(services, job, answer)))
        failure = lambda error: event(error_envelope(PATH, error), "error")  # noqa: E731
        return await open_stream(request, _stream(services, job, answer), failure)

    @routes.post(f"{PATH}/count_tokens", tags=["anthropic"])
    async def count_tokens(body: CountRequest) -> Response:
        """The tokens of the prompt that these messages make."""
        services.check_model(body.model)
        return JSONBytes({"input_tokens": await services.chat.count(to_job(body, services.defaults))})

    return routes


def _params(body: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    top_p = None if body.top_p is None else max(body.top_p, 1e-9)  # 0: the most probable token alone
    given = {"temperature": body.temperature, "top_p": top_p, "top_k": body.top_k}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, **changes, max_tokens=body.max_tokens, seed=secrets.randbits(63))


async def _collect(services: Services, job: ChatJob, answer: Answer) -> dict[str, Any]:
    async with aclosing(services.chat.run(job)) as events:  # type: ignore[type-var]
        async for news in events:
            answer.take(news)
    return answer.message()


async def _stream(services: Services, job: ChatJob, answer: Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(services.chat.run(job)) as events:  # type: ignore[type-var]
        async for news in events:
            for data in answer.take(news):
                yield event(data, data["type"])


class Answer:
    """The message as it grows; `take` gives the events that tell of the change."""

    def __init__(self, model: str) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._content: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the block that still grows, the last one
        self._pieces: list[str] = []
        self._usage = RequestUsage(0)
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._begun = False
        self._events: list[dict[str, Any]] = []

    def message(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [dict(block) for block in self._content],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }

    def take(self, news: ChatEvent) -> list[dict[str, Any]]:
        """Raises `GenerationFailed` where the engine gave up."""
        if isinstance(news, StepTokens):
            self._usage = news.usage
        if not self._begun:
            self._begun = True
            self._events += [{"type": "message_start", "message": self.message()}, {"type": "ping"}]
        if isinstance(news, ReasoningDelta):
            self._grow("thinking", "thinking_delta", "thinking", news.text)
        elif isinstance(news, ContentDelta):
            self._grow("text", "text_delta", "text", news.text)
        elif isinstance(news, ToolCallStart):
            self._close()
            self._begin({"type": "tool_use", "id": news.id, "name": news.name, "input": {}})
        elif isinstance(news, ToolCallDelta):
            self._grow("tool_use", "input_json_delta", "partial_json", news.arguments)
        elif isinstance(news, Finished):
            self._finish(news)
        events, self._events = self._events, []
        return events

    def _grow(self, block: str, delta: str, key: str, text: str) -> None:
        if self._open != block:
            self._close()
            self._begin({"type": "thinking", "thinking": "", "signature": ""} if block == "thinking" else _EMPTY_TEXT)
        self._pieces.append(text)
        self._tell("content_block_delta", delta={"type": delta, key: text})

    def _begin(self, block: dict[str, Any]) -> None:
        self._content.append(dict(block))
        self._open, self._pieces = block["type"], []
        self._tell("content_block_start", content_block=block)

    def _close(self) -> None:
        """End the block that is open, if one is."""
        if self._open is None:
            return
        block, text = self._content[-1], "".join(self._pieces)
        if self._open == "tool_use":
            block["input"] = _parsed(text)
        else:
            block[self._open] = text
        self._tell("content_block_stop")
        self._open = None

    def _finish(self, end: Finished) -> None:
        if end.reason == "error":
            raise GenerationFailed(end.error or "the engine failed")
        self._close()
        self._usage = end.usage
        self._stop_reason = _STOP_REASONS[end.reason]
        if end.reason == "stop" and isinstance(end.stop, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", end.stop
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        self._events += [
            {"type": "message_delta", "delta": delta, "usage": self.message()["usage"]},
            {"type": "message_stop"},
        ]

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "index": len(self._content) - 1, **fields})


_EMPTY_TEXT = {"type": "text", "text": ""}


def _parsed(arguments: str) -> Any:
    """The arguments of a call as an object. Those that a token limit cut off, or that the model got wrong, are given as
    the text that they are: a client that runs the tool must be able to see what happened."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"invalid_json": arguments}
