"""From a chat turn to its events: prompt, generation, the model's format, stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from engine_runtime.budget import Speculation
from engine_runtime.generation import (
    Constraint,
    GenerationRequest,
    Output,
    RequestTiming,
    RequestUsage,
    TokenLogprobs,
)
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import (
    BadRequest,
    ChatEvent,
    ChatJob,
    ContentDelta,
    Engine,
    EngineUnavailable,
    Finished,
    ReasoningDelta,
    StepTokens,
    StepTrace,
    ToolCallStart,
)
from engine_runtime.server.stops import StopStrings, split_stop

T = TypeVar("T")

_threads = ThreadPoolExecutor(2, thread_name_prefix="prompt")


async def off_loop(work: Callable[..., T], *args: Any) -> T:
    """`work(*args)` on a thread, so that the event loop goes on: for what takes long on long texts."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *args)


class EventParser(Protocol):
    """Turns a turn's tokens into events, the same ones however the tokens are grouped."""

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[ChatEvent]: ...

    def finish(self) -> list[ChatEvent]:
        """What was held back; the turn has ended."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A turn, ready to be generated: prompt ids, what may not be generated, and who reads the tokens."""

    prompt: tuple[int, ...]
    constraint: Constraint | None
    parser: EventParser


class ChatFormat(Protocol):
    """The model's chat format; both are called on a thread and raise `BadRequest`."""

    def render(self, job: ChatJob) -> Sequence[int]: ...

    def prepare(self, job: ChatJob) -> Prepared: ...


@dataclass(frozen=True)
class Room:
    """What an engine can hold. context: most tokens of one request, prompt and answer together. eos_ids: ids that end
    a text by themselves. speculation: how every request drafts."""

    context: int
    eos_ids: tuple[int, ...]
    speculation: Speculation

    def fit(self, prompt: Sequence[int], params: SamplingParams, param: str) -> SamplingParams:
        """`params` with max_tokens cut to what is left behind `prompt`; `BadRequest` (about `param`) if none is."""
        left = self.context - len(prompt)
        if left < 1:
            raise BadRequest(
                f"{param}: {len(prompt)} tokens do not fit: the context holds {self.context}, with room for an answer",
                param,
                code="context_length_exceeded",
            )
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


class Chat:
    """`contract.ChatRunner`."""

    def __init__(self, engine: Engine, chat_format: ChatFormat, room: Room, ended: Callable[[str], None]) -> None:
        """ended: told at the end of each turn why it ended, "abort" if its iterator was closed before."""
        self._engine = engine
        self._format = chat_format
        self._room = room
        self._ended = ended

    async def render(self, job: ChatJob) -> list[int]:
        return list(await off_loop(self._format.render, job))

    async def count(self, job: ChatJob) -> int:
        return len(await self.render(job))

    async def run(self, job: ChatJob) -> AsyncGenerator[ChatEvent, None]:
        """See `contract.ChatRunner`."""
        prepared = await off_loop(self._format.prepare, job)
        request = GenerationRequest(
            prepared.prompt,
            self._room.fit(prepared.prompt, job.params, "messages"),
            self._room.speculation,
            prepared.constraint,
            job.logprobs,
            trace=job.trace,
        )
        turn = _Turn(job, prepared, self._room.eos_ids)
        reason = "abort"
        outputs = self._engine.generate(request)
        try:
            async with aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    for event in turn.take(output):
                        reason = event.reason if isinstance(event, Finished) else reason
                        yield event
                    if turn.ended:
                        return
        except ValueError as error:
            reason = "refused"
            raise BadRequest(str(error)) from None
        except EngineUnavailable:
            reason = "refused"
            raise
        finally:
            self._ended(reason)


class _Turn:
    """One turn while it is generated: outputs in, events out."""

    def __init__(self, job: ChatJob, prepared: Prepared, eos_ids: tuple[int, ...]) -> None:
        self._job = job
        self._prompt: tuple[int, ...] | None = prepared.prompt
        self._parser = prepared.parser
        self._eos_ids = eos_ids
        self._stops = StopStrings(job.stop, job.include_stop)
        self._held: list[ContentDelta] = []  # whose text is still held back
        self._usage = RequestUsage(len(prepared.prompt))
        self._timing = RequestTiming()
        self._called = False
        self._reasoning_tokens = 0
        self.ended = False

    def take(self, output: Output) -> list[ChatEvent]:
        """The events of `output`, the last of them `Finished` when the turn has ended."""
        self._usage, self._timing = output.usage or self._usage, output.timing or self._timing
        events: list[ChatEvent] = []
        if output.trace is not None:
            events.append(StepTrace(output.trace, self._timing))
        if self._job.token_ids:
            events.append(StepTokens(output.tokens, self._usage, self._prompt))
            self._prompt = None
        tokens, logprobs, stop_id = split_stop(output, self._job.params, self._eos_ids, self._job.include_stop)
        parsed = self._parser.push(tokens, logprobs)
        if output.finish is not None:
            parsed = [*parsed, *self._parser.finish()]
        for event in parsed:
            events += self._filter(event)
            if self._stops.found is not None:
                return [*events, self._finished("stop", self._stops.found)]
        if output.finish is not None:
            events += self._flush()
            events.append(self._finished(output.finish, stop_id, output.error))
        return events

    def _filter(self, event: ChatEvent) -> list[ChatEvent]:
        """`event` behind the stop strings."""
        if isinstance(event, ContentDelta) and self._job.stop:
            self._held.append(event)
            return self._release(self._stops.push(event.text))
        if isinstance(event, ReasoningDelta):
            self._reasoning_tokens += len(event.tokens)
        if isinstance(event, ToolCallStart):
            self._called = True
            return [*self._flush(), event]
        return [event]

    def _flush(self) -> list[ChatEvent]:
        return self._release(self._stops.flush()) if self._held else []

    def _release(self, text: str) -> list[ChatEvent]:
        """`text` with the tokens of the deltas so far, which it is the visible part of."""
        if not text and self._stops.found is None:
            return []
        held, self._held = self._held, []
        tokens = tuple(token for delta in held for token in delta.tokens)
        logprobs = tuple(entry for delta in held for entry in delta.logprobs)
        return [ContentDelta(text, tokens, logprobs)] if text else []

    def _finished(self, reason: str, stop: str | int | None, error: str | None = None) -> Finished:
        self.ended = True
        if reason == "stop" and self._called:
            reason = "tool_calls"
        return Finished(reason, self._usage, self._timing, self._reasoning_tokens, stop, error)
