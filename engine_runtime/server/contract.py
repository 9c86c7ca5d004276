"""What the parts of the server share: the engine as they see it, one chat turn as a job, and its stream of events.

An endpoint turns its wire format into a `ChatJob`, and the events that come back into its wire format. Everything that
is Kimi's (markers, ids of tool calls, implicit ends) is settled between the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine_runtime.generation import GenerationRequest, Output, RequestTiming, RequestUsage, TokenLogprobs, TreeTrace
from engine_runtime.sampling import SamplingParams


class BadRequest(ValueError):
    """The request cannot be served as it is: one sentence, the parameter it is about, and an HTTP status of 4xx."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class EngineUnavailable(RuntimeError):
    """The engine is loading, failed or draining (503), or its queue is full (429); `retry_after` in seconds."""

    def __init__(self, message: str, status: int = 503, retry_after: int = 5) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Engine(Protocol):
    """The engine as the endpoints see it."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        """Outputs until one has `finish`. Closing the iterator early cancels the request within one step.

        Raises ValueError for a request that the engine cannot take, `EngineUnavailable` when it takes none.
        """
        ...


@dataclass(frozen=True)
class Tool:
    """One function that the model may call. parameters: its JSON schema; strict: enforce it, not just "an object"."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class ResponseFormat:
    """kind "json_object", or "json_schema", "regex", "grammar" (Lark) or "choice" with its `value`."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    value: Any = None


@dataclass(frozen=True)
class ChatJob:
    """One turn to generate.

    messages: in the chat-completions form (role, content, reasoning_content, tool_calls, tool_call_id, name), as the
    client sent them. tool_choice: "auto", "none", "required" or the name of a tool. stop: texts at which the visible
    content ends. params.max_tokens None: as much as the context holds.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    thinking: bool = True
    preserve_thinking: bool = False
    response_format: ResponseFormat | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    trace: bool = False
    token_ids: bool = False


@dataclass(frozen=True)
class StepTokens:
    """The token ids of one step, before its other events, for jobs with `token_ids`; the first also has the
    prompt's."""

    tokens: tuple[int, ...]
    usage: RequestUsage
    prompt: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ReasoningDelta:
    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ContentDelta:
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class ToolCallStart:
    """index: position among the calls of this turn. id: `functions.name:n`, n counted over the conversation."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the call's arguments: JSON text, never cut short, complete before the next call starts."""

    index: int
    arguments: str


@dataclass(frozen=True)
class StepTrace:
    """The draft tree of one step, and the time of the turn so far, for those who asked for it."""

    tree: TreeTrace
    timing: RequestTiming


@dataclass(frozen=True)
class Finished:
    """The last event. reason: "stop", "length", "tool_calls" or "error"; stop: the text or id that ended it."""

    reason: str
    usage: RequestUsage
    timing: RequestTiming
    reasoning_tokens: int = 0
    stop: str | int | None = None
    error: str | None = None


ChatEvent = StepTokens | ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | StepTrace | Finished


class ChatRunner(Protocol):
    """Runs chat turns; what every chat endpoint is given."""

    def run(self, job: ChatJob) -> AsyncIterator[ChatEvent]:
        """Events until `Finished`. `BadRequest` comes before the first event. Closing the iterator cancels."""
        ...

    async def count(self, job: ChatJob) -> int:
        """Tokens of the rendered prompt."""
        ...

    async def render(self, job: ChatJob) -> list[int]:
        """Token ids of the rendered prompt."""
        ...
