"""POST /v1/completions on a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import TOKENIZER, Live, events_of, ids

PATH = "/v1/completions"


def ask(live: Live, **fields: Any) -> Any:
    response = live.post(PATH, {"prompt": "once upon", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_kinds_of_prompts(live) -> None:
    tokens = ids("once upon")
    for prompt, count in [("once upon", 1), (tokens, 1), (["once upon", "b"], 2), ([tokens, [1, 2], [3]], 3)]:
        live.engine.requests.clear()
        answer = ask(live, prompt=prompt)
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert live.engine.requests[0].prompt == tuple(tokens)
        assert answer["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in live.engine.requests)
        assert {choice["text"] for choice in answer["choices"]} == {"Hello, world!"}
    assert live.engine.requests[-1].params.max_tokens == 16


def test_choices_are_ordered_by_prompt(live) -> None:
    answer = ask(live, prompt=["a", "b"], n=2, echo=True, seed=1)
    assert [choice["text"][0] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    assert answer["usage"]["prompt_tokens"] == 2


def test_a4_echo_without_generating_gives_the_prompts_logprobs(live) -> None:
    live.engine.tokens = []
    live.engine.finish = "length"
    answer = ask(live, echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "once upon" and choice["finish_reason"] == "length"
    tokens = ids("once upon")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [TOKENIZER.decode([token]) for token in tokens]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(tokens) - 1)
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 1
    assert "".join(logprobs["tokens"]) == "once upon"
    assert [choice["text"][at] for at in logprobs["text_offset"]] == [token[0] for token in logprobs["tokens"]]
    assert live.engine.requests[-1].params.max_tokens == 0
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_and_logprobs_of_prompt_and_answer_line_up(live) -> None:
    choice = ask(live, echo=True, logprobs=3, max_tokens=50)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "once uponHello, world!" == "".join(logprobs["tokens"])
    assert len({len(value) for value in logprobs.values()}) == 1
    chunks = events_of(live.post(PATH, {"prompt": "once upon", "echo": True, "logprobs": 3, "stream": True}))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part["logprobs"][name]] == logprobs[name]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]


def test_tokens_that_are_no_text_have_names_of_their_own(live) -> None:
    euro = TOKENIZER.encode("\U0001f9ff")
    assert len(euro) > 1
    live.engine.tokens = [*euro, TOKENIZER.special_id("<|im_end|>")]
    choice = ask(live, logprobs=0)["choices"][0]
    assert choice["text"] == "\U0001f9ff"
    assert all(name.startswith("bytes:\\x") for name in choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"] == [0] * len(euro)


@pytest.mark.parametrize("group", [1, 2, 16])
def test_stop_strings(live, group) -> None:
    live.engine.say("The end. Not the END of it", group)
    choice = ask(live, stop=["END", "zzz"], max_tokens=50)["choices"][0]
    assert choice["text"] == "The end. Not the " and choice["stop_reason"] == "END"
    assert choice["finish_reason"] == "stop" and len(live.engine.closed) == (group < 16)
    choice = ask(live, stop="END", include_stop_str_in_output=True, max_tokens=50)["choices"][0]
    assert choice["text"] == "The end. Not the END"
    assert ask(live, stop="of it!", max_tokens=50)["choices"][0]["text"] == "The end. Not the END of it"


def test_special_tokens_are_left_out_unless_asked_for(live) -> None:
    live.engine.say("a<think>b")
    assert ask(live)["choices"][0]["text"] == "ab"
    assert ask(live, skip_special_tokens=False)["choices"][0]["text"] == "a<think>b"


def test_stream_has_usage_when_asked(live) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, last = events_of(live.post(PATH, body))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(live.engine.tokens)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids("x")
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == live.engine.tokens[:-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x"] * 30, "n": 4}, "n"),
        ({"prompt": list(range(1000)) * 5}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_out_of_bounds_is_a_400_that_names_it(live, fields, param) -> None:
    response = live.post(PATH, {"prompt": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert not live.engine.requests
