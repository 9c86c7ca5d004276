"""Kimi's chat format as `chat_core.ChatFormat`."""

from __future__ import annotations

from collections.abc import Sequence

from engine_runtime.chat import ChatError, ChatTemplate
from engine_runtime.generation import TokenLogprobs
from engine_runtime.server.chat_core import Prepared
from engine_runtime.server.contract import BadRequest, ChatEvent, ChatJob, ContentDelta, ReasoningDelta
from engine_runtime.tokenizer import Tokenizer


class KimiFormat:
    """Renders with the checkpoint's template and parses with Kimi's markers."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def render(self, job: ChatJob) -> Sequence[int]:
        try:
            return self._template.encode(job.messages, thinking=job.thinking, preserve_thinking=job.preserve_thinking)
        except ChatError as error:
            raise BadRequest(str(error), "messages") from None

    def prepare(self, job: ChatJob) -> Prepared:
        parser = _TextParser(self._tokenizer, job.thinking)
        return Prepared(tuple(self.render(job)), None, parser)


class _TextParser:
    """Reasoning up to </think>, then content."""

    def __init__(self, tokenizer: Tokenizer, reasoning: bool) -> None:
        self._end = tokenizer.special_id("</think>")
        self._stream = tokenizer.stream(skip_special=True)
        self._reasoning = reasoning

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[ChatEvent]:
        if self._reasoning and self._end in tokens:
            cut = tokens.index(self._end)
            events = self._delta(self._stream.push(tokens[:cut]) + self._stream.flush(), tokens[: cut + 1], ())
            self._reasoning = False
            rest = logprobs[cut + 1 :] if logprobs else None
            return events + self.push(tokens[cut + 1 :], rest)
        return self._delta(self._stream.push(tokens), tokens, logprobs or ())

    def _delta(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[ChatEvent]:
        if not tokens:
            return []
        if self._reasoning:
            return [ReasoningDelta(text, tuple(tokens))]
        return [ContentDelta(text, tuple(tokens), tuple(logprobs))]

    def finish(self) -> list[ChatEvent]:
        text = self._stream.flush()
        return [ReasoningDelta(text) if self._reasoning else ContentDelta(text)] if text else []
