"""Grammars of a turn, run by llguidance's own matcher over token sequences."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.tiktoken import lltokenizer_from_encoding

from engine_runtime.generation import Constraint
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import BadRequest, ChatJob, ResponseFormat, Tool
from engine_runtime.server.conversation import RenderedPrompt
from engine_runtime.server.tool_grammar import MAX_CALLS, constraint_for
from engine_runtime.tokenizer import Tokenizer
from tests.server.vocabulary import (
    ARGUMENTS,
    CALL,
    END_SECTION,
    SECTION,
    call,
    ids,
    real_tokenizer,
    section,
    tokenizer,
)

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path"],
    "additionalProperties": False,
}
READ, BASH = Tool("Read", "", SCHEMA), Tool("mcp.bash-run", "", {"type": "object"})
STRICT = Tool("Read", "", SCHEMA, strict=True)
END = "<|im_end|>"
THINKING = RenderedPrompt([], 3, True)
PLAIN = RenderedPrompt([], 3, False)


@cache
def matcher_tokenizer(ours: Tokenizer) -> LLTokenizer:
    return lltokenizer_from_encoding(ours._bpe, n_vocab=ours.vocab_size, eos_token=sorted(ours.stop_ids))


def constrain(
    rendered: RenderedPrompt = PLAIN, vocabulary: Tokenizer | None = None, **options: Any
) -> Constraint | None:
    return constraint_for(ChatJob([], SamplingParams(), **options), rendered, vocabulary or tokenizer())


def accepts(constraint: Constraint | None, text: str, vocabulary: Tokenizer | None = None) -> bool:
    """Whether the whole of `text`, its end included, is a turn that the grammar allows."""
    assert constraint is not None and constraint.grammar is not None
    vocabulary = vocabulary or tokenizer()
    matcher = LLMatcher(matcher_tokenizer(vocabulary), constraint.grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = vocabulary.encode(text, allow_special=True)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def test_free_text_needs_no_constraint() -> None:
    assert constrain(RenderedPrompt([], 0, True)) is None


def test_without_tools_a_history_of_calls_is_not_continued() -> None:
    assert constrain(PLAIN) == Constraint(banned=tuple(ids(SECTION + CALL)))


def test_auto_leaves_text_free_and_holds_a_section_to_the_format() -> None:
    auto = constrain(tools=(READ, BASH))
    good = call("functions.Read:3", '{"path": "a", "line": 2}')
    for text in ("hello", "hello\n\n{x}", "ok " + section(good), section(good) + " after"):
        assert accepts(auto, text + END), text
    assert accepts(auto, section(good, call("functions.mcp.bash-run:4", '{\n  "any": [1, {"thing": null}]\n}')))
    for text in (
        section(call("functions.Write:3", "{}")),
        section(call("Read:3", "{}")),
        section(call("functions.Read:3", "[1]")),
        section(call("functions.Read:3", '{"path": ')),
        section(call("functions.Read:4", "{}")),  # the next number is 3
        SECTION + END_SECTION,
        SECTION + CALL + "functions.Read:3",
        call("functions.Read:3", "{}"),
        section(good) + section(good),
    ):
        assert not accepts(auto, text), text


def test_calls_are_numbered_on_from_the_history() -> None:
    """The next prompt numbers them so; another number here would cost it the prefix cache."""
    auto = constrain(RenderedPrompt([], 98, False), tools=(READ, BASH))
    calls = [call(f"functions.{(READ, BASH)[n % 2].name}:{98 + n}", "{}") for n in range(MAX_CALLS + 1)]
    for count in (1, 2, 3, MAX_CALLS):
        assert accepts(auto, section(*calls[:count]))
    assert not accepts(auto, section(*calls))
    assert not accepts(auto, section(calls[0], calls[0]))
    assert not accepts(auto, section(calls[0], calls[2]))
    assert not accepts(auto, section(calls[1]))


def test_auto_waits_for_the_end_of_the_reasoning() -> None:
    constraint = constrain(THINKING, tools=(READ,))
    assert constraint is not None
    assert constraint.after == (tokenizer().special_id("</think>"),)
    assert set(constraint.banned_before) == set(ids(SECTION + CALL)) and not constraint.banned


def test_the_same_with_the_real_vocabulary() -> None:
    kimi = real_tokenizer()
    good = '{"path": "größe/中文.py",\n "line": 12}'
    auto = constrain(THINKING, kimi, tools=(STRICT, BASH))
    assert auto is not None and auto.after == (163607,) and set(auto.banned_before) == {163595, 163597}
    answer = "Ich schaue nach… 👍\n" + section(call("functions.Read:3", good), call("functions.mcp.bash-run:4", "{}"))
    assert accepts(auto, answer + END, kimi) and accepts(auto, "👍" + END, kimi)
    for text in (
        section(call("functions.Read:4", good)),
        section(call("functions.Read:3", '{"line": 1}')),
        section(call("functions.Write:3", "{}")),
        call("functions.Read:3", good),
    ):
        assert not accepts(auto, text + END, kimi), text
    forced = constrain(PLAIN, kimi, tools=(READ, BASH), tool_choice="Read")
    assert accepts(forced, section(call("functions.Read:3", good)) + END, kimi)
    assert not accepts(forced, "x" + END, kimi)


def test_strict_tools_are_held_to_their_schema_and_others_to_an_object() -> None:
    other = call("functions.Read:3", '{"elsewhere": 1}')
    assert accepts(constrain(tools=(READ,)), section(other))
    assert not accepts(constrain(tools=(STRICT,)), section(other))
    assert accepts(constrain(tools=(STRICT,)), section(call("functions.Read:3", '{"path": "é", "line": 12}')))


@pytest.mark.parametrize("choice", ["required", "Read"])
def test_a_forced_call_leaves_room_for_nothing_else(choice: str) -> None:
    forced = constrain(THINKING, tools=(READ, BASH), tool_choice=choice)
    assert forced is not None
    assert accepts(forced, section(call("functions.Read:3", '{"path": "x"}')) + END)
    assert not accepts(forced, END)
    assert not accepts(forced, "text " + section(call("functions.Read:3", '{"path": "x"}')))
    assert not accepts(forced, section(call("functions.Read:3", "{}")))  # the schema holds, strict or not
    assert accepts(forced, section(call("functions.mcp.bash-run:3", "{}"))) is (choice == "required")
    assert set(tokenizer().stop_ids) <= set(forced.banned_before)  # no way out of the reasoning but </think>


def test_t11_none_forbids_calls() -> None:
    assert constrain(tools=(READ,), tool_choice="none") == Constraint(banned=tuple(ids(SECTION + CALL)))


def test_one_call_where_parallel_ones_are_off() -> None:
    one = constrain(tools=(READ,), parallel_tool_calls=False)
    good = call("functions.Read:3", "{}")
    assert accepts(one, section(good)) and not accepts(one, section(good, call("functions.Read:4", "{}")))


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    cases: list[tuple[ResponseFormat, list[str], list[str]]] = [
        (ResponseFormat("json_object"), ['{"a": 1}', "{}"], ["[]", "x", "", "{"]),
        (ResponseFormat("json_schema", schema), ['{"n": 4}', '{\n  "n": 4\n}'], ['{"n": "4"}', "{}"]),
        (ResponseFormat("regex", "x\\\\\\\\"), ["x\\\\"], ["x\\"]),
        (ResponseFormat("choice", ["a\x01\x7f\u2028\n\t\\'/🙂", "é"]), ["a\x01\x7f\u2028\n\t\\'/🙂", "é"], ["a", "e"]),
        (ResponseFormat("regex", r"a/b\/[0-9]+\n?"), ["a/b/12", "a/b/1\n"], ["a/b/", "ab12"]),
        (ResponseFormat("choice", ["yes", 'say "no"']), ["yes", 'say "no"'], ["maybe", "ye"]),
        (ResponseFormat("grammar", 'start: "a"+ B\nB: /b/'), ["aab"], ["b", "a"]),
    ]
    for wanted, good, bad in cases:
        constraint = constrain(THINKING, response_format=wanted)
        assert constraint is not None and set(constraint.banned_before) == set(tokenizer().stop_ids)
        assert all(accepts(constraint, text + END) for text in good), wanted
        assert not any(accepts(constraint, text + END) for text in bad), wanted


def test_a_format_beside_tools_allows_either() -> None:
    both = constrain(tools=(READ,), response_format=ResponseFormat("json_object"))
    assert accepts(both, '{"a": 1}' + END)
    assert accepts(both, section(call("functions.Read:3", "{}")) + END)
    assert not accepts(both, "text" + END)


def test_a9_blanks_in_json_are_capped() -> None:
    json_only = constrain(response_format=ResponseFormat("json_object"))
    assert accepts(json_only, '{"a":' + " " * 16 + "1}")
    assert not accepts(json_only, '{"a":' + " " * 17 + "1}")
    tools = constrain(tools=(READ,))
    assert not accepts(tools, section(call("functions.Read:3", "{" + "\n" * 40 + "}")))


def _one(name: str, schema: dict[str, Any], required: bool = True) -> dict[str, Any]:
    """An object with one property."""
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name] if required else [],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$defs": {"P": _one("c", {"$ref": "#/$defs/P"}, False)}, "$ref": "#/$defs/P"}, '{"c": {}}', '{"d": 1}'),
        (_one("v", {"anyOf": [{"type": "string"}, {"type": "null"}]}), '{"v": null}', '{"v": 1}'),
        (_one("größe", {"enum": ["klein", "groß", 3]}), '{"größe": "groß"}', '{"größe": "mittel"}'),
        (_one("m", {"type": "array", "items": {"type": "array", "minItems": 2}}), '{"m": [[1, 2.5]]}', '{"m": [[1]]}'),
        ({"properties": {"x": {"type": "boolean"}}, "required": ["x"]}, '{"x": true}', "[]"),
    ],
    ids=["recursive", "anyOf", "unicode enum", "nested arrays", "no type"],
)
def test_schemas_of_many_kinds(schema: dict[str, Any], good: str, bad: str) -> None:
    constraint = constrain(tools=(Tool("f", "", schema, strict=True),))
    assert accepts(constraint, section(call("functions.f:3", good)))
    assert not accepts(constraint, section(call("functions.f:3", bad)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": (READ,), "tool_choice": "Write"}, "'Write' is not among the tools"),
        ({"tools": (READ, READ)}, "Read is declared more than once"),
        ({"tools": (Tool("two words"),)}, "'two words'"),
        ({"tools": (Tool(""),)}, "name ''"),
        ({"tools": tuple(Tool(f"f{i}") for i in range(513))}, "at most 512, found 513"),
        (
            {"tools": (READ,), "tool_choice": "required", "response_format": ResponseFormat("json_object")},
            "these tools",
        ),
        ({"tools": (READ,), "response_format": ResponseFormat("grammar", "x")}, "these tools"),
        ({"response_format": ResponseFormat("json_schema", {"type": "nonsense"})}, "json_schema"),
        ({"response_format": ResponseFormat("json_schema", 5)}, "expected a JSON schema"),
        ({"response_format": ResponseFormat("regex", "foo**[")}, "regex"),
        ({"response_format": ResponseFormat("regex", "")}, "regex"),
        ({"response_format": ResponseFormat("regex", "a\\\\\\")}, "backslash"),
        ({"response_format": ResponseFormat("choice", [])}, "choice"),
        ({"tools": (READ,), "response_format": ResponseFormat("json_schema", {"not": {}})}, "json_schema"),
        ({"response_format": ResponseFormat("grammar", "start: nowhere")}, "grammar"),
        ({"tools": (Tool("f", "", {"$ref": "http://x/y"}, strict=True),)}, r"f\.parameters"),
    ],
)
def test_a3_what_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence) as error:
        constrain(**options)
    assert error.value.status == 400 and "\n" not in str(error.value)


def test_a_loose_tool_with_a_broken_schema_still_takes_an_object() -> None:
    broken = Tool("f", "", {"$ref": "http://example.invalid/s.json"})
    for choice in ("auto", "required"):
        assert accepts(constrain(tools=(broken,), tool_choice=choice), section(call("functions.f:3", '{"a": 1}')))


def test_a_loose_tool_is_held_to_what_of_its_schema_can_be() -> None:
    schema = {**SCHEMA, "properties": {"path": {"type": "string"}, "line": {"type": "integer", "not": {"const": 3}}}}
    loose = constrain(tools=(Tool("f", "", schema),), tool_choice="required")
    assert accepts(loose, section(call("functions.f:3", '{"path": "a", "line": 3}')))
    assert not accepts(loose, section(call("functions.f:3", '{"line": 3}')))
    with pytest.raises(BadRequest, match=r"f\.parameters.*not"):
        constrain(tools=(Tool("f", "", schema, strict=True),))


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "wanted",
    [
        ResponseFormat("json_schema", _deep(5_000)),
        ResponseFormat("json_schema", {"enum": [f"value {i}" for i in range(100_000)]}),
        ResponseFormat("regex", "(a{0,1000}){0,1000}"),
        ResponseFormat("choice", ["x" * 1000] * 1000),
        ResponseFormat("json_schema", {"type": "string", "pattern": "(a|b)*" * 20_000}),
        ResponseFormat("json_schema", {"properties": {"a": {"$ref": "https://example.invalid/schema"}}}),
    ],
    ids=["deep", "wide enum", "nested repeats", "long choice", "long pattern", "remote"],
)
def test_grammar_bombs_are_refused_or_small(wanted: ResponseFormat) -> None:
    start = time.perf_counter()
    try:
        constrain(response_format=wanted)
    except BadRequest as error:
        assert len(str(error)) < 400
    assert time.perf_counter() - start < 10  # 2 s on a quiet machine


def test_escapes_and_negative_numbers() -> None:
    text = '{"path": "é\\n\\"\\\\", "line": -3}'
    assert accepts(constrain(response_format=ResponseFormat("json_schema", SCHEMA)), text)
    assert json.loads(text) == {"path": 'é\n"\\', "line": -3}


def test_unfinished_calls_are_not_accepted() -> None:
    auto = constrain(tools=(STRICT,))
    whole = section(call("functions.Read:3", '{"path": "a"}'))
    for end in (CALL, ARGUMENTS):
        assert not accepts(auto, whole[: whole.index(end)])
