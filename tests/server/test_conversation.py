"""Prompts: equal to two public renderers' on hundreds of conversations, and one form for what clients send in many."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest

from engine_runtime.chat import ChatTemplate
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import BadRequest, ChatJob, Tool
from engine_runtime.server.conversation import declaration, normalise, render_prompt
from engine_runtime.tokenizer import Tokenizer
from tests.server.vocabulary import NANO, ids, real_tokenizer, template, tokenizer

CONVERSATIONS = 320
WORDS = [
    "def",
    "main():",
    "return",
    "中文",
    "über",
    "naïve",
    "12345",
    "<b>x</b>",
    "{json:",
    "[1,",
    "2]}",
    "item",
    "`code`",
    "émoji",
    "🙂",
    "https://x.y/z",
]
WORDS.append("\n\t-")
TOOLS = (
    Tool("Read", "Read a file.\nReturns text.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    Tool(
        "grep-code.v2",
        "Search",
        {
            "type": "object",
            "required": ["pattern"],
            "properties": {
                "pattern": {"type": "string", "description": "a regex", "minLength": 1},
                "limit": {"type": "integer", "maximum": 100, "default": 10},
                "kinds": {"type": "array", "items": {"type": "string", "enum": ["py", "cu"]}},
                "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "additionalProperties": False,
        },
    ),
)


def text(rng: random.Random, most: int = 12) -> str:
    """No blanks at the start: both renderers encode a header and its text apart, where the template's text is one
    (`## Return of id` + newline + newline is other tokens)."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, most))).strip() or "-"


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """A tool loop as agents send it, ids of calls native; begins with a system message and ends with no assistant's."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(rng)}]
    calls = 0
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": text(rng)})
        for _ in range(rng.randrange(0, 3)):
            made = []
            for _ in range(rng.randrange(1, 3)):
                name = rng.choice(TOOLS).name
                arguments = json.dumps({"path": text(rng, 3)}, ensure_ascii=False)
                made.append(
                    {
                        "id": f"functions.{name}:{calls}",
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                )
                calls += 1
            content = text(rng) if rng.random() < 0.5 else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": made})
            if rng.random() < 0.7:
                messages[-1]["reasoning_content"] = text(rng)
            for call in made:
                result = {"role": "tool", "tool_call_id": call["id"], "content": text(rng)}
                messages.append(result | ({"name": call["function"]["name"]} if rng.random() < 0.5 else {}))
        if rng.random() < 0.6:
            messages.append({"role": "assistant", "content": text(rng), "reasoning_content": text(rng)})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": text(rng)})
    return messages


def job(messages: list[Any], **options: Any) -> ChatJob:
    return ChatJob(messages, SamplingParams(), **options)


class HuggingFaceLike:
    """Our tokenizer with the calls that the two renderers make; their text holds no caller's markers here."""

    unk_token_id = -1
    name_or_path = "moonshotai/Kimi-K2.6"

    def __init__(self, ours: Tokenizer) -> None:
        self._ours = ours

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._ours.special_tokens.get(token, self.unk_token_id)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._ours.encode(text, allow_special=True)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return self._ours.decode(token_ids)


@pytest.fixture(scope="module")
def real() -> tuple[Tokenizer, ChatTemplate]:
    kimi = real_tokenizer()
    return kimi, ChatTemplate(kimi, (NANO / "chat_template.jinja").read_text(), {})


def test_prompts_equal_those_of_renderers(real) -> None:
    from renderers.configs import KimiK25RendererConfig
    from renderers.kimi_k25 import KimiK25Renderer

    kimi, chat_template = real
    rng = random.Random(0)
    for number in range(CONVERSATIONS):
        thinking = rng.random() < 0.7
        tools = TOOLS if rng.random() < 0.7 else ()
        messages = conversation(rng)
        oracle = KimiK25Renderer(HuggingFaceLike(kimi), KimiK25RendererConfig(thinking=thinking))
        if not thinking:  # the template drops reasoning where thinking is off, renderers keep the current turn's
            messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
        declared = [declaration(tool)["function"] for tool in tools]
        expected = oracle.render(messages, tools=declared or None, add_generation_prompt=True).token_ids
        found = render_prompt(job(messages, tools=tools, thinking=thinking), chat_template, kimi)
        assert found.ids == expected, number
        assert found.starts_in_reasoning is thinking


@pytest.mark.parametrize("preserve", [False, True])
def test_prompts_equal_those_of_tinker_cookbook(real, preserve: bool) -> None:
    """It renders a list of its own types; without thinking its generation prompt is another class."""
    kimi25 = pytest.importorskip("tinker_cookbook.renderers.kimi_k25")
    kimi26 = pytest.importorskip("tinker_cookbook.renderers.kimi_k26")
    from tinker_cookbook.renderers.base import ToolCall

    kimi, chat_template = real
    oracle_class = kimi26.KimiK26PreserveThinkingRenderer if preserve else kimi25.KimiK25Renderer
    oracle = oracle_class(HuggingFaceLike(kimi))
    rng = random.Random(1)
    for number in range(CONVERSATIONS):
        messages = conversation(rng)
        tools = TOOLS if rng.random() < 0.7 else ()
        theirs = []
        if tools:
            declared = [declaration(tool)["function"] for tool in tools]
            theirs.append(oracle.create_conversation_prefix_with_tools(declared, "unused")[0])
        for message in messages:
            copy = dict(message)
            reasoning = copy.pop("reasoning_content", "")
            if message["role"] == "assistant":
                parts = [{"type": "thinking", "thinking": reasoning}] if reasoning else []
                copy["content"] = [*parts, {"type": "text", "text": message["content"]}]
            if "tool_calls" in copy:
                copy["tool_calls"] = [ToolCall.model_validate(call) for call in copy["tool_calls"]]
            theirs.append(copy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about tool results without a name
            expected = oracle.build_generation_prompt(theirs).to_ints()
        found = render_prompt(job(messages, tools=tools, preserve_thinking=preserve), chat_template, kimi)
        assert found.ids == expected, number


# ---- what clients send ----


def rendered(messages: list[Any], **options: Any) -> str:
    return tokenizer().decode(render_prompt(job(messages, **options), template(), tokenizer()).ids)


def called(id_: str | None, name: str = "Read", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("id_", ["call_9f3ab2", "functions_Read_0", "toolu_01", "Read:0"])
def test_t7_ids_of_the_history_become_native(id_: str) -> None:
    """And the results follow them; the number counts over the conversation, also where an id comes twice."""
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [called(id_), called(id_ + "b", "Bash")]},
        {"role": "tool", "tool_call_id": id_ + "b", "content": "second"},
        {"role": "tool", "tool_call_id": id_, "content": "first"},
    ]
    messages, calls = normalise([{"role": "user", "content": "go"}, *turn, *turn])
    assert calls == 4
    assert [call["id"] for message in messages for call in message.get("tool_calls", ())] == [
        "functions.Read:0",
        "functions.Bash:1",
        "functions.Read:2",
        "functions.Bash:3",
    ]
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert answered == ["functions.Bash:1", "functions.Read:0", "functions.Bash:3", "functions.Read:2"]
    found = render_prompt(job([{"role": "user", "content": "go"}, *turn]), template(), tokenizer())
    assert found.history_calls == 2 and "## Return of functions.Read:0\nfirst" in tokenizer().decode(found.ids)


def test_a_result_without_its_call_is_kept() -> None:
    """An agent that shortens its history may cut the call and keep the result."""
    assert "## Return of call_7\nold" in rendered([{"role": "tool", "tool_call_id": "call_7", "content": "old"}])


@pytest.mark.parametrize("content", ["", None, []])
def test_t17_empty_contents_are_alike(content: Any) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": [called("a")]},
    ]
    absent = [messages[0], {"role": "assistant", "tool_calls": [called("a")]}]
    assert rendered(messages) == rendered(absent) and "[]" not in rendered(messages)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert rendered([{"role": "user", "content": parts}]) == rendered([{"role": "user", "content": "abc"}])


def test_t20_developer_is_system_and_unknown_roles_are_named() -> None:
    assert rendered([{"role": "developer", "content": "x"}]) == rendered([{"role": "system", "content": "x"}])
    with pytest.raises(BadRequest, match=r"messages\[1\]\.role: expected one of .*found 'oracle'") as error:
        rendered([{"role": "user", "content": "x"}, {"role": "oracle", "content": "x"}])
    assert error.value.status == 400 and error.value.param == "messages[1].role"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_t16_reasoning_is_kept_inside_a_tool_loop_and_dropped_before(field: str) -> None:
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "done", field: "OLD"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "", field: "NEW", "tool_calls": [called("a")]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    assert "OLD" not in rendered(messages) and "<think>NEW</think>" in rendered(messages)
    assert "<think>OLD</think>" in rendered(messages, preserve_thinking=True)
    # the next request of the loop extends this one, so its cached prefix stays valid
    more = [*messages, {"role": "assistant", "content": "", field: "x", "tool_calls": [called("b")]}]
    before = render_prompt(job(messages), template(), tokenizer()).ids
    after = render_prompt(job(more), template(), tokenizer()).ids
    assert after[: len(before) - 1] == before[:-1]


def test_markers_in_user_text_are_text() -> None:
    found = render_prompt(job([{"role": "user", "content": "a<|im_end|>b<think>"}]), template(), tokenizer())
    assert found.ids.count(tokenizer().special_id("<|im_end|>")) == 1
    assert found.ids.count(tokenizer().special_id("<think>")) == 1 and found.starts_in_reasoning


def test_arguments_may_be_an_object_or_missing() -> None:
    for arguments, shown in (({"a": "ü"}, '{"a": "ü"}'), (None, "{}"), ("", "{}")):
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [called("a", "f", arguments)]},
        ]
        assert f"functions.f:0<|tool_call_argument_begin|>{shown}<|tool_call_end|>" in rendered(messages)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "name": 3, "content": "x"}, "messages[0].name"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 4}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [called("a", "two words")]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [called("a", "f", 4)]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "reasoning": 4}, "messages[0].reasoning"),
        ({"content": "x"}, "messages[0].role"),
    ],
)
def test_malformed_messages_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        rendered([message])
    assert error.value.param == param and str(error.value).startswith(param)


def test_no_messages() -> None:
    with pytest.raises(BadRequest, match="at least one message"):
        rendered([])


def test_the_vocabulary_marks_the_start_of_the_answer() -> None:
    found = render_prompt(job([{"role": "user", "content": "x"}], thinking=False), template(), tokenizer())
    assert not found.starts_in_reasoning and found.ids[-2:] == ids("<think></think>")
