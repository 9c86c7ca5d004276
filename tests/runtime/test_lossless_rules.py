"""Penalties, bias and constraints: chain and trees give the text that a plain loop over the model's logits gives.

On the toy engine, with a drafter that knows the text and mixes it with tokens that are wrong or not allowed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
import torch

from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.constraints import Rules, TooComplex
from engine_runtime.decoder import Decoder
from engine_runtime.generation import Constraint, GenerationRequest, Output
from engine_runtime.sampling import SamplingParams
from plugins.core.splat import hash32
from plugins.sample.reference import gumbel
from tests.runtime.oracle_rules import JSON, SCHEMA, allowed_after, end, grammars, think, tokenizer
from tests.runtime.toy import Drafter, ToyExecutor, toy_limits

VOCAB = 768
MODES = [PLAIN, Speculation("chain"), Speculation("tree", 1), Speculation("tree", 5), Speculation("tree", 16)]
LIMITS = {"max_requests": 4, "max_rows": 4 * 17, "kv_pages": 60}

OPENING = tuple(range(0, VOCAB, 5))

Text = tuple[tuple[int, ...], str]


def run(requests: Sequence[GenerationRequest], drafter: Drafter | None = None, **limits: int) -> list[list[Output]]:
    """All outputs of every request, run together."""
    toy_shape = toy_limits(**{**LIMITS, **limits})
    decoder = Decoder(ToyExecutor(toy_shape, drafter, VOCAB), grammars=grammars())
    ids = [decoder.submit(request) for request in requests]
    outputs: dict[int, list[Output]] = {i: [] for i in ids}
    while decoder.busy:
        for event in decoder.step():
            outputs[event.request].append(event.output)
    return [outputs[i] for i in ids]


def text_of(outputs: Sequence[Output]) -> Text:
    return tuple(token for output in outputs for token in output.tokens), str(outputs[-1].finish)


def simulate(request: GenerationRequest) -> Text:
    """The text of `request`, token by token, without a cache, a tree or a buffer."""
    params, constraint = request.params, request.constraint or Constraint()
    model = ToyExecutor(toy_limits(), vocab=VOCAB)
    stops = params.stop_ids or ()
    text: list[int] = []
    while len(text) < (params.max_tokens or 0):
        logits = model.target_logits([*request.prompt, *text])
        allowed = sorted(allowed_after(constraint, params.min_tokens, stops, text, VOCAB))
        if not allowed:
            return tuple(text), "error"
        scores = {}
        for token in allowed:
            score = logits[token] + np.float32(dict(params.logit_bias).get(token, 0.0))
            if token in request.prompt or token in text:
                repetition = np.float32(params.repetition_penalty)
                score = score / repetition if score > 0 else score * repetition
            score -= np.float32(params.frequency_penalty) * np.float32(text.count(token))
            scores[token] = score - np.float32(params.presence_penalty) * np.float32(token in text)
        if params.temperature:
            largest = max(scores.values())
            noise = gumbel(params.seed, len(request.prompt) + len(text), torch.tensor(allowed)).tolist()
            for token, gain in zip(allowed, noise, strict=True):
                scores[token] = (scores[token] - largest) / np.float32(params.temperature) + np.float32(gain)
        text.append(max(allowed, key=lambda token: (scores[token], -token)))
        if text[-1] in stops:
            return tuple(text), "stop"
    return tuple(text), "length"


def knowing_drafter(requests: Sequence[GenerationRequest], texts: Sequence[Text]) -> Drafter:
    """Drafts the texts, each token at a rank of its own among made-up ones."""
    whole = [(*request.prompt, *text) for request, (text, _) in zip(requests, texts, strict=True)]

    def drafter(toy: ToyExecutor, slot: int, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        depth, top_k = toy.limits.draft_depth, toy.limits.tree_top_k
        known = next(text for text in whole if list(text[: len(tokens)]) == tokens)[len(tokens) :]
        ids = hash32(np.arange(depth * top_k, dtype=np.uint32), len(tokens)).reshape(depth, top_k) % VOCAB
        ids = (ids - ids % 16 + np.arange(top_k)).astype(np.int64)  # distinct
        ranks = hash32(np.arange(depth, dtype=np.uint32), len(tokens) + 7) % 5 // 2
        for place, (token, rank) in enumerate(zip(known, ranks, strict=False)):
            ids[place][ids[place] == token] = ids[place, rank]
            ids[place, rank] = token
        return np.tile(np.linspace(0, -2, top_k, dtype=np.float32), (depth, 1)), ids, np.full(depth, 1.5, np.float32)

    return drafter


def cases(temperature: float) -> list[GenerationRequest]:
    """Requests with penalties, bias, grammars, bans and all of them, each with its own prompt and seed."""
    lark = f'start: item+ <[{think()}]>\nitem: "the " | /[0-9]{{1,3}}/ "," | "tree" | "é"'
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.2}
    letters = tokenizer().encode("etaoin")
    given: list[tuple[dict, Constraint | None]] = [
        ({"presence_penalty": 1.5}, None),
        ({"frequency_penalty": -1.0, "max_tokens": 20}, None),
        ({"repetition_penalty": 1.6}, None),
        ({"logit_bias": tuple((token, 7.5) for token in letters), **penalties}, None),
        ({"logit_bias": tuple((token, -100.0) for token in range(700)), "min_tokens": 12}, None),
        ({}, Constraint(JSON)),
        (penalties, Constraint(JSON)),
        ({"min_tokens": 7, **penalties}, Constraint(lark)),
        ({"min_tokens": 3}, Constraint(lark, after=tuple(range(0, VOCAB, 3)), banned_before=(end(),))),
        (penalties, Constraint(JSON, after=tuple(range(0, VOCAB, 2)), banned=(letters[0],))),
        ({}, Constraint(banned=tuple(range(0, VOCAB, 2)))),
        ({"logit_bias": ((end(), 9.0),), "min_tokens": 9}, None),
    ]
    rng = np.random.default_rng(1)
    requests = []
    for seed, (params, constraint) in enumerate(given):
        values = {"max_tokens": 30, "seed": seed, "stop_ids": (end(),), "temperature": temperature, **params}
        prompt = tuple(rng.integers(0, VOCAB, int(rng.integers(2, 30))).tolist())
        requests.append(GenerationRequest(prompt, SamplingParams(**values), constraint=constraint))
    return requests


def with_mode(requests: Sequence[GenerationRequest], speculation: Speculation, **changes: object) -> list:
    return [
        GenerationRequest(r.prompt, r.params, speculation, r.constraint, **changes)  # type: ignore[arg-type]
        for r in requests
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_every_mode_gives_the_simulated_text(temperature: float) -> None:
    requests = cases(temperature)
    expected = [simulate(request) for request in requests]
    assert {finish for _, finish in expected} >= {"stop", "length"}
    for mode in MODES:
        outputs = run(with_mode(requests, mode), knowing_drafter(requests, expected))
        assert [text_of(each) for each in outputs] == expected, mode
        if mode.budget == 16:  # the drafts were worth it: rules that forbade everything would hide mistakes
            usage = [each[-1].usage for each in outputs]
            assert sum(use.accepted for use in usage if use) > 0.4 * sum(len(tokens) for tokens, _ in expected)


def test_a8_forbidden_branches_are_not_verified() -> None:
    """A8: drafted tokens that the grammar forbids cost no row and end nothing."""
    requests = [request for request in cases(1.0) if request.constraint is not None]
    expected = [simulate(request) for request in requests]
    rows = {}
    for name, constrained in (("ruled", True), ("free", False)):
        given = with_mode(requests, Speculation("tree", 16))
        if not constrained:
            given = [GenerationRequest(r.prompt, r.params, r.speculation) for r in given]
        outputs = run(given, knowing_drafter(requests, expected) if constrained else None)
        rows[name] = sum(each[-1].usage.rows / each[-1].usage.passes for each in outputs if each[-1].usage)
        if constrained:
            assert [text_of(each) for each in outputs] == expected
    assert rows["ruled"] < 0.7 * rows["free"]


def json_requests(mode: Speculation) -> list[GenerationRequest]:
    """JSON from the first token, and behind the end of a reasoning, which may be inside a draft."""
    return [
        GenerationRequest(
            (seed + 1, seed),
            SamplingParams(1.0, seed=seed + 50, max_tokens=200, stop_ids=(end(),)),
            mode,
            Constraint(JSON, after=OPENING if seed % 2 else (), banned_before=(end(),)),
        )
        for seed in range(4)
    ]


@pytest.fixture(scope="module")
def plain_json() -> list[Text]:
    """What plain decoding makes of `json_requests`: JSON that follows the schema."""
    texts = [text_of(each) for each in run(json_requests(PLAIN))]
    for seed, (tokens, finish) in enumerate(texts):
        assert finish == "stop" and tokens[-1] == end()
        begin = next(i for i, token in enumerate(tokens) if token in OPENING) + 1 if seed % 2 else 0
        jsonschema.validate(json.loads(tokenizer().decode(tokens[begin:-1])), SCHEMA)
    return texts


@pytest.mark.parametrize("budget", range(1, 17))
def test_a7_json_is_valid_whatever_the_tree(plain_json: list[Text], budget: int) -> None:
    modes = [Speculation("tree", budget)] + [Speculation("chain", budget)] * (budget in (1, 3, 7))
    for mode in modes:
        assert [text_of(each) for each in run(json_requests(mode))] == plain_json


def test_a_dead_end_ends_its_own_request_with_a_sentence() -> None:
    """A grammar whose only way on is banned: what was written is kept, nothing is made up, the others go on."""
    a, b = tokenizer().encode("a")[0], tokenizer().encode("b")[0]
    grammar = 'start: "x" "a" "b"'
    for mode in MODES:
        blocked = GenerationRequest(
            (5, 6), SamplingParams(stop_ids=(end(),)), mode, Constraint(grammar, banned=(a, *_starting_with(b"a")))
        )
        at_once = GenerationRequest((5, 7), SamplingParams(), mode, Constraint(banned=tuple(range(VOCAB))))
        free = GenerationRequest((5, 8), SamplingParams(max_tokens=9, stop_ids=()), mode)
        outputs = run([blocked, at_once, free])
        assert text_of(outputs[0]) == (tuple(tokenizer().encode("x")), "error")
        assert text_of(outputs[1]) == ((), "error")
        for ended in outputs[:2]:
            assert ended[-1].error == "the constraints of the request leave no token that could follow"
        assert text_of(outputs[2]) == simulate(free) and b not in text_of(outputs[0])[0]


def _starting_with(prefix: bytes) -> list[int]:
    return [i for i in range(tokenizer().num_base_tokens) if tokenizer().token_bytes(i).startswith(prefix)]


def test_a_grammar_beyond_its_limits_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rules._grammar_mask

    def give_up(self: Rules, matcher: object) -> np.ndarray:
        if len(self._eaten) >= 3:
            raise TooComplex
        return real(self, matcher)  # type: ignore[arg-type]

    params = SamplingParams(max_tokens=60, stop_ids=(end(),))
    request = GenerationRequest((1, 2), params, constraint=Constraint(JSON))
    free = GenerationRequest((5, 8), SamplingParams(max_tokens=9, stop_ids=()))
    whole, _ = simulate(request)
    monkeypatch.setattr(Rules, "_grammar_mask", give_up)
    for mode in MODES:
        given = with_mode([request, free], mode)
        outputs = run(given, knowing_drafter([request, free], [(whole, "stop"), simulate(free)]))
        assert text_of(outputs[0]) == (whole[:3], "error")
        assert "more work" in str(outputs[0][-1].error)
        assert text_of(outputs[1]) == simulate(free)


def test_preempted_requests_keep_their_place_in_their_rules() -> None:
    """A pool too small for all: requests are put off and come back, penalties, bias and grammar where they were."""
    requests = cases(0.9)
    expected = [simulate(request) for request in requests]
    outputs = run(with_mode(requests, Speculation("tree", 8)), knowing_drafter(requests, expected), kv_pages=7)
    assert [text_of(each) for each in outputs] == expected
    assert sum(each[-1].usage.preemptions for each in outputs if each[-1].usage) > 0


def test_a12_equal_seeds_give_equal_texts_in_any_company() -> None:
    """A12: the text depends on prompt, parameters and seed, not on mode, budget, slot or the other requests."""
    prompt, params = (9, 8, 7), SamplingParams(1.0, seed=1234, max_tokens=30, stop_ids=(), frequency_penalty=0.3)
    wanted = simulate(GenerationRequest(prompt, params))
    others = cases(0.8)
    for index, mode in enumerate(MODES):
        given = with_mode(others[2 * index : 2 * index + 4], MODES[index - 1])
        given.insert(index % 5, GenerationRequest(prompt, params, mode))
        assert text_of(run(given)[index % 5]) == wanted
    assert simulate(GenerationRequest(prompt, SamplingParams(1.0, seed=1235, max_tokens=30, stop_ids=()))) != wanted


def test_bias_beyond_the_vocabulary_is_refused_at_submit() -> None:
    """A2: `logit_bias` of a token that does not exist is an error of that request; the engine goes on."""
    decoder = Decoder(ToyExecutor(toy_limits(), vocab=VOCAB), grammars=grammars())
    params = SamplingParams(logit_bias=((191222, -100.0),))
    with pytest.raises(ValueError, match="logit_bias: expected token ids from 0 to 767, found 191222"):
        decoder.submit(GenerationRequest((1,), params))
    assert not decoder.busy


def test_a3_a_broken_grammar_is_refused_at_submit() -> None:
    decoder = Decoder(ToyExecutor(toy_limits(), vocab=VOCAB), grammars=grammars())
    running = decoder.submit(GenerationRequest((1, 2), SamplingParams(max_tokens=4, stop_ids=())))
    for broken in ("start: /(/", '{"grammars": [{"json_schema": {"type": "objekt"}}]}', "begin: 1", "{"):
        with pytest.raises(ValueError, match="^grammar: ") as caught:
            decoder.submit(GenerationRequest((1,), constraint=Constraint(broken)))
        assert "\n" not in str(caught.value)
    outputs = [event.output for _ in range(20) for event in decoder.step() if event.request == running]
    assert text_of(outputs)[1] == "length"
