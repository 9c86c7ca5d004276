"""What a turn may contain, as a grammar over tokens: Kimi's own call format, and the response format.

A grammar starts where the reasoning ends. `auto`: free text, but a section of calls, once begun, names declared tools
and holds valid arguments. `required` or a name: a section and nothing else. `none`: no section. Arguments follow the
tool's schema where the tool is strict or the call is forced, else they are any JSON object; a schema that cannot be
enforced whole is an error where the tool is strict. Blanks inside JSON are capped, since a model that may go on
printing them forever sometimes does. Calls are numbered on from those of the prompt, as the history of the next turn
will number them: so that prompt repeats the tokens of this answer, and finds them in the prefix cache.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from engine_runtime.generation import Constraint
from engine_runtime.server.contract import BadRequest, ChatJob, ResponseFormat, Tool
from engine_runtime.server.conversation import TOOL_NAME, RenderedPrompt
from engine_runtime.tokenizer import Tokenizer

WHITESPACE = r"[ \n\r\t]{0,16}"
MAX_GRAMMAR_CHARS = 1 << 18
MAX_DEPTH = 64
MAX_TOOLS = 512
MAX_CALLS = 64  # in one turn
TEXT = r"/(.|\n)+/"

_log = logging.getLogger(__name__)


def constraint_for(job: ChatJob, rendered: RenderedPrompt, tokenizer: Tokenizer) -> Constraint | None:
    """The constraint of a turn, None for free text. Raises `BadRequest` for what contradicts itself or cannot be."""
    _check_tools(job)
    markers = tuple(
        tokenizer.special_tokens[name]
        for name in ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
        if name in tokenizer.special_tokens
    )
    end = tokenizer.special_tokens.get("</think>")
    after = (end,) if rendered.starts_in_reasoning and end is not None else ()
    calls = job.tools and job.tool_choice != "none"
    if calls and len(markers) < 2:
        raise BadRequest("tools: this model's vocabulary has no markers for tool calls", "tools")
    forced = bool(calls) and job.tool_choice != "auto"
    wanted = job.response_format
    if wanted is not None and (forced or (calls and wanted.kind == "grammar")):
        raise BadRequest(f"response_format: {wanted.kind} cannot be met together with these tools", "response_format")
    stops = tuple(sorted(tokenizer.stop_ids))
    if not calls:
        # a history of calls tempts the model to go on calling
        banned = markers if job.tools or rendered.history_calls or wanted is not None else ()
        if wanted is None:
            return Constraint(banned=banned) if banned else None
        return Constraint(format_grammar(wanted), after, banned, banned_before=stops)
    rules = _section(job, rendered.history_calls, tokenizer, forced)
    if forced:
        # the reasoning may not end in a way that leaves no room for the call
        return Constraint(LLMatcher.grammar_from_lark("start: section\n" + rules), after, banned_before=stops + markers)
    if wanted is not None:
        format_grammar(wanted)  # its errors are the client's to know
        grammar = f"start: format | section\nformat: {_lark_format(wanted)}\n{rules}"
        return Constraint(LLMatcher.grammar_from_lark(grammar), after, banned_before=stops + markers)
    free = f"start: TEXT? (section TEXT?)?\nTEXT: {TEXT}\n"
    # a call may also begin, and so end the reasoning, without </think>
    return Constraint(LLMatcher.grammar_from_lark(free + rules), after, banned_before=markers if after else ())


def _check_tools(job: ChatJob) -> None:
    names = [tool.name for tool in job.tools]
    if len(names) > MAX_TOOLS:
        raise BadRequest(f"tools: expected at most {MAX_TOOLS}, found {len(names)}", "tools")
    for name in names:
        if not TOOL_NAME.fullmatch(name):
            raise BadRequest(f"tools: name {name!r:.80}: expected letters, digits, '_', '-' or '.'", "tools")
        if names.count(name) > 1:
            raise BadRequest(f"tools: {name} is declared more than once", "tools")
    if job.tool_choice in ("auto", "none"):
        return
    if not job.tools:
        raise BadRequest(f"tool_choice: {job.tool_choice!r} needs tools, the request has none", "tool_choice")
    if job.tool_choice != "required" and job.tool_choice not in names:
        raise BadRequest(f"tool_choice: {job.tool_choice!r} is not among the tools", "tool_choice")


def _section(job: ChatJob, number: int, tokenizer: Tokenizer, forced: bool) -> str:
    """Lark rules for `section`: calls of the tools that may be called, numbered from `number`."""
    named = forced and job.tool_choice != "required"
    tools = [tool for tool in job.tools if not named or tool.name == job.tool_choice]

    def marker(name: str) -> str:
        return f"<[{tokenizer.special_id(name)}]>"

    begin, arguments, end = (marker(f"<|tool_call_{kind}|>") for kind in ("begin", "argument_begin", "end"))
    names = [_lark_string(f"functions.{tool.name}:") for tool in tools]
    calls = [f"{begin} {name} number::_ {arguments} args_{i} {end}" for i, name in enumerate(names)]
    most = MAX_CALLS if job.parallel_tool_calls else 1
    # a rule's parameter (`::`) is how many calls came before: its lowest bits, `[0:7]`, hold up to MAX_CALLS
    return "\n".join(
        [
            f"section: {marker('<|tool_calls_section_begin|>')} calls::0 {marker('<|tool_calls_section_end|>')}",
            f"calls::_: call::_ | call::_ calls::incr([0:7]) %if lt([0:7], {most - 1})",
            "call::_: " + " | ".join(calls),
            "number::_: " + " | ".join(f'"{number + i}" %if eq([0:7], {i})' for i in range(most)),
            *(f"args_{i}: %json {json.dumps(_argument_schema(tool, forced))}" for i, tool in enumerate(tools)),
            "",
        ]
    )


def _argument_schema(tool: Tool, forced: bool) -> dict[str, Any]:
    """The schema that the arguments of `tool` are held to: its own where that can be done, and must be if strict."""
    anything = _with_blanks({"type": "object"})
    if not (tool.strict or forced) or not tool.parameters:
        return anything
    where = f"tools: {tool.name}.parameters"
    schema = check_schema(tool.parameters, where)
    schema.setdefault("type", "object")
    schema["x-guidance"]["lenient"] = not tool.strict  # what the compiler does not know is then not enforced
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    if not message:
        return schema
    if tool.strict:
        raise BadRequest(f"{where}: {_first_line(message)}", "tools")
    _log.warning("%s: any object is accepted, the schema cannot be enforced: %s", where, _first_line(message))
    return anything


def format_grammar(wanted: ResponseFormat) -> str:
    """The llguidance grammar of a response format; `BadRequest` where it is not one."""
    grammar = LLMatcher.grammar_from_lark(f"start: format\nformat: {_lark_format(wanted)}\n")
    if wanted.kind == "grammar":
        if not isinstance(wanted.value, str) or len(wanted.value) > MAX_GRAMMAR_CHARS:
            raise BadRequest(f"grammar: expected a Lark grammar of at most {MAX_GRAMMAR_CHARS} characters", "grammar")
        grammar = LLMatcher.grammar_from_lark(wanted.value)
    message = LLMatcher.validate_grammar(grammar)
    if message:
        raise BadRequest(f"{wanted.kind}: {_first_line(message)}", "response_format")
    return grammar


def _lark_format(wanted: ResponseFormat) -> str:
    """The right-hand side of a Lark rule for `wanted`."""
    kind, value = wanted.kind, wanted.value
    if kind == "json_object":
        return f"%json {json.dumps(_with_blanks({'type': 'object'}))}"
    if kind == "json_schema":
        return f"%json {json.dumps(check_schema(value, 'json_schema'))}"
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise BadRequest("choice: expected a list of at least one text, none empty", "choice")
        if sum(map(len, value)) > MAX_GRAMMAR_CHARS:
            raise BadRequest(f"choice: expected at most {MAX_GRAMMAR_CHARS} characters in all", "choice")
        return " | ".join(map(_lark_string, value))
    if kind == "regex":
        if not isinstance(value, str) or not 0 < len(value) <= MAX_GRAMMAR_CHARS:
            raise BadRequest(f"regex: expected 1 to {MAX_GRAMMAR_CHARS} characters", "regex")
        if re.search(r"(?<!\\)(\\\\)*\\$", value):
            raise BadRequest("regex: the backslash at its end escapes nothing", "regex")
        return _regex_literal(value)
    return '""'  # "grammar" is a grammar of its own


def _lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _regex_literal(pattern: str) -> str:
    """`pattern` between the slashes of a Lark regular expression."""
    escaped = re.sub(r"(\\.)|/", lambda match: match.group(1) or r"\/", pattern, flags=re.S)
    return "/" + escaped.replace("\n", r"\n") + "/"


def check_schema(schema: Any, where: str) -> dict[str, Any]:
    """A copy of the JSON `schema` that caps blanks. `BadRequest` where it is no object, too large or too deep."""
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{where}: expected a JSON schema (an object), found {schema!r:.80}", where)
    if _depth(schema) > MAX_DEPTH:
        raise BadRequest(f"{where}: expected at most {MAX_DEPTH} nested levels", where)
    if len(json.dumps(schema)) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"{where}: expected at most {MAX_GRAMMAR_CHARS} characters of JSON", where)
    return _with_blanks(schema)


def _with_blanks(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with blanks capped, and without its own address, which need not be one that the compiler takes."""
    kept = {key: value for key, value in schema.items() if key != "$id"}
    return {**kept, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _depth(value: Any) -> int:
    """Nested levels of `value`, counted up to one past `MAX_DEPTH`."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            item
            for inner in level
            if isinstance(inner, Mapping | list)
            for item in (inner.values() if isinstance(inner, Mapping) else inner)
        ]
    return depth


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:300]
