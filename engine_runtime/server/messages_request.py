"""The body of POST /v1/messages (Anthropic's API, as Claude Code sends it), and the job that it asks for."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from engine_runtime.sampling import SamplingParams
from engine_runtime.server.chat_request import MAX_MESSAGES, MAX_TOOLS, ToolName
from engine_runtime.server.contract import BadRequest, ChatJob, ResponseFormat, Tool
from engine_runtime.server.fields import MAX_STOPS, Body, StopText

# a block of the system prompt that differs in every request, and so would spoil the prefix cache
CHANGING_HEADER = "x-anthropic-billing-header"

_log = logging.getLogger(__name__)

Id = Annotated[str, Field(min_length=1, max_length=512)]


class TextBlock(Body):
    """The only content there is: this engine reads no images and no documents."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Of another server; nobody here can read it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Id
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserMessage(Body):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Body):
    """Claude Code sends some within the conversation."""

    role: Literal["system"]
    content: str | list[TextBlock]


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ClientTool(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class HostedTool(Body):
    """A tool that Anthropic's API brings along, such as web_search_20250305; there is none here."""

    type: Annotated[str, Field(pattern=r"^([a-z_]+_[0-9]{8}|mcp_toolset)$")]


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "hosted"


AnyTool = Annotated[
    Annotated[ClientTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_kind_of_tool)
]


class ToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """A budget has no meaning here."""

    type: Literal["enabled", "adaptive", "disabled"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """An effort has no meaning here."""

    format: SchemaFormat | None = None


class ContextEdit(Body):
    type: str
    keep: Any = None


class ContextManagement(Body):
    edits: Annotated[list[ContextEdit] | None, Field(max_length=64)] = None


class CountRequest(Body):
    """What a prompt is made of."""

    model: Annotated[str | None, Field(max_length=512)] = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnyTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop_sequences: Annotated[list[StopText] | None, Field(max_length=MAX_STOPS)] = None
    stream: bool = False


def to_job(body: CountRequest, params: SamplingParams) -> ChatJob:
    """The job; raises `BadRequest`. Blocks for caching are ignored: every prefix is cached here."""
    choice = body.tool_choice
    wanted = body.output_config.format if body.output_config is not None else None
    return ChatJob(
        messages=_messages(body),
        params=params,
        tools=_tools(body.tools or []),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking=body.thinking is not None and body.thinking.type != "disabled",
        preserve_thinking=_keeps_thinking(body.context_management),
        response_format=ResponseFormat("json_schema", wanted.schema_) if wanted is not None else None,
        stop=tuple(body.stop_sequences or ()) if isinstance(body, MessagesRequest) else (),
        token_ids=True,
    )


def _keeps_thinking(management: ContextManagement | None) -> bool:
    """Whether the client asks to keep the thinking of earlier turns; else the chat template drops it."""
    edits = management.edits or [] if management is not None else []
    return any(edit.type.startswith("clear_thinking") and edit.keep == "all" for edit in edits)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append(_system(body.system))
    for message in body.messages:
        if message.role == "user":
            messages += _user(message)
        elif message.role == "assistant":
            messages.append(_assistant(message))
        else:
            messages.append(_system(message.content))
    if messages[-1]["role"] == "assistant":
        sentence = "messages: the last one must be the user's, an answer cannot be begun for the model"
        raise BadRequest(sentence, "messages")
    return messages


def _blocks(content: Any) -> list[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content or []


def _system(content: str | list[TextBlock]) -> dict[str, Any]:
    texts = [block.text for block in _blocks(content) if not block.text.startswith(CHANGING_HEADER)]
    return {"role": "system", "content": "\n\n".join(texts)}


def _user(message: UserMessage) -> list[dict[str, Any]]:
    """Results of tools as messages of their own, before the text beside them."""
    results, texts = [], []
    for block in _blocks(message.content):
        if isinstance(block, ToolResultBlock):
            text = "".join(part.text for part in _blocks(block.content))
            content = text or ("error" if block.is_error else "")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            texts.append(block.text)
    return results + ([{"role": "user", "content": "\n\n".join(texts)}] if texts or not results else [])


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for block in _blocks(message.content):
        if isinstance(block, ToolUseBlock):
            call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ThinkingBlock):
            turn["reasoning_content"] += block.thinking
        elif isinstance(block, TextBlock):
            turn["content"] += block.text
    return turn


def _tools(given: list[ClientTool | HostedTool]) -> tuple[Tool, ...]:
    tools = []
    for index, tool in enumerate(given):
        if isinstance(tool, HostedTool):
            _log.warning("tools[%d]: the hosted tool %.64s does not exist here and is left out", index, tool.type)
        else:
            tools.append(Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict)))
    return tuple(tools)


def _tool_choice(choice: ToolChoice | NamedToolChoice | None) -> str:
    if isinstance(choice, NamedToolChoice):
        return choice.name
    return "auto" if choice is None else "required" if choice.type == "any" else choice.type
