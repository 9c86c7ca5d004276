"""Taking rows out of the trees that `ddtree_build` left, before they are verified."""

from __future__ import annotations

import numpy as np

from engine_runtime.executor import Executor
from plugins.core.state import Limits

PADDING = {"tokens": 0, "positions": 0, "row_request": -1, "row_parent": -1, "row_slot": 0, "row_log_weight": 0}


def prune_rows(executor: Executor, limits: Limits, keep: np.ndarray) -> int:
    """Leave only the rows with `keep` bool [num_rows] in the row buffers, as if `ddtree_build` had built trees without
    the others; gives their number.

    The rows below a row that goes have to go too; roots stay. What is left moves together in its order, and takes the
    first KV slots of its request.
    """
    kept = np.flatnonzero(keep)
    count = len(kept)
    moved = np.cumsum(keep, dtype=np.int32) - 1  # new number of a row that stays
    rows = {name: executor.read(name)[: len(keep)].copy() for name in PADDING}
    owner, parent = rows["row_request"][kept], rows["row_parent"][kept]
    first = np.zeros(limits.max_requests, np.int32)
    sizes = np.bincount(owner, minlength=limits.max_requests).astype(np.int32)
    for request in np.flatnonzero(sizes):
        first[request] = np.argmax(owner == request)
    index = np.arange(count, dtype=np.int32)
    old_first = executor.read("first_row")[owner]
    values = {name: rows[name][kept] for name in ("tokens", "positions", "row_log_weight")}
    values["row_request"] = owner
    values["row_parent"] = np.where(parent >= 0, moved[np.maximum(parent, 0)], -1)
    values["row_slot"] = rows["row_slot"][old_first + index - first[owner]]
    for name, padding in PADDING.items():
        buffer = np.full(limits.pass_rows, padding, values[name].dtype)
        buffer[:count] = values[name]
        executor.write(name, buffer)
    executor.write("mask", visibility(values["row_parent"], index - first[owner], limits))
    executor.write("first_row", first)
    executor.write("request_rows", sizes)
    executor.write("num_rows", count)
    return count


def visibility(parents: np.ndarray, places: np.ndarray, limits: Limits) -> np.ndarray:
    """uint32 [max_rows, words], for `mask`: of each row the bits of itself and its ancestors.

    parents: row number of the parent, -1 for a root; places: number of the row within its request.
    """
    mask = np.zeros((limits.max_rows, limits.mask_words), np.uint32)
    for row, (parent, place) in enumerate(zip(parents.tolist(), places.tolist(), strict=True)):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, place // 32] |= np.uint32(1 << place % 32)
    return mask
