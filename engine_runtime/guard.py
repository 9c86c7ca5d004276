"""Holding requests to their rules on the device: masks for every row that is sampled, and trees without the branches
that the rules forbid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_runtime.constraints import Rules, TooComplex, legal_rows
from engine_runtime.executor import Executor
from engine_runtime.request import Request
from engine_runtime.tree_rows import prune_rows
from plugins.core.state import Limits

TOO_COMPLEX_ERROR = "the grammar takes more work at this place than the limits allow"


class Guard:
    """Fills `row_masked` and `vocab_mask`. A row whose rules give no answer is masked as a whole, which ends the
    request; its `dead_end` says why."""

    def __init__(self, executor: Executor, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._words = executor.plan.buffers["vocab_mask"].shape[1]
        self._masking = True  # whether any row may be masked since the last pass; at first nobody knows

    def before_prefill(self, request: Request) -> None:
        """Mask what the prefill pass of `request` draws."""
        rules = request.rules
        if rules is None or rules.over:
            self._write({}, 1)
            return
        try:
            mask = rules.mask()
        except TooComplex:
            mask = self._dead_end(request)
        self._write({0: mask}, 1)

    def before_verify(self, decoding: Sequence[Request], rows: int) -> int:
        """Mask the `rows` rows of the trees that are to be verified, those of `decoding`, and take out what the rules
        forbid; gives the rows that are left."""
        keep = np.ones(rows, bool)
        masks: dict[int, np.ndarray | None] = {}
        for request in decoding:
            if request.rules is not None and not request.rules.over:
                masks |= self._check(request, request.rules, keep)
        if not keep.all():
            moved = np.cumsum(keep) - 1
            masks = {int(moved[row]): mask for row, mask in masks.items()}
            rows = prune_rows(self._executor, self._limits, keep)
        self._write(masks, rows)
        return rows

    def _check(self, request: Request, rules: Rules, keep: np.ndarray) -> dict[int, np.ndarray | None]:
        """The masks of the rows of `request` that stay, by row; the others are taken out of `keep`."""
        executor, slot = self._executor, request.slot
        first, count = int(executor.read("first_row")[slot]), int(executor.read("request_rows")[slot])
        mine = slice(first, first + count)
        tokens = executor.read("tokens")[mine].tolist()
        parents = (executor.read("row_parent")[mine] - first).tolist()
        try:
            legal = legal_rows(rules, tokens, parents)
        except TooComplex:
            legal = {0: self._dead_end(request)}
        keep[mine] = False
        keep[[first + row for row in legal]] = True
        return {first + row: mask for row, mask in legal.items()}

    def _dead_end(self, request: Request) -> np.ndarray:
        request.dead_end = TOO_COMPLEX_ERROR
        return np.zeros(self._words, np.uint32)

    def _write(self, masks: dict[int, np.ndarray | None], rows: int) -> None:
        """Mask rows 0 .. rows - 1 of the next pass as `masks` says, where it says something."""
        bounded = {row: mask for row, mask in masks.items() if mask is not None}
        if not bounded and not self._masking:
            return
        flags = np.zeros(self._limits.max_rows, np.int32)
        for row, mask in bounded.items():
            flags[row] = 1
            self._executor.write("vocab_mask", mask, row)
        self._executor.write("row_masked", flags)
        self._masking = bool(bounded)
