"""The parser of generated ids: the same result however the stream is cut, and the public bug cases by number."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from engine_runtime.generation import TokenLogprobs
from engine_runtime.server.contract import ChatEvent, ContentDelta, ReasoningDelta, Tool, ToolCallDelta, ToolCallStart
from engine_runtime.server.kimi_parser import KimiParser
from tests.server.vocabulary import ARGUMENTS, CALL, END_CALL, END_SECTION, SECTION, call, ids, section, tokenizer

READ = Tool("Read", "", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
BASH = Tool("Bash", "", {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})


def collect(events: list[ChatEvent]) -> dict[str, Any]:
    """Events joined: reasoning, content, calls [id, name, arguments]; checks their order on the way."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for event in events:
        if isinstance(event, ReasoningDelta):
            found["reasoning"] += event.text
        elif isinstance(event, ContentDelta):
            found["content"] += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(found["calls"])
            found["calls"].append([event.id, event.name, ""])
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(found["calls"]) - 1 and event.arguments
            found["calls"][-1][2] += event.arguments
    return found


def parse(tokens: list[int], cuts: tuple[int, ...] = (), thinking: bool = True, **options: Any) -> dict[str, Any]:
    parser = KimiParser(tokenizer(), starts_in_reasoning=thinking, **options)
    bounds = [0, *cuts, len(tokens)]
    events = [event for a, b in itertools.pairwise(bounds) for event in parser.push(tokens[a:b])]
    return collect(events + parser.finish())


STREAMS = [
    "why</think>ok<|im_end|>",
    "é中</think>日本<|im_end|>",
    "a" + section(call("functions.f:0", "{}")) + "b",
    "x</think>" + SECTION + call("functions.f:0", ' {"a":1} ') + call("g", '"{}"'),
    "</think>" + section(call("functions.f.g-h:7", "[1]"), call("functions.Read:1", "")),
    "t</think>" + SECTION + CALL + "functions.f:0" + ARGUMENTS + '{"a',
    "t</think>" + SECTION + CALL + "functions.f",
    "</think>" + SECTION + "j" + END_SECTION + CALL + "f" + END_CALL,
    "<think>a" + CALL + "é" + CALL + "3" + ARGUMENTS + ' "x',
]


@pytest.mark.parametrize("text", STREAMS)
def test_every_cut_of_a_short_stream_gives_the_same(text: str) -> None:
    tokens = ids(text)[:13]
    expected = parse(tokens)
    for mask in range(1 << (len(tokens) - 1)):
        cuts = tuple(i + 1 for i in range(len(tokens) - 1) if mask >> i & 1)
        assert parse(tokens, cuts) == expected


def test_t14_any_number_of_tokens_a_step_gives_the_same() -> None:
    """Speculation brings 1 to 16 tokens at once, markers among them."""
    tokens = ids(
        "think über</think>I read:\n"
        + section(call("functions.Read:0", '{"path": "/tmp/é",\n "x": [1, 2]}'), call("functions.Bash:1", '{"a":"中"}'))
        + "done<|im_end|>"
    )
    expected = parse(tokens)
    assert expected["calls"] == [
        ["functions.Read:0", "Read", '{"path": "/tmp/é",\n "x": [1, 2]}'],
        ["functions.Bash:1", "Bash", '{"a":"中"}'],
    ]
    assert (expected["reasoning"], expected["content"]) == ("think über", "I read:\ndone")
    for size in range(1, 17):
        assert parse(tokens, tuple(range(size, len(tokens), size))) == expected
    rng = random.Random(0)
    for _ in range(500):
        assert parse(tokens, tuple(sorted(rng.sample(range(len(tokens)), rng.randrange(1, 12))))) == expected


def test_t1_a_call_is_complete_before_the_next_begins() -> None:
    tokens = ids("</think>" + section(call("functions.a:0", '{"x":1}'), call("functions.b:1", '{"y":2}')))
    parser = KimiParser(tokenizer(), starts_in_reasoning=True)
    events = parser.push(tokens)
    starts = [i for i, event in enumerate(events) if isinstance(event, ToolCallStart)]
    first = "".join(e.arguments for e in events[: starts[1]] if isinstance(e, ToolCallDelta))
    assert first == '{"x":1}' and parser.tool_calls == 2


def test_t2_parsers_share_nothing() -> None:
    streams = [ids("</think>" + section(call(f"functions.f{n}:0", json.dumps({"n": n})))) for n in range(10)]
    parsers = [KimiParser(tokenizer(), starts_in_reasoning=True) for _ in streams]
    events: list[list[ChatEvent]] = [[] for _ in streams]
    for position in range(max(map(len, streams))):
        for parser, tokens, found in zip(parsers, streams, events, strict=True):
            found += parser.push(tokens[position : position + 1])
    for n, (parser, found) in enumerate(zip(parsers, events, strict=True)):
        assert collect(found + parser.finish())["calls"] == [[f"functions.f{n}:0", f"f{n}", json.dumps({"n": n})]]


def test_t3_long_arguments_are_not_cut() -> None:
    arguments = json.dumps({"content": "x = 1\n" * 180_000})
    assert len(arguments) > 1_000_000
    tokens = ids("</think>" + section(call("functions.Write:0", arguments)))
    assert parse(tokens, tuple(range(7, len(tokens), 7)))["calls"][0][2] == arguments


@pytest.mark.parametrize("name", ["gtasks_list-tasklists", "mcp.server.read", "a.b-c_d", "größe"])
def test_t4_names_keep_dashes_and_dots(name: str) -> None:
    assert parse(ids("</think>" + section(call(f"functions.{name}:3", "{}"))))["calls"] == [
        [f"functions.{name}:0", name, "{}"]
    ]


def test_t5_pretty_printed_arguments() -> None:
    arguments = '{\n  "path": "a",\n  "n": 1\n}'
    assert parse(ids("</think>" + section(call("functions.f:0", f"\n{arguments}\n"))))["calls"][0][2] == arguments


@pytest.mark.parametrize("begin", [SECTION + CALL, CALL])
def test_t9_a_call_ends_the_reasoning(begin: str) -> None:
    found = parse(ids("I will read" + begin + "functions.Read:0" + ARGUMENTS + "{}" + END_CALL + END_SECTION))
    assert found == {"reasoning": "I will read", "content": "", "calls": [["functions.Read:0", "Read", "{}"]]}


def test_t10_the_end_of_the_reasoning_needs_no_text() -> None:
    assert parse(ids("</think>answer")) == {"reasoning": "", "content": "answer", "calls": []}
    assert parse(ids("only reasoning")) == {"reasoning": "only reasoning", "content": "", "calls": []}
    assert parse(ids("<think>x</think>y")) == {"reasoning": "x", "content": "y", "calls": []}
    assert parse(ids("<think>x</think>y"), thinking=False) == {"reasoning": "x", "content": "y", "calls": []}
    assert parse(ids("plain</think> text"), thinking=False)["content"] == "plain text"


def test_t12_ids_count_on_from_the_history() -> None:
    tokens = ids("</think>" + section(call("functions.a:9", "{}"), call("functions.a:9", "{}")))
    found = parse(tokens, history_calls=4)
    assert [id_ for id_, _, _ in found["calls"]] == ["functions.a:4", "functions.a:5"]


@pytest.mark.parametrize("id_", ["3", "call_9f3a", "callXY", "functions_Bash_0"])
def test_t7_a_foreign_id_means_the_tool_that_fits(id_: str) -> None:
    stream = ids("</think>" + section(call(id_, '{"command": "ls"}')))
    assert parse(stream, tools=(READ, BASH))["calls"] == [["functions.Bash:0", "Bash", '{"command": "ls"}']]
    assert parse(stream, tools=(READ,))["calls"][0][1] == "Read"  # the only one there is
    unknown = ids("</think>" + section(call(id_, '{"neither": 1}')))
    assert parse(unknown, tools=(READ, BASH))["calls"][0][1:] == [id_, '{"neither": 1}']


def test_a_declared_name_needs_no_number() -> None:
    stream = ids("</think>" + section(call("functions.Read", "{}"), call("Bash", "{}")))
    assert [name for _, name, _ in parse(stream, tools=(READ, BASH))["calls"]] == ["Read", "Bash"]


def test_arguments_in_a_json_string_are_unwrapped_once() -> None:
    wrapped = json.dumps('{"path": "a"}')
    assert parse(ids("</think>" + section(call("functions.f:0", wrapped))))["calls"][0][2] == '{"path": "a"}'
    for kept in ('"just text"', '"', '"{bad}"'):
        assert parse(ids("</think>" + section(call("functions.f:0", kept))))["calls"][0][2] == kept


def test_broken_arguments_are_passed_on() -> None:
    assert parse(ids("</think>" + section(call("functions.f:0", '{"a": nope'))))["calls"][0][2] == '{"a": nope'


def test_text_around_and_inside_a_section() -> None:
    text = "</think>before " + SECTION + "junk" + call("functions.f:0", "{}") + " note " + END_SECTION + " after"
    assert parse(ids(text))["content"] == "before  after"
    # an answer that is nothing but such text is better than an empty one
    assert parse(ids("</think>" + SECTION + "junk" + END_SECTION + "!"))["content"] == "junk!"
    assert parse(ids("</think>" + SECTION + "junk"))["content"] == "junk"


def test_a_singular_section_marker_is_text() -> None:
    text = "</think><|tool_call_section_begin|>x"
    assert parse(ids(text)) == {"reasoning": "", "content": "<|tool_call_section_begin|>x", "calls": []}


def test_think_counts_only_where_it_comes_first() -> None:
    assert parse(ids("</think>the tag <think> and </think>."))["content"] == "the tag  and ."
    inside = parse(ids("</think>" + section(call("functions.f:0", '{"a": "<think></think>"}')) + "<think>x"))
    assert inside == {"reasoning": "", "content": "x", "calls": [["functions.f:0", "f", '{"a": ""}']]}


def test_a_call_without_arguments() -> None:
    for end in (END_CALL, END_SECTION, CALL + "functions.g:1" + ARGUMENTS + "{}"):
        assert parse(ids("</think>" + CALL + "functions.f:0" + end))["calls"][0] == ["functions.f:0", "f", "{}"]
    assert parse(ids("</think>" + CALL + " \n" + END_CALL))["calls"] == []


def test_a_line_break_inside_an_id() -> None:
    assert parse(ids("</think>" + section(call("\nfunctions.f\n:0\n", "{}"))))["calls"][0][1] == "f"


@pytest.mark.parametrize("arguments", ["[" * 100_000, json.dumps("[" * 100_000), '{"a":' * 50_000])
def test_arguments_nested_without_end(arguments: str) -> None:
    found = parse(ids("</think>" + section(call("3", arguments))), tools=(READ, BASH))
    assert found["calls"] == [["functions.3:0", "3", arguments]]


def test_tools_with_malformed_schemas_are_never_meant() -> None:
    broken = (Tool("a", "", {"properties": [1], "required": True}), Tool("b", "", {"required": [["x"]]}))
    assert parse(ids("</think>" + section(call("3", '{"x": 1}'))), tools=broken)["calls"][0][1] == "3"


def test_an_unfinished_call() -> None:
    start = "</think>" + SECTION + CALL + "functions.f:0"
    assert parse(ids(start))["calls"] == []
    assert parse(ids(start + ARGUMENTS))["calls"] == [["functions.f:0", "f", ""]]
    assert parse(ids(start + ARGUMENTS + '{"a": '))["calls"] == [["functions.f:0", "f", '{"a":']]
    # the next call begins without the end of this one
    both = start + ARGUMENTS + "{}" + CALL + "functions.g:1" + ARGUMENTS + "{}"
    assert [name for _, name, _ in parse(ids(both))["calls"]] == ["f", "g"]


def test_markers_never_leak() -> None:
    rng = random.Random(1)
    alphabet = [
        *ids("a {}:0functions.f"),
        *ids("<think></think>" + SECTION + END_SECTION + CALL + ARGUMENTS + END_CALL),
    ]
    alphabet += ids("<|im_end|><|im_user|>")
    for _ in range(400):
        tokens = [rng.choice(alphabet) for _ in range(rng.randrange(1, 30))]
        found = parse(tokens, tuple(sorted(rng.sample(range(30), 3))), thinking=rng.random() < 0.5, tools=(READ, BASH))
        shown = found["reasoning"] + found["content"] + "".join(map("".join, found["calls"]))
        assert "<|" not in shown and "think>" not in shown


def test_t11_calls_that_are_not_allowed_are_text() -> None:
    stream = ids("</think>" + section(call("functions.f:0", "{}")))
    assert parse(stream, parse_calls=False) == {"reasoning": "", "content": "functions.f:0{}", "calls": []}


def test_logprobs_and_counts_follow_their_tokens() -> None:
    tokens = ids("ab c</think>日 text<|im_end|>")
    parser = KimiParser(tokenizer(), starts_in_reasoning=True)
    events = parser.push(tokens, [TokenLogprobs(token, -1.0, ()) for token in tokens]) + parser.finish()
    content = [event for event in events if isinstance(event, ContentDelta)]
    expected = ids("日 text")
    assert [item.token for event in content for item in event.logprobs] == expected
    assert [token for event in content for token in event.tokens] == expected
    assert parser.reasoning_tokens == len(ids("ab c"))
