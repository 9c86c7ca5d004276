"""Log-probabilities of what was generated and of the prompt, and traces of the trees, on the toy engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.decoder import Decoder
from engine_runtime.generation import Constraint, GenerationRequest, Output, TokenLogprobs
from engine_runtime.logprobs import token_logprobs
from engine_runtime.sampling import SamplingParams
from tests.runtime import toy
from tests.runtime.toy import VOCAB, ToyExecutor, toy_limits

PROMPT = tuple(np.random.default_rng(3).integers(0, VOCAB, 37).tolist())
MODES = [PLAIN, Speculation("chain"), Speculation("tree", 9)]


def run(decoder: Decoder, *requests: GenerationRequest) -> list[list[Output]]:
    ids = [decoder.submit(request) for request in requests]
    outputs: dict[int, list[Output]] = {i: [] for i in ids}
    while decoder.busy:
        for event in decoder.step():
            outputs[event.request].append(event.output)
    return [outputs[i] for i in ids]


def expected(executor: ToyExecutor, text: list[int], index: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Of text[index], by torch."""
    values = torch.log_softmax(torch.from_numpy(executor.target_logits(text[:index])).double(), 0)
    best = sorted(range(VOCAB), key=lambda token: (-float(values[token]), token))[:top]
    return float(values[text[index]]), [(token, float(values[token])) for token in best]


def check(found: TokenLogprobs | None, executor: ToyExecutor, text: list[int], index: int, top: int) -> None:
    assert found is not None and found.token == text[index]
    value, best = expected(executor, text, index, top)
    assert found.logprob == pytest.approx(value, abs=1e-5)
    assert [token for token, _ in found.top] == [token for token, _ in best]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in best], abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(20, 60))
def test_logprobs_are_those_of_torch(seed: int, top: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-4, 4, (3, vocab)).astype(np.float32) * rng.choice([1, 30])  # with ties
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    tokens = [int(rng.choice(np.flatnonzero(np.isfinite(row)))) for row in logits]
    values = torch.log_softmax(torch.from_numpy(logits).double(), 1)
    for row, found in enumerate(token_logprobs(logits, tokens, top)):
        assert found.logprob == pytest.approx(float(values[row, tokens[row]]), abs=1e-5)
        best = sorted(range(vocab), key=lambda token: (-float(logits[row, token]), token))[:top]
        assert [token for token, _ in found.top] == best
        assert [v for _, v in found.top] == pytest.approx([float(values[row, t]) for t in best], abs=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_token_has_its_logprob_before_penalties_and_temperature(mode: Speculation) -> None:
    executor = ToyExecutor(toy_limits(), toy.good_drafter)
    params = SamplingParams(0.9, seed=4, max_tokens=30, stop_ids=(), presence_penalty=1.0, logit_bias=((3, 4.0),))
    banned = Constraint(banned=tuple(range(20, 30)))
    requests = [
        GenerationRequest(PROMPT, params, mode, banned, logprobs=3),
        GenerationRequest(PROMPT[:9], params, mode, logprobs=0),
        GenerationRequest(PROMPT[:5], params, mode),
    ]
    for request, outputs in zip(requests, run(Decoder(executor), *requests), strict=True):
        text = [*request.prompt, *(token for output in outputs for token in output.tokens)]
        if request.logprobs is None:
            assert all(output.logprobs is None for output in outputs)
            continue
        found = [value for output in outputs for value in output.logprobs or ()]
        assert len(found) == 30 and all(len(o.logprobs or ()) == len(o.tokens) for o in outputs)
        for index, value in enumerate(found, len(request.prompt)):
            check(value, executor, text, index, request.logprobs)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 37])
def test_a_scored_prompt_goes_on_as_if_it_had_not_been(mode: Speculation, length: int) -> None:
    """Scores of every prompt token, then the text of a request without them: KV, penalties and drafts are right."""
    params = SamplingParams(0.8, seed=2, max_tokens=20, stop_ids=(), frequency_penalty=0.5, repetition_penalty=1.2)
    prompt = PROMPT[:length]
    executor = ToyExecutor(toy_limits(), toy.good_drafter)
    decoder = Decoder(executor)
    scored = GenerationRequest(prompt, params, mode, prompt_logprobs=2)
    company = GenerationRequest(PROMPT[::-1], params, mode)
    outputs, others = run(decoder, scored, company)
    plain, other = run(Decoder(ToyExecutor(toy_limits())), GenerationRequest(prompt, params, PLAIN), company)
    assert _text(outputs) == _text(plain) and _text(others) == _text(other)
    with_scores = [output for output in outputs if output.prompt_logprobs is not None]
    assert with_scores == outputs[:1]
    scores = outputs[0].prompt_logprobs or ()
    assert len(scores) == length and scores[0] is None
    for index in range(1, length):
        check(scores[index], executor, list(prompt), index, 2)
    # again, with the prompt in the prefix cache: cached tokens have no logits, so they are computed again
    again, _ = run(decoder, scored, company)
    assert _text(again) == _text(outputs) and again[0].prompt_logprobs == outputs[0].prompt_logprobs
    assert again[-1].usage is not None and again[-1].usage.cached_tokens == 0


def _text(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize("length", [1, 5, 37])
def test_a4_scoring_alone_generates_nothing(length: int) -> None:
    """echo with max_tokens 0."""
    executor = ToyExecutor(toy_limits(max_rows=8))
    decoder = Decoder(executor)
    request = GenerationRequest(PROMPT[:length], SamplingParams(max_tokens=0), prompt_logprobs=1)
    others = [GenerationRequest(PROMPT[i:], SamplingParams(max_tokens=12, stop_ids=())) for i in range(2)]
    outputs, *rest = run(decoder, request, *others)
    assert len(outputs) == 1 and outputs[0].tokens == () and outputs[0].finish == "length"
    scores = outputs[0].prompt_logprobs or ()
    assert len(scores) == length
    for index in range(1, length):
        check(scores[index], executor, list(request.prompt), index, 1)
    usage = outputs[0].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (length, 0)
    assert [_text(each) for each in rest] == [_text(each) for each in run(Decoder(ToyExecutor(toy_limits())), *others)]
    assert not decoder.status().running and decoder.status().kv_pages_used == 0


def test_a_preempted_request_is_scored_once() -> None:
    limits = toy_limits(max_requests=3, kv_pages=9, max_rows=24)
    params = SamplingParams(max_tokens=60, stop_ids=())
    requests = [GenerationRequest(PROMPT[i:], params, prompt_logprobs=1) for i in range(3)]
    decoder = Decoder(ToyExecutor(limits))
    found = run(decoder, *requests)
    assert sum(each[-1].usage.preemptions for each in found if each[-1].usage) > 0
    alone = [run(Decoder(ToyExecutor(toy_limits())), request)[0] for request in requests]
    for each, other in zip(found, alone, strict=True):
        assert _text(each) == _text(other)
        assert [o.prompt_logprobs for o in each if o.prompt_logprobs] == [other[0].prompt_logprobs]


def test_nan_in_a_scored_prompt_ends_that_request_alone() -> None:
    executor = ToyExecutor(toy_limits())
    executor.nan_token = PROMPT[4]
    good = tuple(token for token in PROMPT if token != PROMPT[4])
    bad, other = run(
        Decoder(executor),
        GenerationRequest(PROMPT, SamplingParams(max_tokens=3), prompt_logprobs=0),
        GenerationRequest(good, SamplingParams(max_tokens=0), prompt_logprobs=0),
    )
    assert (len(bad), bad[0].finish) == (1, "error") and "NaN" in str(bad[0].error)
    assert (len(other), other[0].finish, other[0].error) == (1, "length", None)


def test_traces_show_the_trees_that_were_verified() -> None:
    executor = ToyExecutor(toy_limits(), toy.right_drafter)
    params = SamplingParams(0.6, seed=5, max_tokens=40, stop_ids=())
    banned = Constraint(banned=tuple(range(1, VOCAB, 3)))
    requests = [
        GenerationRequest(PROMPT, params, Speculation("tree", 12), trace=True),
        GenerationRequest(PROMPT[:7], params, Speculation("tree", 12), banned, trace=True),
        GenerationRequest(PROMPT[:8], params, PLAIN, trace=True),
        GenerationRequest(PROMPT[:9], params, Speculation("tree", 12)),
    ]
    for request, outputs in zip(requests, run(Decoder(executor), *requests), strict=True):
        text = list(outputs[0].tokens)  # the first token comes from the prefill
        assert outputs[0].trace is None
        widest = 0
        for output in outputs[1:]:
            trace = output.trace
            if not request.trace:
                assert trace is None
                continue
            assert trace is not None and trace.tokens[0] == text[-1] and trace.parents[0] == -1
            assert len(trace.tokens) == len(trace.parents) == len(trace.probabilities)
            for row in range(1, len(trace.tokens)):
                parent = trace.parents[row]
                assert 0 <= parent < row and trace.probabilities[row] <= trace.probabilities[parent] <= 1
            assert trace.accepted[0] == 0
            for parent, row in zip(trace.accepted, trace.accepted[1:], strict=False):
                assert trace.parents[row] == parent
            assert (*(trace.tokens[row] for row in trace.accepted[1:]), trace.bonus) == output.tokens
            if request.constraint:
                assert not set(trace.tokens[1:]) & set(request.constraint.banned)
            text += output.tokens
            widest = max(widest, len(trace.tokens))
        if request.trace:
            assert widest == 1 if request.speculation is PLAIN else widest > 5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"logprobs": 21}, "logprobs: expected an integer from 0 to 20, found 21"),
        ({"logprobs": True}, "logprobs: expected an integer from 0 to 20, found True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: expected an integer from 0 to 20, found -1"),
        ({"params": SamplingParams(max_tokens=0)}, "max_tokens: expected at least 1 unless prompt_logprobs"),
    ],
)
def test_out_of_range(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GenerationRequest((1,), **changes)
