"""`sample` against transformers' logits processors, and its noise against the softmax it should draw from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.state import PROMPT_TOKEN
from plugins.sample.reference import gumbel, kept_tokens, penalize, sample

NAN, INF = float("nan"), float("inf")
MASK = (1 << 64) - 1


PER_REQUEST = {
    "temperature": (0.0, torch.float32),
    "top_k": (0, torch.int32),
    "top_p": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
    "seed": (0, torch.int64),
    "penalized": (0, torch.int32),
    "presence_penalty": (0.0, torch.float32),
    "frequency_penalty": (0.0, torch.float32),
    "repetition_penalty": (1.0, torch.float32),
}


def run(
    logits: torch.Tensor,
    positions: object = 0,
    requests: object = 0,
    counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    masked: object = None,
    tokens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    **parameters: object,
) -> list[int]:
    """Tokens of logits [T, V]; `parameters` are per request, one value standing for one request.

    counts, bias [R, V]; allowed bool [T, V]: masks of the rows, or of those flagged in `masked`.
    """
    rows, vocab = logits.shape
    values = [
        torch.as_tensor(parameters.get(name, default)).reshape(-1).to(dtype)
        for name, (default, dtype) in PER_REQUEST.items()
    ]
    size = max(len(value) for value in values)
    values = [value.expand(size).contiguous() for value in values]
    where = [torch.as_tensor(v, dtype=torch.int32).expand(rows) for v in (positions, requests)]
    counts = torch.full((size, vocab), 3, dtype=torch.int32) if counts is None else counts.to(torch.int32)
    bias = torch.full((size, vocab), 5.0) if bias is None else bias
    words = np.full((rows, -(-vocab // 32)), 0, np.uint32)
    if allowed is not None:
        bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
        words.view(np.uint8)[:, : bits.shape[1]] = bits
    flags = torch.as_tensor((allowed is not None) if masked is None else masked, dtype=torch.int32).expand(rows)
    out = sample(logits, *where, *values, counts, bias, flags, torch.from_numpy(words), tokens, parents)
    assert out.dtype == torch.int32 and out.shape == (rows,)
    return out.tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, [17, 4000]] = 2.0
    logits[2] = -INF
    logits[2, [99, 100]] = -1e30
    assert run(logits) == [0, 17, 99]
    assert run(logits, temperature=1e-4, top_k=1) == [0, 17, 99]


def test_rows_without_a_distribution_give_minus_one() -> None:
    logits = torch.zeros(5, 9)
    logits[0, 4], logits[1, 0], logits[2, 8] = NAN, INF, NAN
    logits[3] = -INF
    for temperature in (0.0, 1.0):
        assert run(logits, temperature=temperature, top_k=1) == [-1, -1, -1, -1, 0]


def test_padding_is_zero_whatever_it_holds() -> None:
    logits = torch.tensor([[0.0, 1.0], [NAN, 0.0], [0.0, 1.0]])
    assert run(logits, requests=torch.tensor([0, -1, -1])) == [1, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_top_k_of_one_is_greedy(seed: int) -> None:
    logits = torch.randint(-3, 3, (4, 12), generator=torch.Generator().manual_seed(seed)).float()
    assert run(logits, seed % 1000, temperature=0.7, top_k=1, seed=seed) == run(logits)


def uint64_gumbel(seed: int, position: int, token: int) -> float:
    """The documented noise in Python integers and float32."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden * (position + 1)) & MASK)
    bits = mix((key + golden * (token + 1)) & MASK)
    u = np.float32(((bits >> 41) + 0.5) * 2.0**-23)
    return float(-np.log(-np.log(u)))


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**18), st.integers(0, 163839))
def test_noise_is_the_documented_hash(seed: int, position: int, token: int) -> None:
    (noise,) = gumbel(seed, position, torch.tensor([token])).tolist()
    assert noise == pytest.approx(uint64_gumbel(seed, position, token), rel=1e-5, abs=1e-6)


def test_hash_is_splitmix64() -> None:
    """The first outputs of SplitMix64 from state 1234567, the published check values of the generator."""
    from plugins.sample.reference import _GOLDEN, _mix

    outputs = [_mix((1234567 + _GOLDEN * i) & MASK) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("along", ["token", "position", "seed"])
def test_noise_is_gumbel_along_every_key(along: str) -> None:
    if along == "token":
        values = gumbel(5, 17, torch.arange(20000)).numpy()
    else:
        keys = [(5, i) if along == "position" else (i, 17) for i in range(4000)]
        values = np.array([float(gumbel(*key, torch.tensor([42]))) for key in keys])
    assert np.isfinite(values).all()
    assert kstest(values, "gumbel_r").pvalue > 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / len(values) ** 0.5


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.15},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_follow_the_processed_distribution(parameters: dict, vary: str) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(1)) * 1.5
    probabilities = torch.softmax(processed(logits, parameters), dim=0).numpy().astype(np.float64)
    count = 4000
    rows = logits.expand(count, -1).contiguous()
    if vary == "position":
        drawn = run(rows, torch.arange(count), seed=11, **parameters)
    else:
        drawn = run(rows, 3, torch.arange(count), seed=torch.arange(count) * 7919, **parameters)
    found = np.bincount(drawn, minlength=10)
    possible = probabilities > 0
    assert not found[~possible].any()
    expected = probabilities[possible] / probabilities[possible].sum() * count
    assert possible.sum() > 1 and chisquare(found[possible], expected).pvalue > 1e-4


def processed(logits: torch.Tensor, parameters: dict) -> torch.Tensor:
    """Scores after transformers' processors in the order top_k, top_p, min_p; -inf where removed."""
    scores = logits[None] / parameters["temperature"]
    steps = [
        TopKLogitsWarper(parameters["top_k"]) if parameters.get("top_k", 0) else None,
        TopPLogitsWarper(parameters["top_p"]) if parameters.get("top_p", 1.0) < 1 else None,
        MinPLogitsWarper(parameters["min_p"]) if parameters.get("min_p", 0.0) else None,
    ]
    for step in steps:
        scores = scores if step is None else step(None, scores)
    return scores[0]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 300),
    st.floats(0.1, 3),
    st.one_of(st.just(0), st.integers(1, 320)),
    st.one_of(st.just(1.0), st.floats(0.02, 0.99)),
    st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)
def test_filters_agree_with_transformers(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    parameters = {"temperature": temperature, "top_k": min(top_k, size), "top_p": top_p, "min_p": min_p}
    expected = processed(logits, parameters)
    kept = kept_tokens((logits - logits.max()) / temperature, top_k, top_p, min_p)
    difference = set(kept.tolist()) ^ set(expected.isfinite().nonzero()[:, 0].tolist())
    if difference:  # only where the mass reaches top_p, or a ratio min_p, within rounding
        (token,) = difference
        limited = processed(logits, parameters | {"top_p": 1.0, "min_p": 0.0})
        chances = torch.softmax(limited.double(), 0)
        before = float(chances[chances > chances[token]].sum())
        after = before + float(chances[token])
        ratio = float(chances[token] / chances.max())
        assert min(abs(before - top_p), abs(after - top_p), abs(ratio - min_p)) < 2e-6


def test_ties_at_the_cut_go_to_the_lowest_ids() -> None:
    scores = torch.tensor([-1.0, 0.0, -1.0, -1.0, 0.0, -1.0])
    assert kept_tokens(scores, 3, 1.0, 0.0).tolist() == [0, 1, 4]
    assert kept_tokens(scores, 1, 1.0, 0.0).tolist() == [1]
    assert kept_tokens(torch.zeros(8), 0, 0.5, 0.0).tolist() == [0, 1, 2, 3]
    assert kept_tokens(scores, 0, 1e-9, 0.0).tolist() == [1]
    assert kept_tokens(scores, 0, 1.0, 1.0).tolist() == [1, 4]
    assert kept_tokens(scores, 0, 1.0, 0.0).tolist() == list(range(6))
    assert kept_tokens(scores, 99, 1.0, 0.0).tolist() == list(range(6))


def test_rows_of_several_requests_use_their_own_parameters() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    owner = torch.tensor([1, 0, 2, -1, 1, 2])
    positions = torch.arange(6) * 3
    parameters = {
        "temperature": torch.tensor([0.0, 1.0, 2.0]),
        "top_k": torch.tensor([0, 3, 0]),
        "top_p": torch.tensor([1.0, 0.9, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.02]),
        "seed": torch.tensor([1, -5, 2**40]),
    }
    together = run(logits, positions, owner, **parameters)
    for row, request in enumerate(owner.tolist()):
        own = {name: value[request] for name, value in parameters.items()}
        alone = run(logits[row : row + 1], positions[row], 0 if request >= 0 else -1, **own)
        assert alone == [together[row]]
    # order and company of rows do not matter
    assert run(logits.flip(0), positions.flip(0), owner.flip(0), **parameters) == together[::-1]


def test_noise_is_that_of_the_position_the_token_will_have() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(4))
    noise = torch.stack([gumbel(-9, position + 1, torch.arange(30)) for position in range(50)])
    drawn = run(logits, torch.arange(50), temperature=0.5, seed=-9)
    assert drawn == (logits / 0.5 + noise).argmax(1).tolist()


def test_different_positions_and_seeds_draw_differently() -> None:
    logits = torch.zeros(400, 50)
    by_position = run(logits, torch.arange(400), temperature=1.0, seed=3)
    assert run(logits, torch.arange(400), temperature=1.0, seed=3) == by_position
    assert np.mean(np.array(by_position[1:]) == by_position[:-1]) < 0.1
    assert np.mean(np.array(run(logits, torch.arange(400), temperature=1.0, seed=4)) == by_position) < 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_a_smaller_vocabulary(temperature: float) -> None:
    """What is drawn under a mask is what is drawn where the other logits are -inf."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(60, 70, generator=generator)
    allowed = torch.rand(60, 70, generator=generator) < 0.2
    allowed[:, 69] |= ~allowed.any(1)
    positions = torch.arange(60)
    expected = run(logits.masked_fill(~allowed, -INF), positions, temperature=temperature, top_p=0.9, seed=3)
    assert run(logits, positions, allowed=allowed, temperature=temperature, top_p=0.9, seed=3) == expected
    assert len(set(expected)) > 10
    flags = torch.arange(60) % 2
    mixed = run(logits, positions, allowed=allowed, masked=flags, temperature=temperature, top_p=0.9, seed=3)
    free = run(logits, positions, temperature=temperature, top_p=0.9, seed=3)
    assert mixed == [expected[i] if i % 2 else free[i] for i in range(60)]


def test_a_mask_that_allows_nothing_is_told_from_nan() -> None:
    logits = torch.zeros(4, 33)
    logits[1, 5], logits[2, 5], logits[3, :32] = NAN, INF, -INF
    allowed = torch.zeros(4, 33, dtype=torch.bool)
    allowed[3, 1] = True  # it is allowed, but impossible
    for temperature in (0.0, 1.0):
        assert run(logits, allowed=allowed, temperature=temperature) == [-2, -1, -1, -2]
    allowed[:, 32] = True
    assert run(logits, allowed=allowed) == [32, -1, -1, 32]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.floats(0.5, 2, width=32),
)
def test_penalties_are_those_of_vllm(seed: int, presence: float, frequency: float, repetition: float) -> None:
    """Against a token-by-token computation of vLLM's definition, in float32."""
    rng = np.random.default_rng(seed)
    vocab = 24
    prompt, text = (rng.integers(0, vocab, rng.integers(0, 12)).tolist() for _ in range(2))
    logits = rng.normal(size=vocab).astype(np.float32) * 3
    bias = np.where(rng.random(vocab) < 0.3, rng.normal(size=vocab) * 5, 0).astype(np.float32)
    expected = []
    for token in range(vocab):
        score = np.float32(logits[token] + bias[token])
        if token in prompt or token in text:
            score = score / np.float32(repetition) if score > 0 else score * np.float32(repetition)
        score = score - np.float32(frequency) * np.float32(text.count(token))
        expected.append(score - np.float32(presence) * np.float32(token in text))
    counts = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab).to(torch.int32)
    counts[prompt] |= PROMPT_TOKEN
    found = penalize(torch.from_numpy(logits), counts, torch.from_numpy(bias), presence, frequency, repetition)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    drawn = run(
        torch.from_numpy(logits)[None],
        counts=counts[None],
        bias=torch.from_numpy(bias)[None],
        penalized=1,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    assert found[drawn[0]] == found.max()


def test_rows_of_a_tree_count_their_own_ancestors() -> None:
    """A row of a tree draws what it draws where its ancestors are committed."""
    rng = np.random.default_rng(5)
    vocab, rows = 16, 40
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32))
    tokens = rng.integers(0, vocab, rows)
    parents = [-1] + [int(rng.integers(0, row)) for row in range(1, rows)]
    committed = rng.integers(0, 3, vocab)
    penalties = {"penalized": 1, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    bias = torch.zeros(1, vocab)
    positions = torch.arange(rows)
    together = run(
        logits,
        positions,
        counts=torch.from_numpy(committed)[None],
        bias=bias,
        tokens=torch.from_numpy(tokens).int(),
        parents=torch.tensor(parents, dtype=torch.int32),
        temperature=1.0,
        **penalties,
    )
    for row in range(rows):
        counts, ancestor = committed.copy(), row
        while ancestor >= 0:
            counts[tokens[ancestor]] += 1
            ancestor = parents[ancestor]
        alone = run(
            logits[row : row + 1],
            row,
            counts=torch.from_numpy(counts)[None],
            bias=bias,
            temperature=1.0,
            **penalties,
        )
        assert alone == [together[row]]
    assert together != run(logits, positions, temperature=1.0)


def test_infer() -> None:
    plugin = get_plugin("sample")
    inputs = [TensorSpec((4, 30), "float32"), TensorSpec((64,), "int32"), TensorSpec((4,), "int32")]
    inputs += [TensorSpec((3,), str(dtype).removeprefix("torch.")) for _, dtype in PER_REQUEST.values()]
    inputs += [TensorSpec((3, 30), "int32"), TensorSpec((3, 30), "float32")]
    inputs += [TensorSpec((8,), "int32"), TensorSpec((8, 1), "uint32")]
    rows = [TensorSpec((4,), "int32"), TensorSpec((64,), "int32")]
    assert plugin.infer({}, inputs) == plugin.infer({}, inputs + rows) == [TensorSpec((4,), "int32")]
    for index, wrong in (
        (0, TensorSpec((4, 30), "bfloat16")),
        (2, TensorSpec((3,), "int32")),
        (7, inputs[4]),
        (12, TensorSpec((3, 29), "int32")),
        (15, TensorSpec((8, 2), "uint32")),
    ):
        with pytest.raises(PluginError, match=f"sample: {plugin.inputs[index]}: expected .*, found"):
            plugin.infer({}, [*inputs[:index], wrong, *inputs[index + 1 :]])
    with pytest.raises(PluginError, match="sample: row_parent: expected"):
        plugin.infer({}, [*inputs, rows[0]])
