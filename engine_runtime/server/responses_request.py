"""The body of POST /v1/responses, and the job that it asks for.

Stateless: a client sends the whole conversation as `input` each time, as Codex does. A reasoning item is given back
with its text in `encrypted_content` where the client asks for that (it is coded, not secret), so that a client that
keeps nothing else can return it. `reasoning.effort` turns thinking off where it is "none" or "minimal", and says
nothing else: the model has no degrees.

The model knows functions only, by one name each. A tool of a namespace is called NAMESPACE__NAME; a custom tool, whose
input is text and no JSON, has that text as its one argument.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import BadRequest, ChatJob, ResponseFormat, Tool
from engine_runtime.server.conversation import content_text
from engine_runtime.server.fields import Body, SamplingFields, response_format

MAX_ITEMS = 20_000
HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "local_shell",
    "tool_search",
)
_CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientTool:
    """A tool as the client knows it. custom: it takes plain text."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def model_name(self) -> str:
        """The name by which the model calls it."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class TextOptions(Body):
    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields):
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=1024)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Annotated[list[str] | None, Field(max_length=64)] = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: str | None = None

    @property
    def wants_reasoning_back(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())


def to_job(body: ResponsesRequest, params: SamplingParams) -> tuple[ChatJob, dict[str, ClientTool]]:
    """The job, and what its tools are to the client, by the names that the model knows. Raises `BadRequest`."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise BadRequest(f"{name}: nothing is stored here, send the whole conversation as input", name)
    if body.background:
        raise BadRequest("background: answers are given at once or streamed, not kept", "background")
    if body.n not in (None, 1):
        raise BadRequest(f"n: a response is one answer, found {body.n}", "n")
    declared = list(_tools(body.tools or [], "tools", None))
    job = ChatJob(
        messages=_messages(body),
        params=params,
        tools=tuple(tool for tool, _ in declared),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=body.reasoning is None or body.reasoning.effort not in ("none", "minimal"),
        response_format=_response_format(body.text.format if body.text else None) or response_format(body),
        stop=body.stops,
        include_stop=body.include_stop_str_in_output,
    )
    return job, {tool.name: client_tool for tool, client_tool in declared}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise BadRequest("input: expected text or at least one item, found none", "input")
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), content_text(item.get("content"), f"{where}.content")
        if role == "assistant":
            _assistant(messages, "content")["content"] = content
        elif role in ("user", "system", "developer"):
            messages.append({"role": role, "content": content})
        else:
            expected = "user, assistant, system or developer"
            raise BadRequest(f"{where}.role: expected {expected}, found {role!r:.80}", f"{where}.role")
    elif kind == "reasoning":
        _assistant(messages, "reasoning_content")["reasoning_content"] = _reasoning(item)
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        name = _client_tool(item, where).model_name
        call = {"id": _string(item, "call_id", where), "function": {"name": name, "arguments": arguments}}
        _assistant(messages, None).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = content_text(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
    elif isinstance(kind, str) and kind.removesuffix("_call").startswith(HOSTED):
        _log.warning("%s: an item of the hosted tool %s is left out", where, kind[:64])
    else:
        raise BadRequest(f"{where}.type: this server knows no item of type {kind!r:.80}", f"{where}.type")


def _assistant(messages: list[dict[str, Any]], part: str | None) -> dict[str, Any]:
    """The assistant message that the next item of a turn belongs to: one turn is reasoning, text, calls, in this order,
    each an item of its own."""
    last = messages[-1] if messages else {}
    begun = last.get("role") == "assistant"
    if not begun or (part == "reasoning_content") or (part == "content" and (last["content"] or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = [part for part in item.get("content") or [] if isinstance(part, Mapping)]
    text = "".join(str(part.get("text", "")) for part in parts)
    coded = item.get("encrypted_content")
    if not text and isinstance(coded, str):
        try:
            return base64.b64decode(coded, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            _log.warning("a reasoning item of another server was left out")
    return text


def coded_reasoning(text: str) -> str:
    """What `encrypted_content` holds."""
    return base64.b64encode(text.encode()).decode()


def _tools(given: list[Any], where: str, namespace: str | None) -> Iterator[tuple[Tool, ClientTool]]:
    """The tools of a list of declarations, of the namespaces in it as well."""
    for index, tool in enumerate(given):
        here = f"{where}[{index}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        if kind in ("function", "custom"):
            yield _tool(tool, here, namespace)
        elif kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
            yield from _tools(tool["tools"], f"{here}.tools", _client_tool(tool, here).name)
        elif isinstance(kind, str) and kind.startswith(HOSTED):
            _log.warning("%s: the hosted tool %s does not exist here and is left out", here, kind[:64])
        else:
            raise BadRequest(f"{here}.type: expected function, custom or namespace, found {kind!r:.80}", f"{here}.type")


def _tool(given: Mapping[str, Any], where: str, namespace: str | None) -> tuple[Tool, ClientTool]:
    found = _client_tool({**given, "namespace": namespace}, where)
    description, parameters = given.get("description") or "", given.get("parameters") or {}
    if not isinstance(description, str) or not isinstance(parameters, Mapping):
        raise BadRequest(f"{where}: expected a description (text) and parameters (a JSON schema)", where)
    if not found.custom:
        return Tool(found.model_name, description, parameters, bool(given.get("strict"))), found
    form = given.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        # the model is told of the grammar, but not held to it: it would have to hold inside a JSON string
        description += f"\n\nThe input follows this {form.get('syntax')} grammar:\n{form['definition']}"
    return Tool(found.model_name, description, _CUSTOM_SCHEMA, strict=True), found


def _client_tool(item: Mapping[str, Any], where: str) -> ClientTool:
    """The tool that `item`, a declaration or a call, names."""
    namespace = _string(item, "namespace", where) if item.get("namespace") is not None else None
    return ClientTool(_string(item, "name", where), namespace, str(item.get("type")).startswith("custom"))


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where}.{key}: expected a string, found {value!r:.80}", f"{where}.{key}")
    return value


def _tool_choice(given: str | dict[str, Any] | None) -> str:
    if given is None or given in ("auto", "none", "required"):
        return str(given or "auto")
    if isinstance(given, dict) and given.get("type") in ("function", "custom"):
        return _client_tool(given, "tool_choice").model_name
    expected = "auto, none, required or a function's name"
    raise BadRequest(f"tool_choice: expected {expected}, found {given!r:.80}", "tool_choice")


def _response_format(given: Mapping[str, Any] | None) -> ResponseFormat | None:
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind == "json_schema" and isinstance(given.get("schema"), Mapping):
        return ResponseFormat("json_schema", given["schema"])
    raise BadRequest("text.format: expected text, json_object, or json_schema with a schema", "text.format")
