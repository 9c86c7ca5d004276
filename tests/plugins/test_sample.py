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
from plugins.sample.reference import gumbel, kept_tokens, sample

NAN, INF = float("nan"), float("inf")
MASK = (1 << 64) - 1


def run(logits: torch.Tensor, positions: object = 0, requests: object = 0, **parameters: object) -> list[int]:
    """Tokens of logits [T, V]; `parameters` are per request, one value standing for one request."""
    rows = len(logits)
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    values = [
        torch.as_tensor(value).reshape(-1).to(dtype)
        for value, dtype in zip((defaults | parameters).values(), dtypes, strict=True)
    ]
    size = max(len(value) for value in values)
    values = [value.expand(size).contiguous() for value in values]
    where = [torch.as_tensor(v, dtype=torch.int32).expand(rows) for v in (positions, requests)]
    out = sample(logits, *where, *values)
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


def test_infer() -> None:
    plugin = get_plugin("sample")
    per_request = {
        "temperature": "float32",
        "top_k": "int32",
        "top_p": "float32",
        "min_p": "float32",
        "seed": "int64",
    }
    inputs = [TensorSpec((4, 30), "float32"), TensorSpec((64,), "int32"), TensorSpec((4,), "int32")]
    inputs += [TensorSpec((3,), dtype) for dtype in per_request.values()]
    assert plugin.infer({}, inputs) == [TensorSpec((4,), "int32")]
    for index, wrong in (
        (0, TensorSpec((4, 30), "bfloat16")),
        (2, TensorSpec((3,), "int32")),
        (7, inputs[4]),
    ):
        with pytest.raises(PluginError, match=f"sample: {plugin.inputs[index]}: expected .*, found"):
            plugin.infer({}, [*inputs[:index], wrong, *inputs[index + 1 :]])
