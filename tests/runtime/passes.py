"""Drives single passes of an executor by hand, for tests that look at logits and hidden states (not a test)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_runtime.executor import Executor
from plugins.core.state import Limits


class OneRequest:
    """Request slot 0 with pages 1, 2, 3 .. of the pool in a shuffled order."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.limits = Limits(**executor.plan.settings["limits"])
        self.context = 0
        pages = np.random.default_rng(0).permutation(np.arange(1, self.limits.kv_pages))
        self.table = pages[: self.limits.pages_per_request]
        executor.write("block_table", self.table, 0)
        executor.write("tree_budget", self.limits.max_rows - 1)

    def slots(self, positions: np.ndarray) -> np.ndarray:
        page, size = self.table, self.limits.page_size
        return page[positions // size] * size + positions % size

    def rows(self, tokens: Sequence[int], bucket: int) -> None:
        """Write the row buffers for `tokens` as a chain after the committed context."""
        write, count = self.executor.write, len(tokens)
        padding = (0, bucket - count)
        positions = np.arange(self.context, self.context + count, dtype=np.int32)
        everything = slice(0, bucket)
        write("tokens", np.pad(np.asarray(tokens, np.int32), padding), everything)
        write("positions", np.pad(positions, padding), everything)
        write("row_request", np.pad(np.zeros(count, np.int32), padding, constant_values=-1), everything)
        write(
            "row_parent",
            np.pad(np.arange(-1, count - 1, dtype=np.int32), padding, constant_values=-1),
            everything,
        )
        write("row_slot", np.pad(self.slots(positions), padding), everything)
        write("first_row", 0)
        write("request_rows", 0)
        write("request_rows", count, 0)
        write("context_len", self.context, 0)

    def prefill(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """One chunk: logits [V] after its last token, and each tap [tokens, H]."""
        bucket = min(b for b in self.executor.plan.buckets("prefill") if b >= len(tokens))
        self.rows(tokens, bucket)
        self.executor.write("last_row", len(tokens) - 1)
        self.executor.write("last_position", self.context + len(tokens) - 1)
        self.executor.write("last_request", 0)
        self.executor.run(f"prefill[{bucket}]")
        self.context += len(tokens)
        return self.executor.read("logits")[0].copy(), self.taps(len(tokens))

    def verify(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """`tokens` as a chain in one verify pass: logits [tokens, V] and each tap. Commits all of them."""
        bucket = min(b for b in self.executor.plan.buckets("verify") if b >= len(tokens))
        self.rows(tokens, bucket)
        mask = np.zeros((self.limits.max_rows, self.limits.mask_words), np.uint32)
        for row in range(len(tokens)):
            for seen in range(row + 1):
                mask[row, seen // 32] |= np.uint32(1 << (seen % 32))
        self.executor.write("mask", mask)
        self.executor.write("remaining", self.limits.max_context, 0)
        self.executor.write("stop_ids", -1)
        self.executor.run(f"verify[{bucket}]")
        self.context += len(tokens)
        return self.executor.read("logits")[: len(tokens)].copy(), self.taps(len(tokens))

    def taps(self, count: int) -> list[np.ndarray]:
        draft = self.executor.plan.settings["draft"]
        names = [f"taps.{i}" for i in range(draft["num_taps"])] if draft else []
        return [self.executor.read(name)[:count].copy() for name in names]
