"""Tokenizing, rendering and explaining prompts."""

from __future__ import annotations

import pytest

from tests.server.harness import MODEL, TEMPLATE, TOKENIZER, ids

HI = [{"role": "user", "content": "hi <|im_end|>"}]


def test_tokenize_and_back(live) -> None:
    text = "Grüße <|im_end|> 世界"
    found = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == TOKENIZER.encode(text) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == MODEL.context and len(found["token_strs"]) == found["count"]
    assert live.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert live.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert live.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_rendered_prompt_is_the_one_that_is_generated_from(live) -> None:
    body = {"messages": HI, "thinking": {"type": "disabled"}}
    rendered = live.post("/v1/chat/completions/render", body).json()
    assert rendered["tokens"] == TEMPLATE.encode(HI, thinking=False)
    assert rendered["text"] == TOKENIZER.decode(rendered["tokens"])
    assert live.post("/tokenize", body).json()["tokens"] == rendered["tokens"]
    assert live.post("/v1/chat/completions", body).status_code == 200
    assert live.engine.requests[-1].prompt == tuple(rendered["tokens"])


def test_cache_explain(live) -> None:
    tokens = ids("the same beginning, then this")
    other = {"prompt": "the same beginning, but that"}
    found = live.post("/v1/cache/explain", {"prompt": tokens, "against": other}).json()
    assert found["prompt_tokens"] == len(tokens) and found["cached_tokens"] == len(tokens) // 2
    assert found["tokens_in_common_with_cache"] == len(tokens) - 1
    against = found["against"]
    assert against["text_before"] == "the same beginning,"
    assert against["text_here"].strip() == "then this" and against["text_there"].strip() == "but that"
    assert against["tokens_in_common"] == len(ids("the same beginning,"))
    chat = {"chat": {"messages": HI}}
    assert live.post("/v1/cache/explain", chat).json()["prompt_tokens"] == len(TEMPLATE.encode(HI))
    live.engine.state = "loading"
    assert live.post("/v1/cache/explain", chat).status_code == 503


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": "a"}),
        ("/v1/cache/explain", {}),
        ("/v1/cache/explain", {"prompt": "a", "chat": {"messages": HI}}),
        ("/v1/cache/explain", {"prompt": "a", "against": {}}),
        ("/v1/chat/completions/render", {"prompt": "a"}),
    ],
)
def test_wrong_bodies(live, path, body) -> None:
    response = live.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_models(live) -> None:
    (card,) = live.client.get("/v1/models").json()["data"]
    assert card["id"] == "k2-test" and card["max_model_len"] == MODEL.context
    assert live.client.get("/v1/models/k2-test").json() == card
    response = live.client.get("/v1/models/some/other")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
