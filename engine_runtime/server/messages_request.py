"""The body of POST /v1/messages (Anthropic's API, as Claude Code sends it), and the job that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import BadRequest, ChatJob, ResponseFormat, Tool
from engine_runtime.server.fields import Body

MAX_MESSAGES = 10_000
# a block of the system prompt that differs in every request, and so would spoil the prefix cache
CHANGING_HEADER = "x-anthropic-billing-header"

_log = logging.getLogger(__name__)


class ToolChoice(Body):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: str
    budget_tokens: int | None = None


class OutputConfig(Body):
    """effort has no meaning here."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class ContextManagement(Body):
    edits: list[dict[str, Any]] | None = None


class InputMessage(Body):
    role: str
    content: str | list[dict[str, Any]]


class CountRequest(Body):
    """What a prompt is made of."""

    model: Annotated[str | None, Field(max_length=512)] = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=1024)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]] | None, Field(max_length=16)
    ] = None
    stream: bool = False
    metadata: dict[str, Any] | None = None


def to_job(body: CountRequest, params: SamplingParams) -> ChatJob:
    """The job; raises `BadRequest`. Blocks for caching are ignored: every prefix is cached here."""
    choice = body.tool_choice
    return ChatJob(
        messages=_messages(body),
        params=params,
        tools=_tools(body.tools or []),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking=body.thinking is not None and body.thinking.type != "disabled",
        preserve_thinking=_keeps_thinking(body.context_management),
        response_format=_response_format(body.output_config.format if body.output_config else None),
        stop=tuple(body.stop_sequences or ()) if isinstance(body, MessagesRequest) else (),
        token_ids=True,
    )


def _keeps_thinking(management: ContextManagement | None) -> bool:
    """Whether the client asks to keep the thinking of earlier turns; else the chat template drops it."""
    edits = management.edits or [] if management is not None else []
    return any(str(edit.get("type")).startswith("clear_thinking") and edit.get("keep") == "all" for edit in edits)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = _system(body.system, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        blocks = message.content
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        if message.role == "user":
            messages += _user(blocks, f"{where}.content")
        elif message.role == "assistant":
            messages.append(_assistant(blocks, f"{where}.content"))
        elif message.role == "system":
            messages.append({"role": "system", "content": _system(blocks, f"{where}.content")})
        else:
            expected = "user, assistant or system"
            raise BadRequest(f"{where}.role: expected {expected}, found {message.role!r:.80}", f"{where}.role")
    if messages[-1]["role"] == "assistant":
        sentence = "messages: the last one must be the user's, an answer cannot be begun for the model"
        raise BadRequest(sentence, "messages")
    return messages


def _system(system: str | list[dict[str, Any]] | None, where: str) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, f"{where}[{index}]") for index, block in enumerate(system)]
    return "\n\n".join(text for text in texts if not text.startswith(CHANGING_HEADER))


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results of tools as messages of their own, before the text beside them."""
    results, texts = [], []
    for index, block in enumerate(blocks):
        here = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            if isinstance(content, list):
                content = "".join(_text(part, f"{here}.content[{i}]") for i, part in enumerate(content))
            content = _string(content, f"{here}.content")
            if block.get("is_error") and not content:
                content = "error"
            id_ = _string(block.get("tool_use_id"), f"{here}.tool_use_id")
            results.append({"role": "tool", "tool_call_id": id_, "content": content})
        else:
            texts.append(_text(block, here))
    return results + ([{"role": "user", "content": "\n\n".join(texts)}] if texts or not results else [])


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for index, block in enumerate(blocks):
        here, kind = f"{where}[{index}]", block.get("type")
        if kind == "tool_use":
            name = _string(block.get("name"), f"{here}.name")
            call = {"id": block.get("id"), "function": {"name": name, "arguments": block.get("input")}}
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            turn["reasoning_content"] += _string(block.get("thinking"), here)
        elif kind != "redacted_thinking":
            turn["content"] += _text(block, here)
    return turn


def _text(block: Any, where: str) -> str:
    if isinstance(block, Mapping) and block.get("type") == "text":
        return _string(block.get("text"), where)
    kind = block.get("type") if isinstance(block, Mapping) else block
    raise BadRequest(f"{where}: this engine reads text, tools and thinking, found a block of type {kind!r:.80}", where)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where}: expected text, found {value!r:.80}", where)
    return value


def _tools(given: list[dict[str, Any]]) -> tuple[Tool, ...]:
    tools = []
    for index, tool in enumerate(given):
        where, kind, name = f"tools[{index}]", tool.get("type") or "custom", tool.get("name")
        if kind != "custom":
            _log.warning("%s: the hosted tool %.64r does not exist here and is left out", where, kind)
            continue
        schema, description = tool.get("input_schema") or {}, tool.get("description") or ""
        if not isinstance(name, str) or not isinstance(schema, dict) or not isinstance(description, str):
            raise BadRequest(f"{where}: expected a name, a description (text) and an input_schema (object)", where)
        tools.append(Tool(name, description, schema, bool(tool.get("strict"))))
    return tuple(tools)


def _tool_choice(choice: ToolChoice | None) -> str:
    if choice is None or choice.type in ("auto", "none"):
        return "auto" if choice is None else choice.type
    if choice.type == "any":
        return "required"
    if choice.type == "tool" and choice.name:
        return choice.name
    raise BadRequest(f"tool_choice.type: expected auto, any, tool or none, found {choice.type!r:.80}", "tool_choice")


def _response_format(given: Mapping[str, Any] | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.get("type") == "json_schema" and isinstance(given.get("schema"), Mapping):
        return ResponseFormat("json_schema", given["schema"])
    where = "output_config.format"
    raise BadRequest(f"{where}: expected json_schema with a schema", where)
