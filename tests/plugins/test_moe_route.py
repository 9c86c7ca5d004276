"""`moe_route` against transformers' router, and the route lists against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec

PLUGIN = get_plugin("moe_route")
NAN = float("nan")


def attributes(top_k: int = 4, norm: bool = True, scaling: float = 2.827) -> dict:
    return {"top_k": top_k, "routed_scaling_factor": scaling, "norm_topk_prob": norm}


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (384, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_transformers(norm: bool, experts: int, top_k: int, dtype: torch.dtype) -> None:
    config = DeepseekV3Config(
        hidden_size=64,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=1,
        topk_group=1,
        norm_topk_prob=norm,
        routed_scaling_factor=2.827,
    )
    generator = torch.Generator().manual_seed(experts)
    router = DeepseekV3TopkRouter(config)
    router.weight.data = torch.randn(experts, 64, generator=generator).to(dtype).float()
    router.e_score_correction_bias = torch.randn(experts, generator=generator) * 0.3
    x = (torch.randn(12, 64, generator=generator) * 0.2).to(dtype)
    weight = PLUGIN.prepare(attributes(), "weight", router.weight.data.to(dtype), dtype)
    assert weight.dtype == torch.float32
    run = PLUGIN.reference(attributes(top_k, norm), None)
    weights, _, _, chosen = run(x, weight, router.e_score_correction_bias, rows(12))
    with torch.no_grad():
        _, expected_weights, expected = router(x)
    for t in range(12):
        ours = dict(zip(chosen[t].tolist(), weights[t].tolist(), strict=True))
        theirs = dict(zip(expected[t].tolist(), expected_weights[t].tolist(), strict=True))
        assert ours.keys() == theirs.keys()
        assert all(ours[e] == pytest.approx(theirs[e], rel=1e-5) for e in ours)


@pytest.mark.parametrize(("experts", "top_k"), [(6, 3), (384, 8)])
def test_ties_go_to_the_lowest_expert(experts: int, top_k: int) -> None:
    run = PLUGIN.reference(attributes(top_k), None)
    bias = torch.zeros(experts)
    bias[1] = 1
    weights, offsets, _, chosen = run(torch.zeros(2, 8), torch.randn(experts, 8), bias, rows(2))
    assert chosen.tolist() == [[1, 0, *range(2, top_k)]] * 2
    assert offsets.tolist() == [2 * min(e, top_k) for e in range(experts + 1)]
    torch.testing.assert_close(weights, torch.full((2, top_k), 2.827 / top_k))


def test_bias_selects_but_does_not_weigh() -> None:
    bias = torch.tensor([0.0, 0.0, 5.0, 6.0])
    weights, _, _, chosen = PLUGIN.reference(attributes(2, norm=False, scaling=1.0), None)(
        torch.zeros(1, 8), torch.zeros(4, 8), bias, rows(1)
    )
    assert chosen.tolist() == [[3, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_padding_rows_have_no_routes_whatever_they_hold() -> None:
    x = torch.randn(4, 16)
    weight, bias = torch.randn(8, 16), torch.randn(8)
    request = torch.tensor([0, -1, 3, -1], dtype=torch.int32)
    clean = PLUGIN.reference(attributes(2), None)(x, weight, bias, request)
    x[1] = x[3] = NAN
    weights, offsets, routes, chosen = PLUGIN.reference(attributes(2), None)(x, weight, bias, request)
    assert all(torch.equal(a, b) for a, b in zip(clean, (weights, offsets, routes, chosen), strict=True))
    assert chosen[1].tolist() == chosen[3].tolist() == [-1, -1]
    assert weights[1].tolist() == weights[3].tolist() == [0, 0]
    assert offsets[-1] == 4 and routes[4:].tolist() == [-1] * 4
    assert sorted(routes[:4].tolist()) == [0, 1, 4, 5]


def test_only_padding() -> None:
    request = torch.full((3,), -1, dtype=torch.int32)
    weights, offsets, routes, chosen = PLUGIN.reference(attributes(2), None)(
        torch.full((3, 16), NAN), torch.randn(8, 16), torch.zeros(8), request
    )
    assert not weights.any() and not offsets.any()
    assert (routes == -1).all() and (chosen == -1).all()


def test_all_tokens_on_one_expert() -> None:
    bias = torch.zeros(8)
    bias[5] = 10
    _, offsets, routes, _ = PLUGIN.reference(attributes(1), None)(torch.randn(6, 16), torch.randn(8, 16), bias, rows(6))
    assert offsets.tolist() == [0, 0, 0, 0, 0, 0, 6, 6, 6]
    assert routes.tolist() == list(range(6))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    experts=st.integers(1, 20),
    request=st.lists(st.integers(-1, 2), min_size=1, max_size=12),
    data=st.data(),
)
def test_lists_follow_their_definition(seed: int, experts: int, request: list[int], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(len(request), 8, generator=generator),
        torch.randn(experts, 8, generator=generator),
    )
    # a few distinct biases, so that ties occur
    bias = torch.randint(0, 2, (experts,), generator=generator).float() * 100
    results = PLUGIN.reference(attributes(top_k), None)(x, weight, bias, torch.tensor(request, dtype=torch.int32))
    specs = PLUGIN.infer(
        attributes(top_k),
        [
            TensorSpec((len(request), 8), "float32"),
            TensorSpec((experts, 8), "float32"),
            TensorSpec((experts,), "float32"),
            TensorSpec((len(request),), "int32"),
        ],
    )
    for result, spec in zip(results, specs, strict=True):
        assert (tuple(result.shape), str(result.dtype)) == (spec.shape, f"torch.{spec.dtype}")
    weights, offsets, routes, chosen = (result.tolist() for result in results)
    assert offsets[0] == 0 and offsets[-1] == top_k * sum(r >= 0 for r in request)
    flat = [expert for row in chosen for expert in row]
    for expert in range(experts):
        mine = [route for route, e in enumerate(flat) if e == expert]
        assert routes[offsets[expert] : offsets[expert + 1]] == mine
    assert routes[offsets[-1] :] == [-1] * (len(flat) - offsets[-1])
    for row, r in zip(weights, request, strict=True):
        assert sum(row) == pytest.approx(2.827 if r >= 0 else 0, rel=1e-5)
        assert r < 0 or len(set(chosen[weights.index(row)])) == top_k


def test_infer_refuses() -> None:
    x, weight = TensorSpec((4, 32), "bfloat16"), TensorSpec((16, 32), "bfloat16")
    bias, request = TensorSpec((16,), "float32"), TensorSpec((4,), "int32")
    with pytest.raises(PluginError, match=r"moe_route: top_k: expected 1 .. 16 \(the number of experts\), found 17"):
        PLUGIN.infer(attributes(17), [x, weight, bias, request])
    with pytest.raises(PluginError, match=r"bias: expected float32 \[E\] with E=16, found bfloat16\[16\]"):
        PLUGIN.infer(attributes(), [x, weight, TensorSpec((16,), "bfloat16"), request])
    with pytest.raises(PluginError, match=r"row_request: expected int32 \[T\] with T=4, found int32\[5\]"):
        PLUGIN.infer(attributes(), [x, weight, bias, TensorSpec((5,), "int32")])


def test_cost() -> None:
    inputs = [
        TensorSpec((4, 32), "bfloat16"),
        TensorSpec((16, 32), "bfloat16"),
        TensorSpec((16,), "float32"),
        TensorSpec((4,), "int32"),
    ]
    outputs = PLUGIN.infer(attributes(), inputs)
    moved, flops = PLUGIN.cost(attributes(), inputs, outputs, 0)
    assert flops == 2 * 4 * 16 * 32
    assert moved == 2 * (4 * 32 + 16 * 32) + 4 * (16 + 4) + 4 * (16 + 17 + 16 + 16)
