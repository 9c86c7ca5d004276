"""Chat messages as clients send them -> the prompt of one turn, in the form that Kimi was trained on.

What clients differ in is made equal here, once: empty contents, lists of text parts, the name of the reasoning field,
the role `developer`, and above all the ids of tool calls. Kimi calls tools by `functions.NAME:N`, N counted over the
whole conversation; an agent that sends ids of its own back (`call_9f3a`) would teach the model a format that it cannot
continue. So every call of the history is renamed, and the tool results with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_runtime.chat import ChatError, ChatTemplate
from engine_runtime.server.contract import BadRequest, ChatJob, Tool
from engine_runtime.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[\w.\-]{1,256}")


@dataclass(frozen=True)
class RenderedPrompt:
    """ids: the prompt. history_calls: tool calls in it, so the number of the next one. starts_in_reasoning: whether
    the text to generate begins inside a think block."""

    ids: list[int]
    history_calls: int
    starts_in_reasoning: bool


def render_prompt(job: ChatJob, template: ChatTemplate, tokenizer: Tokenizer) -> RenderedPrompt:
    """The prompt of `job`. Raises `BadRequest` for messages or tools that cannot be rendered."""
    messages, calls = normalise(job.messages)
    tools = [declaration(tool) for tool in job.tools]
    try:
        ids = template.encode(messages, tools, thinking=job.thinking, preserve_thinking=job.preserve_thinking)
    except ChatError as error:
        raise BadRequest(str(error), "messages") from None
    think = tokenizer.special_tokens.get("<think>")
    return RenderedPrompt(ids, calls, think is not None and ids[-1:] == [think])


def declaration(tool: Tool) -> dict[str, Any]:
    """`tool` as the chat template declares it; whether its schema is enforced is nothing that the model sees."""
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def normalise(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """`messages` in one form, their calls numbered, and how many calls there are."""
    if not messages:
        raise BadRequest("messages: expected at least one message, found none", "messages")
    result = []
    calls = 0
    names: dict[str, str] = {}  # the client's id of a call -> ours; a client may use an id again in a later turn
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(f"{where}.role: expected one of {', '.join(ROLES)}, found {role!r}", f"{where}.role")
        plain = {
            "role": "system" if role == "developer" else role,
            "content": content_text(message.get("content"), f"{where}.content"),
        }
        name = message.get("name")
        if name is not None:
            plain["name"] = _string(name, f"{where}.name")
        if role == "assistant":
            plain["reasoning_content"] = _reasoning(message, where)
            renamed = [
                _call(call, calls + i, f"{where}.tool_calls[{i}]") for i, call in enumerate(_calls(message, where))
            ]
            names |= {old: call["id"] for old, call in renamed if old}
            if renamed:
                plain["tool_calls"] = [call for _, call in renamed]
            calls += len(renamed)
        if role == "tool":
            given = message.get("tool_call_id")
            if not isinstance(given, str) or not given:
                raise BadRequest(
                    f"{where}.tool_call_id: expected the id of the call that this result answers, found {given!r}",
                    f"{where}.tool_call_id",
                )
            plain["tool_call_id"] = names.get(given, given)
        result.append(plain)
    return result, calls


def content_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where}: expected text, null or a list of text parts, found {content!r:.80}", where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = "refusal" if kind == "refusal" else "text"
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(part.get(key), str):
        return part[key]
    raise BadRequest(f"{where}: this engine reads text parts only, found one of type {kind!r}", where)


def _reasoning(message: Mapping[str, Any], where: str) -> str:
    """Clients send the reasoning back under either name; some under both."""
    for key in ("reasoning", "reasoning_content"):
        if message.get(key):
            return _string(message[key], f"{where}.{key}")
    return ""


def _calls(message: Mapping[str, Any], where: str) -> Sequence[Any]:
    calls = message.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRequest(f"{where}.tool_calls: expected a list, found {calls!r:.80}", f"{where}.tool_calls")
    return calls


def _call(call: Any, number: int, where: str) -> tuple[str | None, dict[str, Any]]:
    """The client's id of `call`, and the call under ours."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where}: expected an object with a function, found {call!r:.80}", where)
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        expected = "up to 256 letters, digits, '_', '-' or '.'"
        raise BadRequest(f"{where}.function.name: expected {expected}, found {name!r:.80}", where)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = "{}"
    elif isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    renamed = {
        "id": f"functions.{name}:{number}",
        "type": "function",
        "function": {"name": name, "arguments": _string(arguments, f"{where}.function.arguments")},
    }
    old = call.get("id")
    return (old if isinstance(old, str) else None), renamed


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{where}: expected a string, found {value!r:.80}", where)
    return value
