"""/v1/messages through the Anthropic client, and what Claude Code sends."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from pydantic import TypeAdapter

from tests.server.harness import MODEL, Live, ScriptedEngine, named_events
from tests.server.vocabulary import call, ids, section, tokenizer

END = "<|im_end|>"
READ: Any = {
    "name": "Read",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "cache_control": {"type": "ephemeral"},
}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
GO: Any = [{"role": "user", "content": "go"}]


@pytest.fixture
def engine(live: Live) -> ScriptedEngine:
    return live.engine


@pytest.fixture
def client(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def prompt(engine: ScriptedEngine) -> str:
    return tokenizer().decode(engine.requests[-1].prompt)


def test_text_and_usage(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens, engine.cached = ids("Hello" + END), 5
    answer = client.messages.create(
        model=MODEL.name, max_tokens=20, messages=GO, system="be brief", extra_body={"top_k": 3}
    )
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text == "Hello"  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.cache_read_input_tokens == 5
    assert answer.usage.input_tokens == len(engine.requests[0].prompt) - 5
    assert prompt(engine).startswith("<|im_system|>system<|im_middle|>be brief<|im_end|>")
    assert prompt(engine).endswith("<think></think>") and engine.requests[0].params.top_k == 3


@pytest.mark.parametrize("group", [1, 5, 16])
def test_events_come_in_order(engine: ScriptedEngine, client: anthropic.Anthropic, group: int) -> None:
    engine.group = group
    engine.tokens = ids("why</think>I read" + section(call("functions.Read:0", '{"path": "a b"}')) + END)
    events = list(
        client.messages.create(model=MODEL.name, max_tokens=99, messages=GO, tools=[READ], thinking=THINK, stream=True)
    )
    kinds = [event.type for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block * 3, "message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [(event.index, event.content_block.type) for event in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    indices = [event.index for event in events if event.type.startswith("content_block")]
    assert indices == sorted(indices)
    assert events[0].message.usage.input_tokens == len(engine.requests[0].prompt)  # type: ignore[union-attr]
    last = next(event for event in events if event.type == "message_delta")
    assert last.delta.stop_reason == "tool_use" and last.usage.output_tokens > 0


def test_everything_has_the_clients_types(engine: ScriptedEngine, live: Live) -> None:
    """The client itself does not check what it reads."""
    body = {"model": MODEL.name, "max_tokens": 99, "messages": GO, "tools": [READ], "thinking": THINK}
    engine.tokens = ids("why</think>I read" + section(call("functions.Read:0", '{"path": "a b"}')) + END)
    anthropic.types.Message.model_validate(live.post("/v1/messages", body).json())
    event_type: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for name, data in named_events(live.post("/v1/messages", {**body, "stream": True})):
        assert name == data["type"]
        if name != "ping":
            event_type.validate_python(data)


def test_the_stream_helper_of_the_client_accepts_it(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens = ids(
        "why</think>ok" + section(call("functions.Read:0", '{"path": "é"}'), call("functions.Read:1", "{}"))
    )
    with client.messages.stream(model=MODEL.name, max_tokens=99, messages=GO, tools=[READ], thinking=THINK) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[2].input == {"path": "é"} and final.content[3].id == "functions.Read:1"  # type: ignore[union-attr]


def test_a_tool_loop(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    """Blocks come back as they were given; results before the text beside them; foreign ids become native."""
    engine.tokens = ids("</think>done" + END)
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "read", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "THOUGHT", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "reading"},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "first"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    client.messages.create(model=MODEL.name, max_tokens=9, messages=history, tools=[READ], thinking=THINK)
    rendered = prompt(engine)
    assert "<think>THOUGHT</think>reading" in rendered
    assert '<|tool_call_begin|>functions.Read:0<|tool_call_argument_begin|>{"path": "a"}<|tool_call_end|>' in rendered
    assert "## Return of functions.Read:0\nfirst<|im_end|>" in rendered
    assert "## Return of functions.Read:1\nerror<|im_end|><|im_user|>user<|im_middle|>and?<|im_end|>" in rendered


def test_t16_the_prompt_of_a_tool_loop_extends_the_last_one(
    engine: ScriptedEngine, client: anthropic.Anthropic
) -> None:
    """Prompt and answer come back token for token, so that the prefix cache has them."""
    script = "why</think>I read" + section(call("functions.Read:0", '{"path": "a"}')) + END
    engine.tokens = ids(script)
    first = client.messages.create(model=MODEL.name, max_tokens=99, messages=GO, tools=[READ], thinking=THINK)
    turn = [block.model_dump(exclude_none=True) for block in first.content]
    result = {"type": "tool_result", "tool_use_id": turn[-1]["id"], "content": "text"}
    history: Any = [*GO, {"role": "assistant", "content": turn}, {"role": "user", "content": [result]}]
    client.messages.create(model=MODEL.name, max_tokens=99, messages=history, tools=[READ], thinking=THINK)
    before, after = (request.prompt for request in engine.requests)
    extended = (*before, *ids(script))
    assert after[: len(extended)] == extended


@pytest.mark.parametrize("keep", [False, True])
def test_what_claude_code_sends(engine: ScriptedEngine, client: anthropic.Anthropic, keep: bool) -> None:
    """Version 2.1: a system message in the conversation, adaptive thinking, thinking that is to be kept."""
    engine.tokens = ids("why</think>ok" + END)
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: none"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "OLD", "signature": ""}]},
        {"role": "user", "content": "two"},
    ]
    client.messages.create(
        model=MODEL.name,
        max_tokens=9000,
        messages=conversation,
        thinking={"type": "adaptive"},
        metadata={"user_id": "x"},
        output_config={"effort": "high"},
        extra_body={"context_management": {"edits": edits}} if keep else {},
    )
    rendered = prompt(engine)
    assert "<|im_system|>system<|im_middle|>Agents: none<|im_end|>" in rendered and rendered.endswith("<think>")
    assert ("<think>OLD</think>" in rendered) is keep


def test_a16_a_changing_header_does_not_change_the_prompt(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    prompts = []
    for number in ("0a1b2", "ffff0"):
        engine.tokens = ids("ok" + END)
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number}"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Rules."},
        ]
        client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, system=system)
        prompts.append(prompt(engine))
    assert prompts[0] == prompts[1]
    assert "<|im_middle|>You are an agent.\n\nRules.<|im_end|>" in prompts[0] and "billing" not in prompts[0]


@pytest.mark.parametrize(
    ("choice", "forced"), [({"type": "any"}, True), ({"type": "tool", "name": "Read"}, True), ({"type": "auto"}, False)]
)
def test_tool_choice(engine: ScriptedEngine, client: anthropic.Anthropic, choice: Any, forced: bool) -> None:
    engine.tokens = ids("x" + END)
    client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, tools=[READ], tool_choice=choice)
    constraint = engine.requests[0].constraint
    assert constraint is not None and (constraint.grammar or "").startswith("start: section\n") is forced


def test_none_forbids_calls(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens = ids("x" + END)
    client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, tools=[READ], tool_choice={"type": "none"})
    constraint = engine.requests[0].constraint
    assert constraint is not None and constraint.grammar is None and len(constraint.banned) == 2


def test_stop_sequences_and_limits(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens = ids("one two STOP three" + END)
    answer = client.messages.create(model=MODEL.name, max_tokens=99, messages=GO, stop_sequences=["STOP"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == "one two "  # type: ignore[union-attr]
    engine.tokens, engine.finish = ids("half"), "length"
    assert client.messages.create(model=MODEL.name, max_tokens=1, messages=GO).stop_reason == "max_tokens"


def test_structured_output(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens = ids('{"n": 1}' + END)
    config: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, output_config=config)
    constraint = engine.requests[0].constraint
    assert constraint is not None and "%json" in (constraint.grammar or "")


def test_count_tokens(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens = ids("x" + END)
    client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, tools=[READ], system="s")
    counted = client.messages.count_tokens(model=MODEL.name, messages=GO, tools=[READ], system="s")
    assert counted.input_tokens == len(engine.requests[0].prompt)


def test_a_failure_in_the_stream_is_told(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens, engine.finish, engine.error = ids("a b c d e f g h"), "error", "the logits were not numbers"
    with pytest.raises(anthropic.APIStatusError, match="not numbers"):
        list(client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, stream=True))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]: input tag 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [*GO, {"role": "assistant", "content": "Sure"}]}, "the last one must be the user's"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 4}]}]},
            "messages[0].content[0].content",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *GO]}, "content[0].name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": 4}]}, "tools[0].name"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice: input tag 'maybe'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_what_cannot_be_is_refused_in_anthropics_envelope(live, engine, change: dict[str, Any], word: str) -> None:
    body = {"model": MODEL.name, "max_tokens": 9, "messages": GO, **change}
    reply = httpx.post(f"{live.url}/v1/messages", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == "invalid_request_error"
    assert word in reply.json()["error"]["message"] and not engine.requests


def test_hosted_tools_are_left_out(engine: ScriptedEngine, client: anthropic.Anthropic) -> None:
    engine.tokens = ids("x" + END)
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    client.messages.create(model=MODEL.name, max_tokens=9, messages=GO, tools=[hosted, READ])
    assert "web_search" not in prompt(engine) and "Read" in prompt(engine)
