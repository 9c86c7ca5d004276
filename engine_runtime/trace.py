"""The draft tree of one decode pass, as a caller may ask to see it."""

from __future__ import annotations

import numpy as np

from engine_runtime.executor import Executor
from engine_runtime.generation import TreeTrace


def read_trace(executor: Executor, slot: int) -> TreeTrace | None:
    """The tree that request slot `slot` had in the last verify pass; None where the pass gave it no token."""
    count = int(executor.read("num_emitted")[slot])
    if not count:
        return None
    first, rows = int(executor.read("first_row")[slot]), int(executor.read("request_rows")[slot])
    mine = slice(first, first + rows)
    parents = executor.read("row_parent")[mine]
    return TreeTrace(
        tokens=tuple(executor.read("tokens")[mine].tolist()),
        parents=tuple(np.where(parents >= 0, parents - first, -1).tolist()),
        probabilities=tuple(np.exp(executor.read("row_log_weight")[mine]).tolist()),
        accepted=tuple((executor.read("path_rows")[slot, :count] - first).tolist()),
        bonus=int(executor.read("emitted")[slot, count - 1]),
    )
