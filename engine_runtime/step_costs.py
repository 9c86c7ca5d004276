"""Measures the step costs of an engine on the machine it runs on, for the cost rule of
`engine_runtime.budget`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_runtime.budget import CostTable
from engine_runtime.executor import Executor
from plugins.core.state import Limits

REPEATS = 3  # of each pass, after one to warm up; the fastest counts


def measure_costs(executor: Executor, contexts: Sequence[int] | None = None) -> CostTable:
    """Seconds of every verify and draft bucket at `contexts` committed tokens a request (None: none and the
    most).

    Only while no request runs: the passes overwrite the row and request buffers and the KV pool's content.
    All ranks must measure at the same time, since the passes hold collectives. Raises ValueError for an
    engine without a drafter and for contexts that leave no room for a row.
    """
    limits = Limits(**executor.plan.settings["limits"])
    if not limits.draft_depth:
        raise ValueError("step costs: this engine has no drafter, so there is nothing to choose")
    if contexts is None:
        contexts = (0, max(1, limits.max_context - limits.max_rows))
    if not all(0 <= context < limits.max_context for context in contexts):
        raise ValueError(f"step costs: contexts: expected 0 to {limits.max_context - 1}, found {list(contexts)}")
    buckets = tuple(executor.plan.buckets("verify"))
    verify = []
    for context in contexts:
        times = []
        for rows in buckets:
            times.append(_fastest(executor, limits, rows, context, f"verify[{rows}]"))
        verify.append(tuple(times))
    draft = {}
    for blocks in executor.plan.buckets("draft"):
        appended = next(a for a in executor.plan.buckets("append") if a >= blocks * limits.path_length)
        phases = (f"draft[{blocks}]", f"append[{appended}]")
        draft[blocks] = sum(_fastest(executor, limits, blocks, max(contexts), phase) for phase in phases)
    idle(executor)
    return CostTable(buckets, tuple(contexts), tuple(verify), draft)


def _fastest(executor: Executor, limits: Limits, rows: int, context: int, phase: str) -> float:
    times = []
    for _ in range(REPEATS + 1):
        fill(executor, limits, rows, context)  # each pass moves the lengths on
        executor.synchronize()
        start = time.perf_counter()
        executor.run(phase)
        executor.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def idle(executor: Executor) -> None:
    """Undo `fill`: no request is active."""
    for name in ("active", "request_rows", "context_len", "block_table"):
        executor.write(name, 0)


def fill(executor: Executor, limits: Limits, rows: int, context: int) -> None:
    """`rows` rows after `context` tokens: one tree of siblings in each slot, as few slots as hold them."""
    vocab_size = executor.plan.settings["model"]["vocab_size"]
    room = limits.max_context - context
    index = np.arange(rows, dtype=np.int32)
    owner, offset = index // room, index % room
    used = owner < limits.max_requests
    table = 1 + np.arange(limits.pages_per_request) % (limits.kv_pages - 1)
    address = context + offset
    slots = table[address // limits.page_size] * limits.page_size + address % limits.page_size
    counts = np.bincount(owner[used], minlength=limits.max_requests)
    first = np.concatenate([[0], counts.cumsum()[:-1]])
    by_row = {
        "tokens": np.random.default_rng(0).integers(0, vocab_size, rows),  # equal ones would share their experts
        "positions": np.where(used, np.minimum(context + 1, limits.max_context - 1), 0),
        "row_request": np.where(used, owner, -1),
        "row_parent": np.where(used & (offset > 0), index - offset, -1),
        "row_slot": np.where(used, slots, 0),
    }
    for name, values in by_row.items():
        executor.write(name, values, slice(0, rows))
    mask = np.zeros((limits.max_rows, limits.mask_words), np.uint32)
    mask[index, offset // 32] |= np.uint32(1) << (offset % 32).astype(np.uint32)
    mask[index, 0] |= np.uint32(1)
    state: dict[str, Any] = {
        "mask": mask,
        "block_table": table,
        "first_row": first,
        "request_rows": counts,
        "num_rows": int(used.sum()),
        "context_len": context,
        "remaining": limits.max_context,
        "active": 1,
        "anchor": 0,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "penalized": 0,
        "row_masked": 0,
        "stop_ids": -1,
        "tree_budget": limits.draft_depth,
        "tree_cost": 0.0,
        "tree_width": 0,
        "calibration": 1.0,
        "draft_start": 0,
        "draft_requests": np.arange(limits.max_requests),
        "append_rows": 0,
        "append_positions": 0,
        "append_slots": 0,
    }
    for name, value in state.items():
        executor.write(name, value)
