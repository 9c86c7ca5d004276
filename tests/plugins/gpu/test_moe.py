"""Router and routed experts on the device against float64, at every number of tokens and every shard of K2.6."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from tests.plugins.gpu.device import Operator
from tests.plugins.gpu.moe_data import Lists, down_reference, gate_up_reference, random_tiles, relative_error

pytestmark = pytest.mark.gpu
TOKENS = [*range(1, 34), 47, 48, 64, 65, 127, 128, 129, 256, 1000, 4096]
EXPERTS, TOP_K, HIDDEN = 384, 8, 7168
ROUNDING = 2.5e-3  # relative error that rounding the result to bfloat16 may cause (1.7e-3 is usual)
SHARDS = {"tp1": (384, 8, 7168, 2048), "tp2": (384, 8, 7168, 1024), "tp4": (384, 8, 7168, 512)}
NANO = {"nano": (32, 8, 256, 128), "nano tp2": (32, 8, 256, 64), "nano tp4": (32, 8, 256, 32)}


@lru_cache(maxsize=2)
def experts(count: int, hidden: int, inter: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    gate_up = random_tiles(count, 2 * inter // 32, hidden // 32, generator)
    return gate_up, random_tiles(count, hidden // 32, inter // 32, generator)


def random_lists(tokens: int, count: int, top_k: int, padding: tuple[int, ...] = (), one: bool = False) -> Lists:
    """Uniform routes; `one`: every token on the same experts; `padding`: tokens without routes."""
    scores = torch.rand(1 if one else tokens, count, device="cuda").expand(tokens, count)
    chosen = scores.topk(top_k, dim=1).indices.int().contiguous()
    chosen[list(padding)] = -1
    return lists_of(chosen, count)


def lists_of(chosen: torch.Tensor, count: int) -> Lists:
    flat = chosen.reshape(-1)
    key = flat.masked_fill(flat < 0, count)
    ordered, routes = torch.sort(key, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(count + 1, device="cuda", dtype=key.dtype), out_int32=True)
    routes = routes.int().masked_fill_(ordered == count, -1)
    return Lists(offsets, routes, offsets.tolist())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def twice(operator: Operator) -> list[torch.Tensor]:
    """Outputs of a run on poisoned memory, equal bit for bit to those of another."""
    first, second = operator.run(), operator.run()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return first


def check_gate_up(tokens: int, shape: tuple[int, int, int, int], lists: Lists) -> None:
    count, top_k, hidden, inter = shape
    weight, x = experts(count, hidden, inter)[0], normal(tokens, hidden)
    attrs = {"stage": "gate_up", "top_k": top_k}
    (found,) = twice(Operator("int4_marlin_gemm", attrs, [x, weight, lists.offsets, lists.routes]))
    assert relative_error(found, gate_up_reference(x, weight, lists, top_k)) < ROUNDING


def check_down(tokens: int, shape: tuple[int, int, int, int], lists: Lists, with_shared: bool = True) -> None:
    count, top_k, hidden, inter = shape
    weight, x = experts(count, hidden, inter)[1], normal(tokens * top_k, inter)
    factors = torch.rand(tokens, top_k, device="cuda")
    exists = torch.zeros(tokens * top_k, dtype=torch.bool, device="cuda")
    exists[lists.routes[: lists.bounds[-1]].long()] = True
    factors.view(-1)[~exists] = 0
    x[~exists] = float("nan")  # rows without a route are never read
    shared = normal(tokens, hidden) if with_shared else None
    inputs = [x, weight, lists.offsets, lists.routes, factors, shared]
    (found,) = twice(Operator("int4_marlin_gemm", {"stage": "down", "top_k": top_k}, inputs))
    assert relative_error(found, down_reference(x, weight, lists, factors, shared)) < ROUNDING


K26_TP8 = (EXPERTS, TOP_K, HIDDEN, 256)


@pytest.mark.parametrize("tokens", TOKENS)
def test_gate_up(tokens: int) -> None:
    check_gate_up(tokens, K26_TP8, random_lists(tokens, EXPERTS, TOP_K))


@pytest.mark.parametrize("tokens", TOKENS)
def test_down(tokens: int) -> None:
    check_down(tokens, K26_TP8, random_lists(tokens, EXPERTS, TOP_K))


@pytest.mark.parametrize("tokens", [1, 33, 130])
@pytest.mark.parametrize("name", [*SHARDS, *NANO])
def test_shards(name: str, tokens: int) -> None:
    shape = {**SHARDS, **NANO}[name]
    lists = random_lists(tokens, shape[0], shape[1])
    check_gate_up(tokens, shape, lists)
    if tokens <= 128 or shape[3] >= 64:  # the kernel for many tokens takes two tiles of columns or more
        check_down(tokens, shape, lists)


@pytest.mark.parametrize("tokens", [33, 256])
def test_every_token_on_the_same_experts(tokens: int) -> None:
    lists = random_lists(tokens, EXPERTS, TOP_K, one=True)
    check_gate_up(tokens, K26_TP8, lists)
    check_down(tokens, K26_TP8, lists, with_shared=tokens == 33)


@pytest.mark.parametrize("tokens", [5, 33, 256])
def test_padding_tokens(tokens: int) -> None:
    lists = random_lists(tokens, EXPERTS, TOP_K, padding=(0, tokens // 2, tokens - 1))
    check_gate_up(tokens, K26_TP8, lists)
    check_down(tokens, K26_TP8, lists)


@pytest.mark.parametrize("tokens", [8, 256])
def test_only_padding(tokens: int) -> None:
    lists = random_lists(tokens, EXPERTS, TOP_K, padding=tuple(range(tokens)))
    weight, down = experts(EXPERTS, HIDDEN, 256)
    attrs = {"stage": "gate_up", "top_k": TOP_K}
    (act,) = twice(Operator("int4_marlin_gemm", attrs, [normal(tokens, HIDDEN), weight, lists.offsets, lists.routes]))
    assert not act.any()
    shared, factors = normal(tokens, HIDDEN), torch.zeros(tokens, TOP_K, device="cuda")
    inputs = [act, down, lists.offsets, lists.routes, factors, shared]
    (y,) = twice(Operator("int4_marlin_gemm", {"stage": "down", "top_k": TOP_K}, inputs))
    assert torch.equal(y, shared)


@pytest.mark.parametrize("tokens", [8, 256])
def test_a_nan_token_spoils_no_other(tokens: int) -> None:
    lists = random_lists(tokens, EXPERTS, TOP_K, one=True)
    weight, down = experts(EXPERTS, HIDDEN, 256)
    x = normal(tokens, HIDDEN)
    x[3] = float("nan")
    attrs = {"stage": "gate_up", "top_k": TOP_K}
    (act,) = twice(Operator("int4_marlin_gemm", attrs, [x, weight, lists.offsets, lists.routes]))
    factors = torch.rand(tokens, TOP_K, device="cuda")
    inputs = [act, down, lists.offsets, lists.routes, factors]
    (y,) = twice(Operator("int4_marlin_gemm", {"stage": "down", "top_k": TOP_K}, inputs))
    bad = torch.isnan(y).any(1)
    assert bad[3] and bad.sum() == 1


def test_more_than_two_to_the_31_results() -> None:
    tokens = 37_500
    assert tokens * TOP_K * HIDDEN > 2**31
    lists = random_lists(tokens, EXPERTS, TOP_K)
    weight, x = experts(EXPERTS, HIDDEN, 256)[1], normal(tokens * TOP_K, 256)
    factors = torch.rand(tokens, TOP_K, device="cuda")
    attrs = {"stage": "down", "top_k": TOP_K}
    (found,) = Operator("int4_marlin_gemm", attrs, [x, weight, lists.offsets, lists.routes, factors]).run()
    assert torch.isfinite(found).all()
    assert relative_error(found, down_reference(x, weight, lists, factors, None)) < ROUNDING


@pytest.mark.parametrize("padding", [(), (0, 2)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_route(tokens: int, padding: tuple[int, ...]) -> None:
    check_route(tokens, EXPERTS, TOP_K, HIDDEN, padding if tokens > 2 else ())


@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_route_of_nano(tokens: int) -> None:
    check_route(tokens, 32, 8, 256, ())


def check_route(tokens: int, count: int, top_k: int, hidden: int, padding: tuple[int, ...]) -> None:
    x, weight = normal(tokens, hidden), (torch.randn(count, hidden, device="cuda") * hidden**-0.5).bfloat16()
    bias = torch.randn(count, device="cuda") * 0.1
    row_request = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    row_request[list(padding)] = -1
    attrs = {"top_k": top_k, "routed_scaling_factor": 2.827, "norm_topk_prob": True}
    weights, offsets, routes, chosen = twice(Operator("moe_route", attrs, [x, weight, bias, row_request]))

    scores = torch.sigmoid(x.double() @ weight.double().t())
    real = row_request >= 0
    assert (chosen[~real] == -1).all() and (weights[~real] == 0).all()
    picked = chosen[real].long()
    biased = scores[real] + bias
    # the choice is the reference's but for ties within float32 rounding, and in descending order
    values = biased.gather(1, picked)
    assert (values - biased.sort(dim=1, descending=True).values[:, :top_k]).abs().max() < 1e-5
    assert (picked.sort(1).values.diff(dim=1) > 0).all()
    expected = scores[real].gather(1, picked)
    expected = expected / expected.sum(1, keepdim=True) * 2.827
    assert (weights[real] - expected).abs().max() < 1e-5
    lists = lists_of(chosen, count)
    assert torch.equal(offsets, lists.offsets) and torch.equal(routes, lists.routes)


def test_equal_scores_go_to_the_lowest_expert() -> None:
    x, weight = normal(40, 512), torch.zeros(64, 512, device="cuda").bfloat16()
    bias = torch.zeros(64, device="cuda")
    bias[[60, 9]] = 1.0
    row_request = torch.zeros(40, dtype=torch.int32, device="cuda")
    attrs = {"top_k": 4, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    chosen = Operator("moe_route", attrs, [x, weight, bias, row_request]).run()[3]
    assert chosen.tolist() == [[9, 60, 0, 1]] * 40
