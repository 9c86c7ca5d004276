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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from engine_runtime.sampling import SamplingParams
from engine_runtime.server.chat_request import MAX_TOOLS, ToolName
from engine_runtime.server.contract import ChatJob, ResponseFormat, Tool
from engine_runtime.server.fields import Body, JSONObjectFormat, SamplingFields, TextFormat, response_format

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

Id = Annotated[str, Field(min_length=1, max_length=512)]


def _kind(value: Any) -> str:
    """The tag of an item or a tool."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None:
        return "message"
    return "hosted" if isinstance(kind, str) and kind.startswith(HOSTED) else str(kind)[:80]


# ---- input ----


class TextPart(Body):
    """The only content there is: this engine reads no images and no files."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Content = str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        text = "".join(part.text for part in self.content or ())
        if text or self.encrypted_content is None:
            return text
        try:
            return base64.b64decode(self.encrypted_content, validate=True).decode()
        except (binascii.Error, ValueError):
            _log.warning("a reasoning item of another server was left out")
            return ""


def coded_reasoning(text: str) -> str:
    """What `encrypted_content` holds."""
    return base64.b64encode(text.encode()).decode()


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: Id
    name: ToolName
    namespace: ToolName | None = None
    arguments: str


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: Id
    name: ToolName
    namespace: ToolName | None = None
    input: str


class CallOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: Content


class Hosted(Body):
    """A tool that OpenAI's API brings along, or an item of one; there is none here, and it is left out."""

    type: Annotated[str, Field(pattern=f"^({'|'.join(HOSTED)})")]


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[Hosted, Tag("hosted")],
    Discriminator(_kind),
]


# ---- tools ----


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Body):
    """The model is told of a grammar, but not held to it: it would have to hold inside a JSON string."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: ToolName
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[Hosted, Tag("hosted")],
    Discriminator(_kind),
]


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


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


# ---- the body ----


def _refuse(sentence: str) -> BeforeValidator:
    """Anything but null (false) is refused, and `sentence` says why."""

    def check(value: Any) -> Any:
        if value not in (None, False):
            raise PydanticCustomError("refused", sentence)  # type: ignore[arg-type]
        return value

    return BeforeValidator(check)


_STATELESS = _refuse("nothing is stored here, send the whole conversation as input")


class Reasoning(Body):
    effort: str | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class TextOptions(Body):
    format: Annotated[TextFormat | JSONObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesRequest(SamplingFields):
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    n: Literal[1] | None = None
    tools: Annotated[list[AnyTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Annotated[list[str] | None, Field(max_length=64)] = None
    previous_response_id: Annotated[None, _STATELESS] = None
    conversation: Annotated[None, _STATELESS] = None
    background: Annotated[Literal[False] | None, _refuse("answers are given at once or streamed, not kept")] = None

    @property
    def wants_reasoning_back(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())


def to_job(body: ResponsesRequest, params: SamplingParams) -> tuple[ChatJob, dict[str, ClientTool]]:
    """The job, and what its tools are to the client, by the names that the model knows. Raises `BadRequest`."""
    declared = list(_tools(body.tools or (), None))
    choice = body.tool_choice or "auto"
    job = ChatJob(
        messages=_messages(body),
        params=params,
        tools=tuple(tool for tool, _ in declared),
        tool_choice=ClientTool(choice.name, choice.namespace).model_name if isinstance(choice, NamedTool) else choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=body.reasoning is None or body.reasoning.effort not in ("none", "minimal"),
        response_format=_response_format(body),
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
    for index, item in enumerate(body.input):
        if isinstance(item, MessageItem):
            if item.role == "assistant":
                _assistant(messages, "content")["content"] = _text(item.content)
            else:
                messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, ReasoningItem):
            _assistant(messages, "reasoning_content")["reasoning_content"] = item.text
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, Hosted):
            _log.warning("input[%d]: an item of the hosted tool %.64s is left out", index, item.type)
        else:
            arguments = item.arguments if isinstance(item, FunctionCallItem) else json.dumps({"input": item.input})
            name = ClientTool(item.name, item.namespace).model_name
            call = {"id": item.call_id, "function": {"name": name, "arguments": arguments}}
            _assistant(messages, "tool_calls").setdefault("tool_calls", []).append(call)
    return messages


def _assistant(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """The assistant message that the next item of a turn belongs to: one turn is reasoning, text, calls, in this order,
    each an item of its own."""
    last = messages[-1] if messages else {}
    begun = last.get("role") == "assistant"
    if not begun or part == "reasoning_content" or (part == "content" and (last["content"] or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _tools(given: Sequence[Any], namespace: str | None) -> Iterator[tuple[Tool, ClientTool]]:
    """The tools of a list of declarations, of the namespaces in it as well."""
    for index, tool in enumerate(given):
        if isinstance(tool, NamespaceTool):
            yield from _tools(tool.tools, tool.name)
        elif isinstance(tool, Hosted):
            _log.warning("tools[%d]: the hosted tool %.64s does not exist here and is left out", index, tool.type)
        elif isinstance(tool, CustomTool):
            custom = ClientTool(tool.name, namespace, custom=True)
            description = tool.description or ""
            if tool.format is not None and tool.format.definition is not None:
                description += f"\n\nThe input follows this {tool.format.syntax} grammar:\n{tool.format.definition}"
            yield Tool(custom.model_name, description, _CUSTOM_SCHEMA, strict=True), custom
        else:
            function = ClientTool(tool.name, namespace)
            schema = tool.parameters or {}
            yield Tool(function.model_name, tool.description or "", schema, bool(tool.strict)), function


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, JSONObjectFormat):
        return ResponseFormat("json_object")
    if isinstance(wanted, SchemaFormat):
        return ResponseFormat("json_schema", wanted.schema_)
    return response_format(body)
