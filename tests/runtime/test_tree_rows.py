"""Pruned row buffers against those rebuilt row by row from what was left."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runtime.tree_rows import PADDING, prune_rows
from plugins.core.state import Limits
from tests.plugins.tree_buffers import Buffers, candidates_of

LIMITS = Limits(
    max_requests=3,
    max_rows=48,
    prefill_chunk=20,
    max_context=96,
    page_size=8,
    kv_pages=37,
    draft_depth=4,
    tree_top_k=3,
)


class BufferExecutor:
    """`Executor` over bare buffers, for what only reads and writes them."""

    def __init__(self, buffers: Buffers) -> None:
        self.host = {name: tensor.numpy() for name, tensor in buffers.tensors.items()}

    def read(self, name: str, at: int | slice = slice(None)) -> np.ndarray:
        return self.host[name][at]

    def write(self, name: str, values: Any, at: int | slice = slice(None)) -> None:
        self.host[name][at] = values

    def synchronize(self) -> None:
        pass


def built(seed: int) -> Buffers:
    rng = np.random.default_rng(seed)
    buffers = Buffers(LIMITS, seed)
    buffers["active"][int(rng.integers(0, 3))] = int(rng.integers(0, 2))
    buffers["tree_budget"][:] = torch.from_numpy(rng.integers(0, 13, 3))
    buffers.build(candidates_of(rng.normal(size=(12, 5)), 3))
    return buffers


def slot_of(buffers: Buffers, request: int, address: int) -> int:
    page = int(buffers["block_table"][request, address // LIMITS.page_size])
    return page * LIMITS.page_size + address % LIMITS.page_size


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_pruned_trees_are_those_built_without_the_rows(seed: int) -> None:
    rng = np.random.default_rng(seed + 1)
    buffers = built(seed)
    rows = int(buffers["num_rows"][0])
    parents = buffers["row_parent"][:rows].tolist()
    keep = np.zeros(rows, bool)
    for row, parent in enumerate(parents):
        keep[row] = parent < 0 or (keep[parent] and rng.random() < 0.7)
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    count = prune_rows(BufferExecutor(buffers), LIMITS, keep)  # type: ignore[arg-type]

    expected: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}
    for request in range(3):
        first, size = int(before["first_row"][request]), int(before["request_rows"][request])
        mine = [row for row in range(first, first + size) if keep[row]]
        assert buffers["request_rows"][request] == len(mine)
        if mine:
            assert buffers["first_row"][request] == len(expected)
        start = len(expected)
        for place, row in enumerate(mine):
            numbers[row] = start + place
            parent = numbers[parents[row]] if parents[row] >= 0 else -1
            bits = {start + place} | (expected[parent]["seen"] if parent >= 0 else set())
            expected.append(
                {
                    "tokens": int(before["tokens"][row]),
                    "positions": int(before["positions"][row]),
                    "row_request": request,
                    "row_parent": parent,
                    "row_slot": slot_of(buffers, request, int(before["context_len"][request]) + place),
                    "row_log_weight": float(before["row_log_weight"][row]),
                    "seen": bits,
                    "mask": sum(1 << (other - start) for other in bits),
                }
            )
    assert count == len(expected) == int(buffers["num_rows"][0])
    words = buffers["mask"].view(torch.int32).numpy().view(np.uint32)
    for row, values in enumerate(expected):
        for name in PADDING:
            assert buffers[name][row].item() == values[name], name
        assert int.from_bytes(words[row].tobytes(), "little") == values["mask"]
    for name, padding in PADDING.items():
        assert (buffers[name][count:] == padding).all(), name
    assert not words[count:].any()
    changed = {*PADDING, "mask", "first_row", "request_rows", "num_rows"}
    assert all(torch.equal(before[name], buffers[name]) for name in before if name not in changed)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_pruning_nothing_changes_nothing(seed: int) -> None:
    """Also a check that the conventions are those of `ddtree_build`."""
    buffers = built(seed)
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    rows = int(buffers["num_rows"][0])
    assert prune_rows(BufferExecutor(buffers), LIMITS, np.ones(rows, bool)) == rows  # type: ignore[arg-type]
    for name, tensor in before.items():
        assert torch.equal(tensor, buffers[name]), name
