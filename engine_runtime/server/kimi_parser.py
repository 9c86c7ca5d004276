"""Generated token ids -> reasoning, content and tool calls: a state machine on ids, never on text.

A marker is one token, so a step may bring any number of tokens, with any number of markers among them, and the events
that come out, joined, are the same for every cut of the stream. No marker is ever part of a text.

What real output does beside the plain format, and what happens then:

- the reasoning ends at `</think>`, or without it where a tool call begins; `<think>` begins one where it comes first,
  anywhere else it is skipped;
- text after a section of calls is content; text in a section but in none of its calls is dropped, unless the turn has
  no call at all;
- a call is named by `functions.NAME:N`. An id of another form (`3`, `call_9f`) means the only tool there is, or the
  only one whose parameters fit the arguments; else the id itself is the name, so that the client can say it is unknown;
- arguments that are one JSON string holding JSON are unwrapped once, which means waiting for their end;
- a call without arguments has `{}`;
- a call cut off by the token limit keeps the arguments it has; one cut off inside its id is dropped;
- `<|tool_call_section_begin|>` (singular) is no token of the vocabulary: where a model spells it, it is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from enum import Enum, auto

from engine_runtime.generation import TokenLogprobs
from engine_runtime.server.contract import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    Tool,
    ToolCallDelta,
    ToolCallStart,
)
from engine_runtime.tokenizer import StreamDecoder, Tokenizer

_NATIVE_ID = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")
_MARKERS = {
    "<think>": "think",
    "</think>": "end_think",
    "<|tool_calls_section_begin|>": "section",
    "<|tool_calls_section_end|>": "end_section",
    "<|tool_call_begin|>": "call",
    "<|tool_call_argument_begin|>": "arguments",
    "<|tool_call_end|>": "end_call",
}


class _In(Enum):
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()  # between the calls of a section
    ID = auto()
    ARGUMENTS = auto()


_AFTER = {
    "section": _In.SECTION,
    "end_section": _In.CONTENT,
    "call": _In.ID,
    "end_call": _In.SECTION,
}


class KimiParser:
    """Parses one turn. `tool_calls`: calls begun so far. `reasoning_tokens`: tokens of reasoning text so far.

    starts_in_reasoning: the prompt ends with `<think>`. history_calls: calls in the prompt. parse_calls: without it
    markers of calls are skipped and what stands between them is content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_reasoning: bool,
        history_calls: int = 0,
        tools: tuple[Tool, ...] = (),
        parse_calls: bool = True,
    ) -> None:
        self.tool_calls = 0
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._history_calls = history_calls
        self._tools = tools
        known = tokenizer.special_tokens
        self._markers = {
            known[name]: kind
            for name, kind in _MARKERS.items()
            if name in known and (parse_calls or kind in ("think", "end_think"))
        }
        self._state = _In.REASONING if starts_in_reasoning else _In.CONTENT
        self._text: StreamDecoder = tokenizer.stream()
        self._events: list[ChatEvent] = []
        self._pieces: list[str] = []  # text of this state that no event holds yet
        self._at_start = True
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._arguments: _Arguments | None = None

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[ChatEvent]:
        """The events that `tokens` (with their `logprobs`, where asked for) bring about; may be none."""
        for index, token in enumerate(tokens):
            marker = self._markers.get(token)
            if marker is not None:
                self._mark(marker)
            elif not self._tokenizer.is_special(token):
                self._take(token, logprobs[index] if logprobs else None)
        self._emit()
        return self._drain()

    def finish(self) -> list[ChatEvent]:
        """The events that were held back for what might have followed."""
        self._leave(None)
        return self._drain()

    # ---- tokens ----

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._at_start = False
        self._pieces.append(self._text.push((token,)))
        if self._state is _In.REASONING:
            self.reasoning_tokens += 1
        if self._state in (_In.REASONING, _In.CONTENT):
            self._tokens.append(token)
            if logprobs is not None:
                self._logprobs.append(logprobs)

    def _mark(self, marker: str) -> None:
        at_start, self._at_start = self._at_start, False
        if marker == "think":
            if at_start:
                self._state = _In.REASONING
        elif marker == "end_think":
            if self._state is _In.REASONING:
                self._enter(_In.CONTENT)
        elif marker == "arguments":
            if self._state is _In.ID:
                self._begin_call()
        else:
            self._enter(_AFTER[marker])

    def _enter(self, state: _In) -> None:
        if state is self._state and state is not _In.ID:
            return
        self._leave(state)
        self._state = state

    def _leave(self, next_state: _In | None) -> None:
        """Give out what this state still holds. next_state: None at the end of the tokens."""
        self._pieces.append(self._text.flush())
        if self._state is _In.ID and next_state is not None and self._joined().strip():
            self._begin_call()
        if self._state is _In.SECTION and next_state is not _In.ID and not self.tool_calls and self._joined().strip():
            self._state = _In.CONTENT  # better than an answer without anything
        self._emit()
        if self._arguments is not None:
            self._events += self._arguments.finish(complete=next_state is not None)
        self._pieces, self._tokens, self._logprobs, self._arguments = [], [], [], None

    # ---- events ----

    def _joined(self) -> str:
        return "".join(self._pieces)

    def _emit(self) -> None:
        """Turn the text at hand into an event, where the state streams its text."""
        if self._state in (_In.SECTION, _In.ID):
            return
        text = self._joined()
        self._pieces = []
        if self._arguments is not None:
            self._events += self._arguments.push(text)
        elif text:
            tokens, logprobs = tuple(self._tokens), tuple(self._logprobs)
            self._tokens, self._logprobs = [], []
            if self._state is _In.REASONING:
                self._events.append(ReasoningDelta(text, tokens))
            else:
                self._events.append(ContentDelta(text, tokens, logprobs))

    def _drain(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def _begin_call(self) -> None:
        """The text at hand is a call's id, its arguments follow."""
        self._pieces.append(self._text.flush())
        id_ = "".join(self._joined().split())
        self._pieces = []
        self._state = _In.ARGUMENTS
        index = self.tool_calls
        self.tool_calls += 1
        native = _NATIVE_ID.fullmatch(id_)
        name = native.group(1) if native else id_.removeprefix("functions.")
        known = native is not None or any(tool.name == name for tool in self._tools)
        if not known and len(self._tools) == 1:
            name, known = self._tools[0].name, True
        self._arguments = _Arguments(index, self._history_calls + index, name, () if known else self._tools)


class _Arguments:
    """The arguments of one call: streamed as they come, without the blanks around them, except where something must
    be known of the whole first (the tool's name, or that it is a JSON string)."""

    def __init__(self, index: int, number: int, name: str, candidates: tuple[Tool, ...]) -> None:
        self._index, self._number, self._name = index, number, name
        self._candidates = candidates  # tools that the call may mean; empty: the name is settled
        self._started = False
        self._whole = bool(candidates)
        self._held: list[str] = []  # text that waits: blanks at either end, or everything

    def push(self, text: str) -> list[ChatEvent]:
        if not self._started:
            text = text.lstrip()
            if not text:
                return []
            self._whole = self._whole or text[0] == '"'
        events = [] if self._started or self._whole else [self._start()]
        self._started = True
        self._held.append(text)
        if self._whole or not text.strip():
            return events
        text = "".join(self._held)
        ready = text.rstrip()
        self._held = [text[len(ready) :]]
        return [*events, ToolCallDelta(self._index, ready)]

    def finish(self, complete: bool) -> list[ChatEvent]:
        if not self._started:
            return [self._start(), *([ToolCallDelta(self._index, "{}")] if complete else [])]
        if not self._whole:
            return []
        text = _unwrapped("".join(self._held).rstrip())
        self._name = _meant_tool(text, self._candidates) or self._name
        return [self._start(), ToolCallDelta(self._index, text)]

    def _start(self) -> ChatEvent:
        return ToolCallStart(self._index, f"functions.{self._name}:{self._number}", self._name)


def _unwrapped(text: str) -> str:
    """The JSON inside `text`, where that is a JSON string holding an object; else `text`."""
    try:
        inner = json.loads(text)
        if isinstance(inner, str) and isinstance(json.loads(inner), dict):
            return inner.strip()
    except (ValueError, RecursionError):
        pass  # arguments need not be valid: the client is told what the model wrote
    return text


def _meant_tool(arguments: str, tools: tuple[Tool, ...]) -> str | None:
    """The only one of `tools` that takes arguments with these names and needs no others."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    fitting = [tool.name for tool in tools if _takes(tool, given.keys())]
    return fitting[0] if len(fitting) == 1 else None


def _takes(tool: Tool, names: Set[str]) -> bool:
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    known = properties.keys() if isinstance(properties, Mapping) else set()
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, Sequence) else []
    return names <= known and names >= set(needed)
