"""Tree building, acceptance and candidates on the device: the references' integers, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.plugin import get_plugin
from plugins.core.state import Limits
from tests.plugins.gpu.device import Operator
from tests.plugins.gpu.references import on_device, reference
from tests.plugins.tree_buffers import Buffers

pytestmark = pytest.mark.gpu


def limits(rows: int = 128, requests: int = 4, depth: int = 7, top_k: int = 64) -> Limits:
    return Limits(requests, rows, 300, 5000, 64, 4 * 79 + 1, depth, top_k)


def candidates(rng: np.random.Generator, blocks: int, shape: Limits, world: int, ties: bool) -> torch.Tensor:
    """As `draft_topk` leaves them, of `world` ranks with 1000 columns each."""
    rows, top_k = blocks * shape.draft_depth, shape.tree_top_k
    logits = rng.normal(size=(rows, world, 1000)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
    parts = []
    for rank in range(world):
        order = np.lexsort((np.arange(1000)[None].repeat(rows, 0), -logits[:, rank]), axis=1)[:, :top_k]
        part = np.empty((rows, 2 * top_k + 1), np.float32)
        part[:, :top_k] = np.take_along_axis(logits[:, rank], order, 1)
        part.view(np.int32)[:, top_k:-1] = order + 1000 * rank
        part[:, -1] = np.log(np.exp(logits[:, rank].astype(np.float64)).sum(1))
        parts.append(part)
    return torch.from_numpy(np.concatenate(parts, axis=1))


def built(seed: int, world: int = 1, ties: bool = False, rows: int = 128, roots: bool = False) -> None:
    """A tree pass of random requests, budgets, widths and costs on the device and by the reference."""
    rng = np.random.default_rng(seed)
    shape = limits(rows, top_k=int(rng.choice([4, 16, 64])), depth=int(rng.choice([1, 7, 15])))
    buffers = Buffers(shape, seed)
    buffers["active"][:] = torch.from_numpy(rng.integers(0, 2, 4))
    buffers["active"][int(rng.integers(4))] = 1
    buffers["tree_budget"][:] = torch.from_numpy(rng.integers(0, rows, 4))
    buffers["tree_width"][:] = torch.from_numpy(rng.choice([0, 1, 3], 4))
    buffers["context_len"][:] = torch.from_numpy(rng.integers(0, 4990, 4))
    buffers["calibration"][:] = torch.from_numpy(rng.choice([1.0, 0.7, 1.2], (4, shape.draft_depth)))
    if seed % 3 == 0:
        buffers["tree_cost"][:] = torch.from_numpy(1 + 0.05 * np.arange(rows) + 0.02 * rng.random((4, rows)))
    blocks = 3
    buffers.tensors["draft_requests"] = torch.from_numpy(rng.permutation([0, 1, 2, 3, -1])[:blocks].astype(np.int32))
    plugin = get_plugin("ddtree_build")
    given = [None if roots else candidates(rng, blocks, shape, world, ties)]
    given += [buffers[name] for name in plugin.inputs[1:]]
    attrs = {
        "draft_depth": shape.draft_depth,
        "top_k": shape.tree_top_k,
        "page_size": shape.page_size,
        "tp_world": world,
    }
    found = on_device("ddtree_build", attrs, [None if x is None else x.cuda() for x in given])
    expected = reference("ddtree_build", attrs, given, "cpu")
    for name, one, other in zip(plugin.mutates, found, expected, strict=True):
        if name == "row_log_weight":
            assert torch.allclose(one.cpu(), other, rtol=1e-6, atol=1e-6), name
        else:
            assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize("seed", range(30))
def test_build(seed: int) -> None:
    built(seed, rows=[128, 32, 5][seed % 3])


@pytest.mark.parametrize("seed", range(6))
def test_build_with_ties(seed: int) -> None:
    built(seed, ties=True)


@pytest.mark.parametrize("seed", range(6))
def test_build_from_the_candidates_of_several_ranks(seed: int) -> None:
    built(seed, world=[2, 8][seed % 2], ties=seed > 3)


def test_build_roots_alone() -> None:
    built(1, roots=True)


@pytest.mark.parametrize("seed", range(20))
def test_accept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = limits(64, depth=7, top_k=3)
    buffers = Buffers(shape, seed)
    buffers["tree_budget"][:] = 20
    buffers.build(candidates(rng, 4, shape, 1, False).numpy())
    used = int(buffers["num_rows"][0])
    sampled = torch.from_numpy(rng.integers(0, 1000, 64).astype(np.int32))
    for row in range(used):  # often what a child holds
        children = [r for r in range(used) if int(buffers["row_parent"][r]) == row]
        if children and rng.random() < 0.8:
            sampled[row] = buffers["tokens"][int(rng.choice(children))]
        elif rng.random() < 0.1:
            sampled[row] = int(rng.choice([-1, -2]))
    buffers["remaining"][:] = torch.from_numpy(rng.choice([0, 1, 3, 100], 4))
    buffers["stop_ids"][:, :2] = sampled[:8].view(4, 2)
    buffers["penalized"][:] = torch.from_numpy(rng.integers(0, 2, 4))
    buffers.tensors["token_counts"] = torch.from_numpy(rng.integers(0, 5, (4, 1000)).astype(np.int32))
    buffers["request_rows"][int(rng.integers(4))] = 0
    plugin = get_plugin("ddtree_accept")
    given = [sampled, *(buffers[name] for name in plugin.inputs[1:])]
    given[1].clamp_(max=999)
    attrs = {"path_length": shape.path_length}
    found = on_device("ddtree_accept", attrs, [x.cuda() for x in given])
    for name, one, other in zip(plugin.mutates, found, reference("ddtree_accept", attrs, given, "cpu"), strict=True):
        assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize(("columns", "top_k"), [(163_840, 64), (20_480, 64), (4096, 16), (100, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_candidates(columns: int, top_k: int, ties: bool) -> None:
    logits = torch.randn(16, columns) * 3
    if ties:
        logits = logits.round()
    logits[3, 5], logits[9, 7], logits[12, :50] = float("nan"), float("inf"), -float("inf")
    attrs = {"block_size": 8, "top_k": top_k, "tp_rank": 1}
    (found,) = on_device("draft_topk", attrs, [logits.cuda()])
    (expected,) = reference("draft_topk", attrs, [logits], "cpu")
    assert torch.equal(found[:, :-1].cpu().view(torch.int32), expected[:, :-1].view(torch.int32))
    assert torch.allclose(found[:, -1].cpu(), expected[:, -1], rtol=1e-6, equal_nan=True)


def test_candidates_are_written_whole() -> None:
    operator = Operator("draft_topk", {"block_size": 2, "top_k": 8, "tp_rank": 0}, [torch.randn(2, 5000).cuda()])
    (found,) = operator.run()
    assert torch.isfinite(found[:, [*range(8), 16]]).all()
