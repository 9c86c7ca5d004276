"""POST /v1/chat/completions: events of the chat core as chat completion objects and chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_runtime.generation import RequestUsage, TokenLogprobs
from engine_runtime.server.chat_request import ChatRequest, to_job
from engine_runtime.server.contract import (
    ChatEvent,
    ChatJob,
    ContentDelta,
    Finished,
    ReasoningDelta,
    StepTokens,
    StepTrace,
    ToolCallDelta,
    ToolCallStart,
)
from engine_runtime.server.errors import GenerationFailed, error_envelope
from engine_runtime.server.fields import choice_params, sampling_params
from engine_runtime.server.merge import merge
from engine_runtime.server.routes import JSONRoute
from engine_runtime.server.services import Services
from engine_runtime.server.sse import DONE, Chunks, JSONBytes, event, open_stream, until_gone
from engine_runtime.server.usage import chat_logprobs, trace_json, usage_json

PATH = "/v1/chat/completions"


def router(services: Services) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute)

    @routes.post(PATH, tags=["openai"])
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation, at once or as a stream of server-sent events."""
        job = chat_job(services, body)
        answer = _Answer(services, body)
        if body.stream:
            return await open_stream(request, answer.stream(job), stream_error)
        return JSONBytes(await until_gone(request, answer.collect(job)))

    return routes


def chat_job(services: Services, body: ChatRequest) -> ChatJob:
    """The job that `body` asks for; `BadRequest` where it cannot be served."""
    body.warn_of_unknown_fields()
    services.check_model(body.model)
    model = services.model
    eos_ids = model.room().eos_ids
    return to_job(body, sampling_params(body, body.limit, services.defaults, eos_ids, model.vocab_size))


def stream_error(error: Exception) -> bytes:
    """The end of a stream that failed after it had begun."""
    return event(error_envelope(PATH, error)) + DONE


@dataclass
class _Choice:
    """One choice of an answer that is sent whole."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, news: ChatEvent) -> None:
        if isinstance(news, ContentDelta):
            self.content.append(news.text)
            self.logprobs += news.logprobs
        elif isinstance(news, ReasoningDelta):
            self.reasoning.append(news.text)
        elif isinstance(news, ToolCallStart):
            self.calls.append({"id": news.id, "type": "function", "function": {"name": news.name}})
            self.arguments.append([])
        elif isinstance(news, ToolCallDelta):
            self.arguments[news.index].append(news.arguments)
        elif isinstance(news, StepTokens):
            self.token_ids += news.tokens

    def message(self) -> dict[str, Any]:
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        value: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            value["content"] = content or None
            for call, pieces in zip(self.calls, self.arguments, strict=True):
                call["function"]["arguments"] = "".join(pieces)
            value["tool_calls"] = self.calls
        return {**value, "reasoning_content": reasoning or None, "reasoning": reasoning or None}


class _Answer:
    """One response."""

    def __init__(self, services: Services, body: ChatRequest) -> None:
        self._services = services
        self._body = body
        self._n = body.n or 1
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": services.model.name,
            "system_fingerprint": services.model.fingerprint[:16],
        }
        self._usages: dict[int, RequestUsage] = {}  # of each choice, so far
        self._ends: dict[int, Finished] = {}

    def _events(self, job: ChatJob) -> AsyncGenerator[tuple[int, ChatEvent], None]:
        """(choice, event) of all choices, as they come."""
        jobs = [replace(job, params=choice_params(job.params, index)) for index in range(self._n)]
        return merge([self._services.chat.run(one) for one in jobs])

    def _note(self, index: int, news: ChatEvent) -> None:
        if isinstance(news, StepTokens):
            self._usages[index] = news.usage
        elif isinstance(news, Finished):
            if news.reason == "error":
                raise GenerationFailed(news.error or "the engine failed")
            self._usages[index], self._ends[index] = news.usage, news

    def _usage(self) -> dict[str, Any]:
        ends = self._ends.values()
        usages = [self._usages[index] for index in sorted(self._usages)]
        timings = [end.timing for end in ends] if self._body.timing else None
        return usage_json(usages[:1], usages, sum(end.reasoning_tokens for end in ends), timings)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_logprobs(self._services.tokenizer, entries), "refusal": None}

    async def collect(self, job: ChatJob) -> dict[str, Any]:
        """The whole chat completion object."""
        choices = [_Choice() for _ in range(self._n)]
        prompt: tuple[int, ...] | None = None
        async with aclosing(self._events(job)) as events:
            async for index, news in events:
                self._note(index, news)
                choices[index].add(news)
                if isinstance(news, StepTokens):
                    prompt = prompt or news.prompt
        value: dict[str, Any] = {**self._head, "choices": [self._choice(i, choice) for i, choice in enumerate(choices)]}
        if self._body.return_token_ids:
            value["prompt_token_ids"] = prompt
        return {**value, "usage": self._usage()}

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        end = self._ends[index]
        value = {
            "index": index,
            "message": choice.message(),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": end.reason,
            "stop_reason": end.stop,
        }
        return {**value, "token_ids": choice.token_ids} if self._body.return_token_ids else value

    async def stream(self, job: ChatJob) -> Chunks:
        """The events of the stream, the last one [DONE]."""
        begun: set[int] = set()
        async with aclosing(self._events(job)) as events:
            async for index, news in events:
                self._note(index, news)
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""})
                if isinstance(news, StepTokens):
                    if self._body.return_token_ids:
                        yield self._token_chunk(index, news)
                elif isinstance(news, StepTrace):
                    yield self._trace_chunk(index, news)
                elif (delta := _delta(news)) is not None:
                    entries = news.logprobs if isinstance(news, ContentDelta) else ()
                    yield self._chunk(index, delta, self._logprobs(entries) if entries else None)
                elif isinstance(news, Finished):
                    yield self._chunk(index, {}, None, news)
        if self._body.includes_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, end: Finished | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if end is not None:
            choice |= {"finish_reason": end.reason, "stop_reason": end.stop}
        return self._send([choice])

    def _token_chunk(self, index: int, news: StepTokens) -> bytes:
        choice = {"index": index, "delta": {}, "finish_reason": None, "token_ids": news.tokens}
        return self._send([choice], {} if news.prompt is None else {"prompt_token_ids": news.prompt})

    def _trace_chunk(self, index: int, news: StepTrace) -> bytes:
        trace = trace_json(self._services.tokenizer, news)
        return self._send([{"index": index, "delta": {}, "finish_reason": None}], {"k2_trace": trace})

    def _send(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> bytes:
        value = {**self._head, "choices": choices, **(extra or {})}
        if self._body.continuous_usage and self._usages:
            value["usage"] = self._usage()
        elif self._body.includes_usage:
            value["usage"] = None
        return event(value)


def _delta(news: ChatEvent) -> dict[str, Any] | None:
    """The delta of an event that has one."""
    if isinstance(news, ContentDelta):
        return {"content": news.text}
    if isinstance(news, ReasoningDelta):
        return {"reasoning_content": news.text, "reasoning": news.text}
    if isinstance(news, ToolCallStart):
        function = {"name": news.name, "arguments": ""}
        return {"tool_calls": [{"index": news.index, "id": news.id, "type": "function", "function": function}]}
    if isinstance(news, ToolCallDelta):
        return {"tool_calls": [{"index": news.index, "function": {"arguments": news.arguments}}]}
    return None
