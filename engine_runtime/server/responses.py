"""POST /v1/responses: events of the chat core as items of a response, whole or streamed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_runtime.server.contract import (
    ChatEvent,
    ChatJob,
    ContentDelta,
    Finished,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from engine_runtime.server.errors import GenerationFailed, describe
from engine_runtime.server.fields import sampling_params
from engine_runtime.server.responses_request import ClientTool, ResponsesRequest, coded_reasoning, to_job
from engine_runtime.server.routes import JSONRoute
from engine_runtime.server.services import Services
from engine_runtime.server.sse import JSONBytes, event, open_stream, until_gone

PATH = "/v1/responses"
Event = dict[str, Any]


def router(services: Services) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute)

    @routes.post(PATH, tags=["openai"])
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation given as items; nothing is stored."""
        body.warn_of_unknown_fields()
        services.check_model(body.model)
        model = services.model
        limit = body.max_output_tokens
        params = sampling_params(body, limit, services.defaults, model.room().eos_ids, model.vocab_size)
        job, tools = to_job(body, params)
        answer = Answer(body, model.name, tools)
        if not body.stream:
            return JSONBytes(await until_gone(request, _collect(services, job, answer)))
        return await open_stream(request, _stream(services, job, answer), lambda error: _failure(answer, error))

    return routes


async def _collect(services: Services, job: ChatJob, answer: Answer) -> Event:
    async with aclosing(services.chat.run(job)) as events:  # type: ignore[type-var]
        async for news in events:
            if isinstance(news, Finished) and news.reason == "error":
                raise GenerationFailed(news.error or "the engine failed")
            answer.take(news)
    return answer.response()


async def _stream(services: Services, job: ChatJob, answer: Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(services.chat.run(job)) as events:  # type: ignore[type-var]
        async for news in events:
            if not answer.begun:
                for item in answer.begin():
                    yield event(item, item["type"])
            if isinstance(news, Finished) and news.reason == "error":
                raise GenerationFailed(news.error or "the engine failed")
            for item in answer.take(news):
                yield event(item, item["type"])


def _failure(answer: Answer, error: Exception) -> bytes:
    _, message, _, code = describe(error)
    item = answer.fail(code or "server_error", message)
    return event(item, item["type"])


class Answer:
    """The response object as it grows. `begin`, `take` and `fail` give the events that tell of the change, numbered."""

    def __init__(self, body: ResponsesRequest, model: str, tools: Mapping[str, ClientTool]) -> None:
        self.begun = False
        self._body = body
        self._tools = tools
        self._number = 0
        self._events: list[Event] = []
        self._output: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the item that still grows, the last one of the output
        self._pieces: list[str] = []
        given = body.model_dump(include={"text", "tool_choice", "tools"}, exclude_none=True, by_alias=True)
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": given.get("text", {}).get("format") or {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def response(self) -> dict[str, Any]:
        return {**self._response, "output": [dict(item) for item in self._output]}

    def begin(self) -> list[Event]:
        self.begun = True
        self._tell("response.created", response=self.response())
        self._tell("response.in_progress", response=self.response())
        return self._drain()

    def take(self, news: ChatEvent) -> list[Event]:
        if isinstance(news, ReasoningDelta):
            self._grow_text("reasoning", "response.reasoning_text.delta", news.text)
        elif isinstance(news, ContentDelta):
            self._grow_text("message", "response.output_text.delta", news.text, logprobs=[])
        elif isinstance(news, ToolCallStart):
            self._begin_call(news)
        elif isinstance(news, ToolCallDelta):
            self._pieces.append(news.arguments)
            if self._open == "function_call":  # a custom tool's input is a string inside the arguments
                self._tell_item("response.function_call_arguments.delta", delta=news.arguments)
        elif isinstance(news, Finished):
            self._finish(news)
        return self._drain()

    def fail(self, code: str, message: str) -> Event:
        """The last event of a response that cannot be completed."""
        self._response |= {"status": "failed", "error": {"code": code, "message": message}}
        self._tell("response.failed", response=self.response())
        return self._drain()[0]

    # ---- items ----

    def _grow_text(self, kind: str, event_type: str, text: str, **more: Any) -> None:
        if self._open != kind:
            self._close()
            self._begin_text(kind)
        self._pieces.append(text)
        self._tell_item(event_type, content_index=0, delta=text, **more)

    def _begin_text(self, kind: str) -> None:
        item: dict[str, Any] = {"type": kind, "id": _id("rs" if kind == "reasoning" else "msg"), "content": []}
        if kind == "reasoning":
            item |= {"summary": [], "encrypted_content": None}
        else:
            item |= {"role": "assistant"}
        self._begin_item(item)
        self._tell_item("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _begin_call(self, call: ToolCallStart) -> None:
        self._close()
        tool = self._tools.get(call.name, ClientTool(call.name))
        item: dict[str, Any] = {"call_id": call.id, "name": tool.name}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.custom:
            self._begin_item({"type": "custom_tool_call", "id": _id("ctc"), **item, "input": ""})
        else:
            self._begin_item({"type": "function_call", "id": _id("fc"), **item, "arguments": ""})

    def _begin_item(self, item: dict[str, Any]) -> None:
        self._output.append({**item, "status": "in_progress"})
        self._open, self._pieces = item["type"], []
        self._tell("response.output_item.added", output_index=len(self._output) - 1, item=dict(self._output[-1]))

    def _close(self, status: str = "completed") -> None:
        """End the item that is open, if one is."""
        kind, text = self._open, "".join(self._pieces)
        if kind is None:
            return
        item = self._output[-1]
        if kind == "reasoning":
            if self._body.wants_reasoning_back:
                item["encrypted_content"] = coded_reasoning(text)
            self._tell_item("response.reasoning_text.done", content_index=0, text=text)
        elif kind == "message":
            self._tell_item("response.output_text.done", content_index=0, text=text, logprobs=[])
        elif kind == "function_call":
            item["arguments"] = text
            self._tell_item("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            item["input"] = _custom_input(text)
            self._tell_item("response.custom_tool_call_input.delta", delta=item["input"])
            self._tell_item("response.custom_tool_call_input.done", input=item["input"])
        if kind in ("reasoning", "message"):
            item["content"] = [_part(kind, text)]
            self._tell_item("response.content_part.done", content_index=0, part=_part(kind, text))
        item["status"] = status
        self._open = None
        self._tell("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))

    def _finish(self, end: Finished) -> None:
        cut = end.reason == "length"
        status = "incomplete" if cut else "completed"
        self._close(status)
        usage = end.usage
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        self._tell(f"response.{status}", response=self.response())

    # ---- events ----

    def _tell_item(self, kind: str, **fields: Any) -> None:
        """An event about the last item."""
        self._tell(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """The text that a custom tool is called with; what was cut off before its end is given as far as it goes."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments
