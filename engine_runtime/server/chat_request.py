"""The body of POST /v1/chat/completions, and the job that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool

from engine_runtime.generation import MAX_LOGPROBS
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import BadRequest, ChatJob, Tool
from engine_runtime.server.fields import Body, SamplingFields, response_format

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(Body):
    """Text is all that this engine reads: an image part, by URL or not, is refused."""

    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class FunctionDefinition(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Thinking(Body):
    """Moonshot's form of the switch. keep: "all" keeps the reasoning of earlier turns."""

    type: Literal["enabled", "disabled"] = "enabled"
    keep: Literal["all"] | None = None


class TemplateArguments(Body):
    """The chat template's variables that a request may set. "false" is false: a template would take it for true."""

    model_config = ConfigDict(strict=False)

    thinking: bool = True
    preserve_thinking: bool = False


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    tools: Annotated[list[ToolDefinition] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def to_job(body: ChatRequest, params: SamplingParams) -> ChatJob:
    """The job; `BadRequest` where fields contradict one another."""
    tools = tuple(
        Tool(f.name, f.description or "", f.parameters or {}, bool(f.strict))
        for f in (tool.function for tool in body.tools or ())
    )
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"tools: the name {twice!r} is given to more than one function", "tools")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs: goes with logprobs: true", "top_logprobs")
    return ChatJob(
        messages=[message.model_dump(exclude_unset=True) for message in body.messages],
        params=params,
        tools=tools,
        tool_choice=_tool_choice(body, names),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=_thinking(body),
        preserve_thinking=_preserve_thinking(body),
        response_format=response_format(body),
        stop=body.stops,
        include_stop=body.include_stop_str_in_output,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        trace=body.trace and bool(body.stream),
        token_ids=body.return_token_ids or body.continuous_usage,
    )


def _tool_choice(body: ChatRequest, names: list[str]) -> str:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise BadRequest(f"tool_choice: no tool is named {name[:128]!r}", "tool_choice")
        return name
    if choice == "required" and not names:
        raise BadRequest('tool_choice: "required" needs at least one tool', "tool_choice")
    return choice or "auto"


def _thinking(body: ChatRequest) -> bool:
    if body.thinking is not None:
        return body.thinking.type == "enabled"
    if body.chat_template_kwargs is not None and "thinking" in body.chat_template_kwargs.model_fields_set:
        return body.chat_template_kwargs.thinking
    return body.reasoning_effort != "none"


def _preserve_thinking(body: ChatRequest) -> bool:
    if body.thinking is not None and body.thinking.keep is not None:
        return True
    return body.chat_template_kwargs is not None and body.chat_template_kwargs.preserve_thinking
