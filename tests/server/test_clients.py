"""Scripted conversations through the OpenAI Python client and litellm: streams, tools, reasoning, structured output."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.harness import MODEL, Live
from tests.server.vocabulary import call, section, tokenizer

END = "<|im_end|>"
ASK: Any = [{"role": "user", "content": "read it"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


class Number(BaseModel):
    n: int


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("group", [1, 6])
def test_a_tool_loop_with_the_openai_client(live: Live, client: openai.OpenAI, group: int) -> None:
    live.engine.group = group
    calls = section(call("functions.read:0", '{"path": "a"}'), call("functions.read:1", '{"path": "b\\n"}'))
    live.engine.scripts = ["both</think>I read two" + calls + END, "</think>They say so." + END]
    with client.chat.completions.stream(model=MODEL.name, messages=ASK, tools=[TOOL]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.arguments for event in done] == ['{"path": "a"}', '{"path": "b\\n"}']
    assert message.content == "I read two" and message.model_extra["reasoning_content"] == "both"  # type: ignore[index]
    made = message.tool_calls or []
    assert [one.id for one in made] == ["functions.read:0", "functions.read:1"]
    turn = {"role": "assistant", "content": message.content, "tool_calls": [one.model_dump() for one in made]}
    results = [{"role": "tool", "tool_call_id": one.id, "content": f"text {one.id}"} for one in made]
    history: Any = [*ASK, turn, *results]
    answer = client.chat.completions.create(model=MODEL.name, messages=history, tools=[TOOL])
    assert answer.choices[0].message.content == "They say so." and answer.choices[0].finish_reason == "stop"
    rendered = tokenizer().decode(live.engine.requests[1].prompt)
    assert "## Return of functions.read:1\ntext functions.read:1" in rendered


def test_structured_output_with_the_openai_client(live: Live, client: openai.OpenAI) -> None:
    live.engine.scripts = ['</think>{"n": 7}' + END]
    parsed = client.chat.completions.parse(model=MODEL.name, messages=ASK, response_format=Number)
    assert parsed.choices[0].message.parsed == Number(n=7)
    constraint = live.engine.requests[0].constraint
    assert constraint is not None and "integer" in (constraint.grammar or "")


def test_errors_have_the_types_of_the_openai_client(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL.name, messages=ASK, temperature=9)
    with pytest.raises(openai.BadRequestError, match="messages\\[0\\]|role"):
        client.chat.completions.create(model=MODEL.name, messages=[{"role": "oracle", "content": "x"}])  # type: ignore[list-item, misc]


def test_completions_and_models_with_the_openai_client(live: Live, client: openai.OpenAI) -> None:
    live.engine.scripts = [" of text" + END, " of text" + END]
    assert client.completions.create(model=MODEL.name, prompt="a piece").choices[0].text == " of text"
    chunks = client.completions.create(model=MODEL.name, prompt="a piece", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " of text"
    assert [model.id for model in client.models.list()] == [MODEL.name]


def test_litellm(live: Live) -> None:
    """What many agents reach every model through."""
    litellm = pytest.importorskip("litellm")
    common: dict[str, Any] = {"model": f"openai/{MODEL.name}", "api_base": f"{live.url}/v1", "api_key": "none"}
    live.engine.scripts = [
        "hm</think>Hello" + END,
        "why</think>" + section(call("functions.read:0", '{"path": "é"}')) + END,
    ]
    answer = litellm.completion(messages=ASK, **common)
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].message.reasoning_content == "hm"
    chunks = list(litellm.completion(messages=ASK, tools=[TOOL], stream=True, **common))
    whole = litellm.stream_chunk_builder(chunks, messages=ASK)
    (made,) = whole.choices[0].message.tool_calls
    assert (made.id, made.function.name) == ("functions.read:0", "read")
    assert json.loads(made.function.arguments) == {"path": "é"} and whole.choices[0].finish_reason == "tool_calls"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=ASK, **{**common, "model": "openai/another"}, num_retries=0)
