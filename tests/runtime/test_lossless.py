"""Speculation changes nothing but the speed: chain and tree give plain decoding's text, token for token.

On the toy engine of `tests.runtime.toy`, whose text depends on every KV slot, mask bit and position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from engine_runtime.budget import CostTable, Speculation
from engine_runtime.decoder import Decoder, Event
from engine_runtime.sampling import SamplingParams
from tests.runtime import toy
from tests.runtime.toy import EOS, VOCAB, Drafter, ToyExecutor, ask, toy_limits

PROMPTS = 200
TEMPERATURES = {"greedy": (0.0, 1.0), "0.7": (0.7, 1.0), "1.0 top_p": (1.0, 0.9)}
BUDGETS = (0, 1, 2, 4, 8, 16, 64)
DRAFTERS: dict[str, Drafter] = {
    "right": toy.right_drafter,
    "wrong": toy.wrong_drafter,
    "random": toy.random_drafter,
    "eos": toy.eos_drafter,
    "repeat": toy.repeat_drafter,
    "sparse": toy.sparse_drafter,
}
PLAIN = Speculation("off")

Text = tuple[tuple[int, ...], str]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, 40)).tolist() for _ in range(count)]


def params(index: int, temperature: float, top_p: float, **changes: object) -> SamplingParams:
    values = {"temperature": temperature, "top_p": top_p, "seed": index, "max_tokens": 2 + index % 9}
    return SamplingParams(**{**values, **changes})  # type: ignore[arg-type]


def decode(
    executor: ToyExecutor,
    requests: Sequence[tuple[list[int], SamplingParams]],
    speculation: Speculation | Sequence[Speculation],
    costs: CostTable | None = None,
    calibrate: bool = False,
) -> tuple[list[Text], Decoder]:
    """Text and finish reason of every request, all in one decoder."""
    decoder = Decoder(executor, costs, calibrate)
    each = [speculation] * len(requests) if isinstance(speculation, Speculation) else speculation
    for (prompt, parameters), mode in zip(requests, each, strict=True):
        decoder.submit(ask(prompt, parameters, mode))
    tokens: list[list[int]] = [[] for _ in requests]
    ends: dict[int, Event] = {}
    while decoder.busy:
        for event in decoder.step():
            assert event.request not in ends, "an event after the end"
            tokens[event.request] += event.output.tokens
            if event.output.finish is not None:
                ends[event.request] = event
    return [(tuple(t), str(ends[i].output.finish)) for i, t in enumerate(tokens)], decoder


@pytest.fixture(scope="module", params=TEMPERATURES, ids=str)
def plain(request: pytest.FixtureRequest) -> tuple[list[tuple[list[int], SamplingParams]], list[Text]]:
    """200 requests at one temperature, and what plain decoding makes of them."""
    temperature, top_p = TEMPERATURES[request.param]
    requests = [(p, params(i, temperature, top_p)) for i, p in enumerate(prompts(PROMPTS))]
    texts, decoder = decode(ToyExecutor(toy_limits()), requests, PLAIN)
    assert decoder.stats.tokens_per_pass == 1.0
    return requests, texts


def test_plain_decoding_is_what_the_model_says() -> None:
    """Plain greedy text is the argmax of the toy's logits, computed without any cache."""
    requests = [(p, params(i, 0.0, 1.0)) for i, p in enumerate(prompts(20))]
    executor = ToyExecutor(toy_limits())
    texts, _ = decode(executor, requests, PLAIN)
    for (prompt, parameters), (tokens, finish) in zip(requests, texts, strict=True):
        context = list(prompt)
        for token in tokens:
            assert token == int(executor.target_logits(context).argmax())
            context.append(token)
        assert finish == ("stop" if tokens[-1] == EOS else "length")
        assert EOS not in tokens[:-1] and (finish == "stop" or len(tokens) == parameters.max_tokens)


@pytest.mark.parametrize("budget", BUDGETS)
def test_tree_equals_plain(plain: tuple[list, list[Text]], budget: int) -> None:
    requests, texts = plain
    found, decoder = decode(ToyExecutor(toy_limits()), requests, Speculation("tree", budget))
    assert found == texts
    if budget == 0:
        assert decoder.stats.drafted_passes == 0
    else:
        assert decoder.stats.tokens_per_pass > 1.05


def test_chain_equals_plain(plain: tuple[list, list[Text]]) -> None:
    requests, texts = plain
    found, decoder = decode(ToyExecutor(toy_limits()), requests, Speculation("chain"))
    assert found == texts
    assert decoder.stats.tokens_per_pass > 1.05


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_any_drafter_gives_the_plain_text(plain: tuple[list, list[Text]], name: str, mode: str) -> None:
    requests, texts = (part[:40] for part in plain)
    speculation = Speculation(mode, 12 if mode == "tree" else None)
    found, decoder = decode(ToyExecutor(toy_limits(), DRAFTERS[name]), requests, speculation)
    assert found == texts
    accepted = sum(decoder.stats.accepted)
    if name == "right":
        assert decoder.stats.accepted == decoder.stats.reached
        assert decoder.stats.tokens_per_pass > 2.5
    if name == "wrong":
        assert accepted == 0 and decoder.stats.tokens_per_pass == 1.0
    assert max(decoder.stats.offered) > 0


def test_cost_rule_and_calibration_change_no_text(plain: tuple[list, list[Text]]) -> None:
    requests, texts = plain
    rows = (1, 8, 16, 32, 64, 128, 256, 520)
    seconds = tuple(1e-3 + 1e-4 * n for n in rows)
    costs = CostTable(rows, (0, 256), (seconds, tuple(2 * s for s in seconds)), {1: 1e-4, 8: 2e-4})
    found, decoder = decode(ToyExecutor(toy_limits()), requests, Speculation("tree"), costs)
    assert found == texts
    assert decoder.stats.drafted_passes > 0
    assert decode(ToyExecutor(toy_limits()), requests[:40], Speculation("tree", 8), None, True)[0] == texts[:40]


def test_modes_mixed_in_one_batch(plain: tuple[list, list[Text]]) -> None:
    """Plain, chain and tree requests share passes; each still gets its own text."""
    requests, texts = plain
    modes = [
        PLAIN,
        Speculation("chain"),
        Speculation("tree", 3),
        Speculation("tree", 30),
        Speculation("tree", 0),
    ]
    each = [modes[i % len(modes)] for i in range(len(requests))]
    assert decode(ToyExecutor(toy_limits()), requests, each)[0] == texts


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (1, 65), (2, 3), (3, 7), (8, 8), (5, 33)])
def test_any_shape_of_engine_gives_the_same_text(plain: tuple[list, list[Text]], slots: int, rows: int) -> None:
    """Slots, rows and pages limit how much is decoded at once, never what."""
    requests, texts = (part[:30] for part in plain)
    limits = toy_limits(max_requests=slots, max_rows=rows, kv_pages=16, page_size=8, prefill_chunk=5)
    assert decode(ToyExecutor(limits), requests, Speculation("tree", 64))[0] == texts


def test_stop_id_at_every_path_index() -> None:
    """The text ends after the first stop id wherever it falls in the accepted path."""
    depth = toy_limits().draft_depth
    requests = [(p, params(i, 0.7, 1.0, max_tokens=24, stop_ids=())) for i, p in enumerate(prompts(12, seed=5))]
    texts, _ = decode(ToyExecutor(toy_limits()), requests, PLAIN)
    cut: list[tuple[list[int], SamplingParams]] = []
    expected: list[Text] = []
    for (prompt, parameters), (tokens, _) in zip(requests, texts, strict=True):
        for index in range(2 * depth + 3):
            stop = tokens[index]
            end = tokens.index(stop) + 1
            values = {"max_tokens": 24, "stop_ids": (VOCAB - 1, stop) if stop != VOCAB - 1 else (stop,)}
            end = min(tokens.index(s) + 1 for s in values["stop_ids"] if s in tokens)  # type: ignore[union-attr]
            cut.append((prompt, params(parameters.seed, 0.7, 1.0, **values)))
            expected.append((tokens[:end], "stop"))
    for drafter in (toy.right_drafter, toy.good_drafter):
        executor = ToyExecutor(toy_limits(), drafter)
        assert decode(executor, cut, Speculation("chain"))[0] == expected


def test_max_tokens_at_every_path_index() -> None:
    prompt = prompts(1, seed=6)[0]
    (tokens, _), *_ = decode(ToyExecutor(toy_limits()), [(prompt, SamplingParams(max_tokens=20, stop_ids=()))], PLAIN)[
        0
    ]
    requests = [(prompt, SamplingParams(max_tokens=most, stop_ids=())) for most in range(1, 21)]
    for speculation in (Speculation("chain"), Speculation("tree", 20)):
        found, _ = decode(ToyExecutor(toy_limits(), toy.right_drafter), requests, speculation)
        assert found == [(tokens[:most], "length") for most in range(1, 21)]


def test_context_limit_at_every_path_index() -> None:
    """Prompts that nearly fill the context: all that fits is generated, and the same with trees."""
    limits = toy_limits(max_context=40, page_size=8, kv_pages=60)
    rng = np.random.default_rng(8)
    requests = [
        (rng.integers(0, VOCAB, 40 - room).tolist(), SamplingParams(stop_ids=(), seed=room, temperature=0.5))
        for room in range(1, 20)
    ]
    texts, _ = decode(ToyExecutor(limits), requests, PLAIN)
    assert [(len(tokens), finish) for tokens, finish in texts] == [(room, "length") for room in range(1, 20)]
    for drafter in (toy.right_drafter, toy.good_drafter):
        found, _ = decode(ToyExecutor(limits, drafter), requests, Speculation("tree", 24))
        assert found == texts


def test_distribution_at_temperature_one() -> None:
    """Chi-square of the first drafted-and-verified token over seeds, on a small vocabulary."""
    vocab, draws = 8, 1500
    prompt = [3, 1]
    limits = toy_limits(max_context=32, tree_top_k=4, max_rows=8 * 9)
    executor = ToyExecutor(limits, toy.random_drafter, vocab)
    requests = [(prompt, SamplingParams(1.0, seed=s, max_tokens=2, stop_ids=(7,))) for s in range(draws)]
    # token 2 is drawn in a decode pass whose tree holds candidates for it only if more than one token remains
    requests = [(p, SamplingParams(1.0, seed=q.seed, max_tokens=3, stop_ids=())) for p, q in requests]
    texts, decoder = decode(executor, requests, Speculation("tree", 8))
    assert sum(decoder.stats.accepted) > draws / 4
    scores = executor.target_logits(prompt).astype(np.float64)
    first = np.exp(scores - scores.max())
    first /= first.sum()
    joint = np.zeros((vocab, vocab))
    for token in range(vocab):
        logits = executor.target_logits([*prompt, token]).astype(np.float64)
        second = np.exp(logits - logits.max())
        joint[token] = first[token] * second / second.sum()
    counts = np.zeros((vocab, vocab))
    for tokens, _ in texts:
        counts[tokens[0], tokens[1]] += 1
    expected = draws * joint.ravel()
    common = expected >= 5
    observed = np.append(counts.ravel()[common], counts.ravel()[~common].sum())
    assert stats.chisquare(observed, np.append(expected[common], expected[~common].sum())).pvalue > 1e-4
