"""`draft_topk` and `ddtree_build`: the tree against brute force, and the buffers against their definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.state import Limits, request_buffers, row_buffers
from plugins.ddtree_build.tree import best_first_tree, spine_first, unary, worthwhile_nodes
from tests.plugins.tree_buffers import Buffers, candidates_of, paths

INF = math.inf


def limits(**changes: int) -> Limits:
    values = {
        "max_requests": 3,
        "max_rows": 40,
        "prefill_chunk": 48,
        "max_context": 64,
        "page_size": 4,
        "kv_pages": 49,
        "draft_depth": 3,
        "tree_top_k": 4,
    }
    return Limits(**(values | changes))


def brute_force(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """Token paths of the `budget` best prefixes by (weight descending, ranks ascending), by enumeration."""
    depths, width = log_probs.shape
    prefixes = []
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            weight = 0.0
            for level, rank in enumerate(ranks):
                weight += float(log_probs[level, rank])
            if math.isfinite(weight):
                prefixes.append((-weight, ranks))
    chosen = sorted(prefixes)[:budget]
    return [tuple(int(tokens[level, rank]) for level, rank in enumerate(ranks)) for _, ranks in chosen]


def tree_paths(tree) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree) + 1):
        found.append((*found[tree.parent[node]], tree.token[node]))
    return found[1:]


# few distinct values, so that exact ties (sums of halves are exact) and -inf are common
TIED = st.sampled_from([0.0, -0.5, -1.0, -1.5, -2.0, -INF])


@st.composite
def distributions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """log_probs, tokens [D, K], descending, tied or not."""
    depths, width = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    values = TIED if draw(st.booleans()) else st.floats(-8, 0)
    rows = [sorted((draw(values) for _ in range(width)), reverse=True) for _ in range(depths)]
    tokens = np.array([draw(st.permutations(range(width))) for _ in range(depths)], dtype=np.int32)
    return np.array(rows).reshape(depths, width), tokens.reshape(depths, width)


@settings(max_examples=300, deadline=None)
@given(distributions(), st.integers(0, 40))
def test_tree_is_the_best_prefixes_in_order(case: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    log_probs, tokens = case
    tree = best_first_tree(9, unary(log_probs, tokens), budget)
    assert tree_paths(tree) == brute_force(log_probs, tokens, budget)
    assert (tree.token[0], tree.parent[0], tree.depth[0]) == (9, -1, 0)


@settings(max_examples=100, deadline=None)
@given(distributions(), st.integers(0, 40), st.data())
def test_any_count_keeps_parents_first_and_the_spine_in_front(
    case: tuple[np.ndarray, np.ndarray], budget: int, data: st.DataObject
) -> None:
    tree = best_first_tree(9, unary(*case), budget)
    count = data.draw(st.integers(0, len(tree)))
    order = spine_first(tree, count)
    assert sorted(order) == list(range(count + 1))
    place = {node: i for i, node in enumerate(order)}
    assert all(place[tree.parent[node]] < place[node] for node in order[1:])
    spine = 0
    while spine + 1 < len(order) and tree.rank[order[spine + 1]] == 0 and tree.parent[order[spine + 1]] == order[spine]:
        spine += 1
    best_chain = [path for path in tree_paths(tree)[:count] if path == tuple(case[1][: len(path), 0])]
    assert spine == len(best_chain)
    assert order[spine + 1 :] == sorted(order[spine + 1 :])


def test_conditional_heads_use_the_parents_token() -> None:
    """A drafter whose second depth depends on the first token: the builder follows the pair."""
    first = [(1, math.log(0.6)), (2, math.log(0.4))]
    second = {1: [(5, math.log(0.3))], 2: [(6, math.log(0.9))]}
    tree = best_first_tree(0, lambda depth, parent: first if depth == 1 else second.get(parent, ()), 8)
    assert tree_paths(tree) == [(1,), (2,), (2, 6), (1, 5)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-6, 0), max_size=12).map(lambda w: sorted(w, reverse=True)),
    st.lists(st.floats(-1, 5), min_size=1, max_size=16),
)
def test_cost_rule_maximises_tokens_per_second(log_weights: list[float], cost: list[float]) -> None:
    price = np.array(cost, dtype=np.float32)
    best, best_rate = 0, -1.0
    for count in range(min(len(log_weights), len(cost) - 1) + 1):
        if price[count] > 0:
            rate = (1 + sum(math.exp(w) for w in log_weights[:count])) / float(price[count])
            if rate > best_rate * (1 + 1e-12):
                best, best_rate = count, rate
    chosen = worthwhile_nodes(log_weights, price)
    if chosen != best:  # a tie up to the rounding of the sum
        rate = (1 + sum(math.exp(w) for w in log_weights[:chosen])) / float(price[chosen])
        assert rate == pytest.approx(best_rate, rel=1e-12)


@pytest.mark.parametrize("shape", [(7, 1), (6, 5), (4, 97), (3, 3)])
def test_topk_is_exact_with_ties(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 3, shape).astype(np.float32)
    logits[0, :] = 1.5
    for top_k in {1, min(3, shape[1]), shape[1]}:
        out = candidates_of(logits, top_k)
        order = np.lexsort((np.broadcast_to(np.arange(shape[1]), shape), -logits), axis=1)[:, :top_k]
        np.testing.assert_array_equal(out[:, :top_k], np.take_along_axis(logits, order, 1))
        np.testing.assert_array_equal(np.ascontiguousarray(out[:, top_k:-1]).view(np.int32), order)
        exact = np.log(np.exp(logits.astype(np.float64)).sum(1))
        np.testing.assert_allclose(out[:, -1], exact, rtol=1e-6)


def test_topk_skips_the_anchor_and_numbers_by_rank() -> None:
    logits = torch.randn(2 * 4, 6)
    run = get_plugin("draft_topk").reference({"block_size": 4, "top_k": 2, "tp_rank": 3}, None)  # type: ignore[arg-type]
    out = run(logits)
    rows = logits.view(2, 4, 6)[:, 1:].reshape(6, 6)
    assert torch.equal(out[:, 0], rows.max(1).values)
    assert torch.equal(out.view(torch.int32)[:, 2].long(), rows.argmax(1) + 18)


def test_topk_of_nan_keeps_the_row_out_of_trees() -> None:
    buffers = Buffers(limits(max_requests=1))
    logits = np.random.default_rng(0).normal(size=(3, 10))
    logits[1, 4] = np.nan
    buffers.build(candidates_of(logits, 4))
    assert {row["depth"] for row in buffers.rows(0)} == {0, 1}


def expected_tree(logits: np.ndarray, width: int, budget: int, factor: np.ndarray) -> list[tuple[int, ...]]:
    logits = logits.astype(np.float32)
    log_probs = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    order = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    weights = np.minimum(np.take_along_axis(log_probs, order, 1) + np.log(factor)[:, None], 0)
    return brute_force(weights, order, budget)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]))
def test_buffers_hold_every_requests_tree(seed: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    shape = limits(tree_top_k=int(rng.integers(1, 6)), draft_depth=int(rng.integers(1, 4)))
    depth, top_k, buffers = shape.draft_depth, shape.tree_top_k, Buffers(shape, seed)
    logits = rng.normal(scale=2, size=(3 * depth, 24))
    buffers["active"][1] = int(rng.integers(0, 2))
    blocks = rng.permutation([0, 1, 2])
    blocks[rng.integers(0, 3)] = -1
    buffers["draft_requests"][:] = torch.from_numpy(blocks)
    budgets, widths = rng.integers(0, 12, 3), rng.integers(0, top_k + 1, 3)
    buffers["tree_budget"][:], buffers["tree_width"][:] = torch.from_numpy(budgets), torch.from_numpy(widths)
    buffers["calibration"][:] = torch.from_numpy(rng.uniform(0.3, 1.2, (3, depth)))
    before = {name: buffers[name].clone() for name in ("anchor", "context_len", "block_table", "active")}
    buffers.build(candidates_of(logits, top_k, world), world)

    total = 0
    for request in range(3):
        rows, first = buffers.rows(request), int(buffers["first_row"][request])
        if not buffers["active"][request]:
            assert not rows and first == 0
            continue
        expected: list[tuple[int, ...]] = []
        if request in blocks:
            block = int(np.flatnonzero(blocks == request)[0])
            factor = buffers["calibration"][request].numpy().astype(np.float64)
            width = int(widths[request]) or top_k
            own = logits[block * depth : (block + 1) * depth]
            expected = expected_tree(own, width, int(budgets[request]), factor)
        found = paths(rows)
        assert sorted(found) == sorted([(), *expected])
        assert first == total and rows[0]["token"] == buffers["anchor"][request]
        total += len(rows)
        for i, (row, path) in enumerate(zip(rows, found, strict=True)):
            address = int(buffers["context_len"][request]) + i
            page = int(buffers["block_table"][request, address // 4])
            assert row["parent"] < i and row["depth"] == len(path)
            assert row["mask"] == (1 << i) | (rows[row["parent"]]["mask"] if i else 0)
            assert buffers["row_slot"][first + i] == page * 4 + address % 4
            assert buffers["row_request"][first + i] == request
        assert rows[0]["log_weight"] == 0
        spine = [path for path in found if path == found[0] or path == expected_chain(expected, len(path))]
        assert found[: len(spine)] == spine
        weights = [row["log_weight"] for row in rows[len(spine) :]]
        assert weights == sorted(weights, reverse=True)
    assert buffers["num_rows"][0] == total
    padding = {
        "tokens": 0,
        "positions": 0,
        "row_request": -1,
        "row_parent": -1,
        "row_slot": 0,
        "row_log_weight": 0,
    }
    assert all((buffers[name][total:] == value).all() for name, value in padding.items())
    assert not buffers["mask"].view(torch.int32)[total:].any()
    assert all(torch.equal(buffers[name], value) for name, value in before.items())


def expected_chain(ordered: list[tuple[int, ...]], length: int) -> tuple[int, ...] | None:
    """The argmax prefix of `length` if it is in the tree: the best of its length."""
    of_length = [path for path in ordered if len(path) == length]
    return of_length[0] if of_length else None


def test_split_vocabulary_gives_the_same_tree_as_the_whole() -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(scale=2, size=(9, 64))
    trees = []
    for world in (1, 2, 4, 8):
        buffers = Buffers(limits())
        buffers["tree_budget"][:] = 11
        buffers.build(candidates_of(logits, 4, world), world)
        trees.append([(row["token"], row["parent"], row["mask"]) for r in range(3) for row in buffers.rows(r)])
    assert all(tree == trees[0] for tree in trees)


def test_equal_logits_of_several_ranks_go_to_the_lowest_id() -> None:
    buffers = Buffers(limits(max_requests=1, draft_depth=1))
    logits = np.zeros((1, 12))
    logits[0, [1, 5, 6, 11]] = 1.0
    buffers["tree_budget"][:] = 3
    buffers.build(candidates_of(logits, 4, 3), 3)
    assert [row["token"] for row in buffers.rows(0)] == [100, 1, 5, 6]


def test_without_candidates_every_tree_is_its_root() -> None:
    buffers = Buffers(limits(draft_depth=0))
    buffers["active"][0] = 0
    buffers.build(None)
    assert buffers["num_rows"][0] == 2 and not buffers.rows(0)
    assert [(row["token"], row["mask"]) for r in (1, 2) for row in buffers.rows(r)] == [(101, 1), (102, 1)]
    buffers["active"][:] = 0
    buffers.build(None)
    assert buffers["num_rows"][0] == 0 and (buffers["row_request"] == -1).all()


def test_too_many_rows_shorten_the_last_trees_but_keep_every_root() -> None:
    buffers = Buffers(limits(max_rows=16))
    buffers["tree_budget"][:] = 10
    logits = np.random.default_rng(3).normal(size=(9, 20))
    buffers.build(candidates_of(logits, 4))
    assert buffers["request_rows"].tolist() == [11, 4, 1]
    short = paths(buffers.rows(1))
    assert set(short[1:]) == set(expected_tree(logits[3:6], 4, 3, np.ones(3)))


def test_trees_stop_at_the_reach_of_the_block_table() -> None:
    buffers = Buffers(limits(max_requests=1))
    buffers["context_len"][0] = 61
    buffers.build(candidates_of(np.random.default_rng(3).normal(size=(3, 20)), 4))
    assert buffers["request_rows"].tolist() == [3]


def test_cost_rule_shortens_the_tree_and_width_one_gives_a_chain() -> None:
    buffers = Buffers(limits())
    logits = np.random.default_rng(5).normal(scale=3, size=(9, 20))
    buffers["tree_budget"][:] = 12
    buffers["tree_cost"][0] = 1 + 0.3 * torch.arange(40)
    buffers["tree_cost"][1] = 1.0
    buffers["tree_width"][2] = 1
    buffers.build(candidates_of(logits, 4))
    best = expected_tree(logits[:3], 4, 12, np.ones(3))
    log_probs = torch.log_softmax(torch.from_numpy(logits[:3]), 1).numpy()
    weights = [math.exp(sum(log_probs[d, token] for d, token in enumerate(path))) for path in best]
    rates = [(1 + sum(weights[:n])) / (1 + 0.3 * n) for n in range(13)]
    assert len(buffers.rows(0)) - 1 == int(np.argmax(rates)) < 12
    assert len(buffers.rows(1)) == 13  # rows that cost nothing are all taken
    assert paths(buffers.rows(2)) == [tuple(logits[6:9].argmax(1)[:n]) for n in range(4)]


def test_calibrated_weights_stop_at_one() -> None:
    """A factor above 1 must not make a child weigh more than its parent."""
    buffers = Buffers(limits(max_requests=1, tree_top_k=3))
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.9, 0.06, 0.04], [0.9, 0.06, 0.04]]))
    buffers["calibration"][0] = torch.tensor([1.0, 2.0, 0.0])
    buffers["tree_budget"][:] = 4
    buffers.build(candidates_of(logits, 3))
    assert paths(buffers.rows(0)) == [(), (0,), (0, 0), (1,), (1, 0)]
    weights = [math.exp(row["log_weight"]) for row in buffers.rows(0)]
    assert weights == pytest.approx([1, 0.5, 0.5, 0.3, 0.3], rel=1e-5)  # and a factor of 0 closes a depth


def test_masks_reach_beyond_one_word() -> None:
    buffers = Buffers(limits(max_requests=1, tree_top_k=8))
    buffers.build(candidates_of(np.random.default_rng(3).normal(size=(3, 20)), 8))
    rows = buffers.rows(0)
    assert len(rows) == 40 and max(row["mask"] for row in rows) >= 1 << 39


def test_infer() -> None:
    plugin, shape = get_plugin("ddtree_build"), limits()
    attrs = {"draft_depth": 3, "top_k": 4, "page_size": 4, "tp_world": 2}
    specs = row_buffers(shape) | request_buffers(shape) | {"candidates?": TensorSpec((9, 18), "float32")}
    inputs = [specs[name] for name in plugin.inputs]
    assert plugin.infer(attrs, inputs) == [] and plugin.infer(attrs, [None, *inputs[1:]]) == []
    for change in ({"tp_world": 1}, {"top_k": 3}, {"draft_depth": 2}):
        with pytest.raises(PluginError, match="ddtree_build: candidates: expected .*, found"):
            plugin.infer(attrs | change, inputs)
    with pytest.raises(PluginError, match="ddtree_build: draft_requests: expected .*, found"):
        plugin.infer(attrs, [inputs[0], None, *inputs[2:]])
    topk, logits = get_plugin("draft_topk"), TensorSpec((16, 6), "float32")
    (out,) = topk.infer({"block_size": 8, "top_k": 6, "tp_rank": 0}, [logits])
    assert out == TensorSpec((14, 13), "float32")
    for change in ({"top_k": 7}, {"block_size": 5}, {"block_size": 1}):
        with pytest.raises(PluginError, match="draft_topk: .*expected .*, found"):
            topk.infer({"block_size": 8, "top_k": 6, "tp_rank": 0} | change, [logits])
