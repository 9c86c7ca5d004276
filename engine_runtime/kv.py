"""Pages of the KV pool: which request owns which, and each request's block table.

The target's latents and the drafter's keys and values use the same page numbers in pools of their own, so
one table serves both. Page 0 belongs to nobody: padding rows write there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from plugins.core.state import Limits


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for; the message gives both numbers."""


class PageAllocator:
    """Pages 1 .. kv_pages - 1 of the pool, lowest number first (so all ranks allocate alike)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free = list(range(1, limits.kv_pages))
        self._tables: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return sum(len(table) for table in self._tables.values())

    @property
    def capacity(self) -> int:
        """Pages that a single request could have at most: the pool or its longest context, whichever is smaller."""
        return min(self._limits.kv_pages - 1, self._limits.pages_per_request)

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self._limits.page_size)

    def reserve(self, request: int, tokens: int) -> None:
        """Give slot `request` pages for `tokens` tokens in all, tree rows included; keeps the pages it has.

        Raises `OutOfPages` and changes nothing where the pool is short, ValueError beyond `max_context`.
        """
        if tokens > self._limits.max_context:
            raise ValueError(f"request slot {request}: {tokens} tokens, the engine holds {self._limits.max_context}")
        table = self._tables.get(request, [])
        wanted = self.pages(tokens) - len(table)
        if wanted > len(self._free):
            raise OutOfPages(
                f"request slot {request}: {tokens} tokens need {wanted} more pages, the pool has {len(self._free)} free"
            )
        if wanted > 0:
            self._tables[request] = table + [heapq.heappop(self._free) for _ in range(wanted)]

    def release(self, request: int) -> None:
        """Give all pages of slot `request` back."""
        for page in self._tables.pop(request, []):
            heapq.heappush(self._free, page)

    def reserved_tokens(self, request: int) -> int:
        """Tokens that slot `request` has room for."""
        return min(len(self._tables.get(request, [])) * self._limits.page_size, self._limits.max_context)

    def block_table(self, request: int) -> np.ndarray:
        """int32 [pages_per_request] pages of slot `request` in order, 0 past its last."""
        row = np.zeros(self._limits.pages_per_request, np.int32)
        table: Sequence[int] = self._tables.get(request, [])
        row[: len(table)] = table
        return row

    def slots(self, request: int, positions: np.ndarray) -> np.ndarray:
        """int32 KV slot of each position of slot `request`; raises IndexError beyond its pages."""
        table = np.asarray(self._tables.get(request, []), np.int32)
        size = self._limits.page_size
        return (table[positions // size] * size + positions % size).astype(np.int32)
