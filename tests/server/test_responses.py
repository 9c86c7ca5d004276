"""/v1/responses through the OpenAI client, and what Codex sends."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.harness import MODEL, Live, ScriptedEngine, named_events
from tests.server.vocabulary import call, ids, section, tokenizer

END = "<|im_end|>"
READ = {
    "type": "function",
    "name": "read",
    "description": "Read a file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: patch"},
}


@pytest.fixture
def engine(live: Live) -> ScriptedEngine:
    return live.engine


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def prompt(engine: ScriptedEngine) -> str:
    return tokenizer().decode(engine.requests[-1].prompt)


def test_text_with_reasoning(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    engine.tokens = ids("let me see</think>Hello **you**" + END)
    engine.cached = 3
    answer = client.responses.create(model=MODEL.name, input="hi", instructions="be brief", max_output_tokens=50)
    assert answer.output_text == "Hello **you**" and answer.status == "completed" and answer.error is None
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "let me see"  # type: ignore[union-attr, index]
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert "<|im_system|>system<|im_middle|>be brief<|im_end|><|im_user|>user<|im_middle|>hi" in prompt(engine)
    assert engine.requests[0].params.max_tokens == 50


@pytest.mark.parametrize("group", [1, 4, 16])
def test_a19_events_come_in_order(engine: ScriptedEngine, client: openai.OpenAI, group: int) -> None:
    engine.group = group
    engine.tokens = ids("why</think>I read" + section(call("functions.read:0", '{"path": "a b"}')) + END)
    events = list(client.responses.create(model=MODEL.name, input="go", tools=[READ], stream=True))  # type: ignore[call-overload]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1].response
    assert [item.status for item in final.output] == ["completed"] * 3
    joined = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert final.output[2].arguments == joined == '{"path": "a b"}'
    for event in events:
        if event.type.endswith((".delta", ".done")) and "output_item" not in event.type:
            assert event.item_id == final.output[event.output_index].id


def test_everything_has_the_clients_types(engine: ScriptedEngine, live: Live) -> None:
    """The client itself does not check what it reads."""
    body = {"model": MODEL.name, "input": "go", "tools": [READ, PATCH], "include": ["reasoning.encrypted_content"]}
    calls = call("functions.read:0", '{"path": "a b"}'), call("functions.apply_patch:1", '{"input": "p"}')
    engine.tokens = ids("why</think>I read" + section(*calls) + END)
    Response.model_validate(live.post("/v1/responses", body).json())
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for name, data in named_events(live.post("/v1/responses", {**body, "stream": True})):
        assert name == data["type"]
        event_type.validate_python(data)


def test_the_stream_helper_of_the_client_accepts_it(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    engine.tokens = ids("</think>one two" + END)
    with client.responses.stream(model=MODEL.name, input="go") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "one two"


def test_t8_a_tool_loop_keeps_native_ids(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    """What was given comes back as input, reasoning included, and the next call counts on."""
    script = "first</think>" + section(call("functions.read:0", '{"path":"a"}')) + END
    engine.tokens = ids(script)
    include: Any = ["reasoning.encrypted_content"]
    history: list[Any] = [{"role": "user", "content": "go"}]
    first = client.responses.create(model=MODEL.name, input=history, tools=[READ], include=include)  # type: ignore[list-item]
    made = first.output[-1]
    assert made.type == "function_call" and made.call_id == "functions.read:0"
    for item in first.output:
        value = item.model_dump(exclude_none=True)
        if item.type == "reasoning":
            value["content"] = []  # as Codex does: it returns what is encrypted only
        history.append(value)
    engine.tokens = ids("</think>done" + END)
    history.append({"type": "function_call_output", "call_id": made.call_id, "output": "text of a"})
    client.responses.create(model=MODEL.name, input=history, tools=[READ])  # type: ignore[list-item]
    rendered = prompt(engine)
    assert "<think>first</think><|tool_calls_section_begin|><|tool_call_begin|>functions.read:0" in rendered
    assert "## Return of functions.read:0\ntext of a" in rendered
    before, after = (request.prompt for request in engine.requests)
    extended = (*before, *ids(script))
    assert after[: len(extended)] == extended  # the prefix cache has all of it
    assert '"1" %if eq([0:7], 0)' in (engine.requests[-1].constraint.grammar or "")  # type: ignore[union-attr]


def test_custom_tools_carry_plain_text(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    tool: Any = PATCH
    patch = "*** Begin Patch\n+é"
    engine.tokens = ids("</think>" + section(call("functions.apply_patch:0", json.dumps({"input": patch}))) + END)
    events = list(client.responses.create(model=MODEL.name, input="go", tools=[tool], stream=True))
    item = events[-1].response.output[0]  # type: ignore[union-attr]
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", patch)  # type: ignore[union-attr]
    assert "response.custom_tool_call_input.done" in [event.type for event in events]
    engine.tokens = ids("</think>ok" + END)
    given: Any = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": patch},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
    ]
    client.responses.create(model=MODEL.name, input=given, tools=[tool])
    assert "## Return of functions.apply_patch:0\ndone" in prompt(engine)
    assert "// Patch files\n\n// The input follows this lark grammar:\n// start: patch" in prompt(engine)


def test_tools_in_a_namespace(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    """As Codex declares those that manage agents, and those of MCP servers."""
    agents: Any = {"type": "namespace", "name": "agents", "description": "Sub-agents", "tools": [READ, PATCH]}
    calls = call("functions.agents__read:0", "{}"), call("functions.agents__apply_patch:1", '{"input": "p"}')
    engine.tokens = ids("</think>" + section(*calls) + END)
    first = client.responses.create(model=MODEL.name, input="go", tools=[READ, agents])
    found = [(item.type, item.name, item.namespace) for item in first.output]  # type: ignore[union-attr]
    assert found == [("function_call", "read", "agents"), ("custom_tool_call", "apply_patch", "agents")]
    given: Any = [{"role": "user", "content": "go"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    given += [{"type": "function_call_output", "call_id": "functions.agents__read:0", "output": "text"}]
    choice: Any = {"type": "function", "name": "read", "namespace": "agents"}
    client.responses.create(model=MODEL.name, input=given, tools=[READ, agents], tool_choice=choice)
    assert "<|tool_call_begin|>functions.agents__read:0<|tool_call_argument_begin|>" in prompt(engine)
    assert "## Return of functions.agents__read:0\ntext" in prompt(engine)
    grammar = engine.requests[-1].constraint.grammar or ""  # type: ignore[union-attr]
    assert '"functions.agents__read:"' in grammar and '"functions.read:"' not in grammar


@pytest.mark.parametrize(
    ("reasoning", "thinks"),
    [
        ({}, True),
        ({"effort": None, "summary": "auto"}, True),
        ({"effort": "low"}, True),
        ({"effort": "minimal"}, False),
    ],
)
def test_effort(engine: ScriptedEngine, live: Live, reasoning: dict[str, Any], thinks: bool) -> None:
    assert live.post("/v1/responses", {"input": "go", "reasoning": reasoning}).status_code == 200
    assert prompt(engine).endswith("<think>") is thinks


def test_json_schema_and_effort(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    engine.tokens = ids('{"n": 1}' + END)
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    answer = client.responses.create(model=MODEL.name, input="go", text=form, reasoning={"effort": "none"})
    assert answer.output_text == '{"n": 1}' and prompt(engine).endswith("<think></think>")
    constraint = engine.requests[0].constraint
    assert constraint is not None and constraint.grammar is not None and constraint.after == ()


def test_an_answer_that_is_cut_is_incomplete(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    engine.tokens, engine.finish = ids("</think>half a"), "length"
    answer = client.responses.create(model=MODEL.name, input="go")
    assert answer.status == "incomplete" and answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


def test_a_failure_in_the_stream_is_told(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    engine.tokens, engine.finish, engine.error = ids("</think>a b c d e f"), "error", "the logits were not numbers"
    events = list(client.responses.create(model=MODEL.name, input="go", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the logits were not numbers"
    engine.tokens = ids("</think>a b c d e f")
    with pytest.raises(openai.InternalServerError, match="not numbers"):
        client.responses.create(model=MODEL.name, input="go")


def test_hosted_tools_are_left_out_with_a_warning(engine, client, caplog) -> None:
    engine.tokens = ids("</think>ok" + END)
    given: Any = [
        {"role": "user", "content": "go"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "more"}]},
    ]
    answer = client.responses.create(model=MODEL.name, input=given, tools=[{"type": "web_search"}, READ])
    assert answer.output_text == "ok"
    assert [record.message for record in caplog.records if "hosted tool" in record.message]
    assert "web_search" not in prompt(engine) and "<|im_system|>system<|im_middle|>more" in prompt(engine)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": 5}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [READ, READ]}]}, "tools"),
        ({"tools": [4]}, "tools[0]"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 4}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_cannot_be_is_refused(live, engine, change: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{live.url}/v1/responses", json={"model": MODEL.name, "input": "x", **change})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert not engine.requests


def test_another_model_is_not_found(live) -> None:
    reply = httpx.post(f"{live.url}/v1/responses", json={"model": "gpt-x", "input": "x"})
    assert reply.status_code == 404
