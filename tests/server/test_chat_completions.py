"""POST /v1/chat/completions on a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from engine_runtime.server.contract import EngineUnavailable
from tests.server.harness import MODEL, TEMPLATE, TOKENIZER, Live, events_of, ids

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def ask(live: Live, **fields: Any) -> Any:
    response = live.post(PATH, {"messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(live: Live, **fields: Any) -> list[Any]:
    response = live.post(PATH, {"messages": HI, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response)


def refusal(live: Live, status: int = 400, **fields: Any) -> dict[str, Any]:
    response = live.post(PATH, {"messages": HI, **fields})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_answer_and_usage(live) -> None:
    live.engine.say("because</think>Hello, world!")
    live.engine.cached = 3
    answer = ask(live)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hello, world!"
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "because"
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
    prompt = TEMPLATE.encode(HI, thinking=True)
    assert live.engine.requests[0].prompt == tuple(prompt)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt) and usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["completion_tokens"] == len(live.engine.tokens)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(ids("because"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["model"] == "k2-test" and answer["object"] == "chat.completion"
    assert "timing" not in usage


def test_timing_is_opt_in(live) -> None:
    timing = ask(live, timing=True)["usage"]["timing"]
    assert timing["queue_seconds"] == 0.125 and timing["verify_seconds"] == 1.0
    assert timing["passes"] > 0 and timing["accepted_draft_tokens"] > 0


@pytest.mark.parametrize("group", [1, 3, 16])
def test_stream_equals_answer(live, group) -> None:
    live.engine.say("some reasons</think>Grüße, 世界! done", group)
    whole = ask(live)["choices"][0]["message"]
    chunks = stream(live)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content") or "" for d in deltas) == whole["content"]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == whole["reasoning_content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_a11_usage_chunk_has_no_choices_and_counts_cached_tokens(live) -> None:
    live.engine.cached = 7
    *chunks, last = stream(live, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks)
    counted = stream(live, stream_options={"include_usage": True, "continuous_usage_stats": True})
    totals = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert totals == sorted(totals) and totals[-1] == len(live.engine.tokens)


def test_choices_differ_in_their_noise_only(live) -> None:
    answer = ask(live, n=3, seed=11)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    seeds = [request.params.seed for request in live.engine.requests]
    assert len(set(seeds)) == 3 and 11 in seeds
    assert len({request.prompt for request in live.engine.requests}) == 1
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3 * len(live.engine.tokens)
    assert usage["prompt_tokens"] == len(live.engine.requests[0].prompt)
    finishes = [c["choices"][0] for c in stream(live, n=3) if c["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in finishes) == [0, 1, 2]
    again = [request.params.seed for request in live.engine.requests[3:]]
    assert not set(again) & set(seeds)  # without a seed, a new one each time


def test_sampling_fields_reach_the_engine(live) -> None:
    ask(live, temperature=0.25, top_p=0.5, top_k=7, min_p=0.125, seed=-5, max_tokens=9, stop_token_ids=[5, 6])
    params = live.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.25, 0.5, 7, 0.125, -5)
    assert params.max_tokens == 9
    assert params.stop_ids == (*MODEL.room().eos_ids, 5, 6)
    ask(live, ignore_eos=True, top_k=-1, max_tokens=3, max_completion_tokens=4, top_p=0)
    params = live.engine.requests[-1].params
    assert params.stop_ids == () and params.top_k == 0 and params.max_tokens == 4 and 0 < params.top_p < 1e-6
    ask(live)
    params = live.engine.requests[-1].params
    assert (params.temperature, params.top_p) == (1.0, 0.95) and params.stop_ids is None


def test_a1_max_tokens_is_clamped_to_what_is_left(live) -> None:
    prompt = len(TEMPLATE.encode(HI))
    ask(live, max_tokens=65535)
    assert live.engine.requests[-1].params.max_tokens == MODEL.context - prompt
    ask(live)
    assert live.engine.requests[-1].params.max_tokens == MODEL.context - prompt
    error = refusal(live, messages=[{"role": "user", "content": "word " * 5000}], max_tokens=1)
    assert error["code"] == "context_length_exceeded" and str(MODEL.context) in error["message"]
    assert "-" not in error["message"]


@pytest.mark.parametrize(
    "bias",
    [
        {"191222": -100},
        {"-1": 1},
        {"x": 1},
        {"5": 101},
        {"5": None},
        {str(i): 1 for i in range(3000)},
        {"99999999999999999999": 1},
    ],
)
def test_a2_logit_bias_out_of_bounds_is_refused(live, bias) -> None:
    assert refusal(live, logit_bias=bias)["param"].startswith("logit_bias")
    ask(live)  # and the server lives


@pytest.mark.parametrize("number", ["NaN", "1e309", "-Infinity"])
def test_a2_numbers_that_json_does_not_have_are_refused(live, number) -> None:
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"logit_bias":{{"5":{number}}}}}'
    response = live.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "m"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": "x"}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 1000}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(7))}, "stop_token_ids"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "whatever"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
)
def test_what_is_out_of_bounds_is_a_400_that_names_it(live, fields, param) -> None:
    error = refusal(live, **fields)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param), error
    assert "pydantic" not in error["message"] and "http" not in error["message"]


def test_t20_unknown_role_is_named(live) -> None:
    assert "wizard" in refusal(live, messages=[{"role": "wizard", "content": "x"}])["message"]
    ask(live, messages=[{"role": "developer", "content": "x"}, *HI])


def test_tools_may_be_declared_without_being_called(live) -> None:
    tool = {"type": "function", "function": {"name": "gtasks_list-tasklists", "parameters": {"type": "object"}}}
    for choice in ("none", "auto", None):
        message = ask(live, tools=[tool], tool_choice=choice, chat_template_kwargs={"thinking": False})
        assert message["choices"][0]["message"]["content"] and "tool_calls" not in message["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": "false"}}, False),
        ({"chat_template_kwargs": {"thinking": False}, "thinking": {"type": "enabled"}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ],
)
def test_forms_of_the_thinking_switch(live, fields, thinking) -> None:
    ask(live, **fields)
    assert live.engine.requests[-1].prompt == tuple(TEMPLATE.encode(HI, thinking=thinking))


def test_t15_unknown_fields_are_ignored_with_a_warning(live, caplog) -> None:
    ask(live, extra_body={"x": 1}, user="me")
    assert "extra_body" in caplog.text and "'user'" not in caplog.text


def test_logprobs(live) -> None:
    live.engine.say("Hi é")
    choice = ask(live, logprobs=True, top_logprobs=2, chat_template_kwargs={"thinking": False})["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [TOKENIZER.decode([token]) for token in ids("Hi é")]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "Hi é"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    chunks = stream(live, logprobs=True, chat_template_kwargs={"thinking": False})
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert all(entry["top_logprobs"] == [] for entry in streamed)


def test_return_token_ids(live) -> None:
    answer = ask(live, return_token_ids=True)
    assert tuple(answer["prompt_token_ids"]) == live.engine.requests[-1].prompt
    assert answer["choices"][0]["token_ids"] == live.engine.tokens
    chunks = stream(live, return_token_ids=True)
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", [])] == live.engine.tokens
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [answer["prompt_token_ids"]]


def test_stop_token_id_is_told_and_hidden(live) -> None:
    live.engine.tokens = ids("one two")
    last = live.engine.tokens[-1]
    choice = ask(live, stop_token_ids=[last], thinking={"type": "disabled"})["choices"][0]
    assert choice["stop_reason"] == last and choice["message"]["content"] == TOKENIZER.decode(live.engine.tokens[:-1])
    fields = {"stop_token_ids": [last], "thinking": {"type": "disabled"}, "include_stop_str_in_output": True}
    assert ask(live, **fields)["choices"][0]["message"]["content"] == "one two"


def test_errors_of_the_engine(live) -> None:
    live.engine.failure = EngineUnavailable("the queue is full", 429, 7)
    response = live.post(PATH, {"messages": HI, "stream": True})
    assert response.status_code == 429 and response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"
    live.engine.failure = EngineUnavailable("loading")
    assert live.post(PATH, {"messages": HI}).status_code == 503
    live.engine.failure = ValueError("prompt: not like this")
    assert refusal(live)["message"] == "prompt: not like this"
    live.engine.failure = RuntimeError("secret detail of a library")
    response = live.post(PATH, {"messages": HI})
    assert response.status_code == 500 and "secret" not in response.text and response.json()["error"]["message"]


def test_an_error_while_generating_ends_the_stream_with_it(live) -> None:
    live.engine.finish, live.engine.error = "error", "the logits were not numbers"
    response = live.post(PATH, {"messages": HI})
    assert response.status_code == 500 and "not numbers" in response.json()["error"]["message"]
    *chunks, last = stream(live)
    assert "not numbers" in last["error"]["message"]
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


def test_wrong_model_is_404(live) -> None:
    assert refusal(live, 404, model="gpt-9")["code"] == "model_not_found"
    ask(live, model="k2-test")
