"""Pages of the KV pool: which request slot has which, and each slot's block table.

The target's latents and the drafter's keys and values use the same page numbers in pools of their own, so
one table serves both. Page 0 belongs to nobody: padding rows write there. Every other page is free, or private to one
slot, or in the prefix cache, where any number of slots may read it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from engine_runtime.prefix_cache import Node, PrefixCache, PrefixMatch
from plugins.core.state import Limits


@dataclass
class _Table:
    """Pages of one slot. The first len(path) of them are in the prefix cache and only read. undrafted: indices of
    pages without the drafter's context."""

    pages: list[int]
    path: list[Node]
    undrafted: set[int] = field(default_factory=set)


class PagePool:
    """Pages 1 .. kv_pages - 1 of the pool, lowest number first (so all ranks allocate alike).

    Cached pages that nobody reads are as good as free: they are evicted when they are needed.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size = limits.page_size
        self._free = list(range(1, limits.kv_pages))
        self._tables: dict[int, _Table] = {}
        self._cache = PrefixCache(limits.page_size)

    @property
    def total(self) -> int:
        return self._limits.kv_pages - 1

    @property
    def cached(self) -> int:
        """Pages that are kept for their text alone: no slot has them."""
        return self._cache.idle

    @property
    def used(self) -> int:
        """Pages that some slot has."""
        return self.total - len(self._free) - self._cache.idle

    @property
    def capacity(self) -> int:
        """Pages that a single request could have at most: the pool or its longest context, whichever is smaller."""
        return min(self.total, self._limits.pages_per_request)

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self._size)

    # ---- a slot's life ----

    def open(self, slot: int, tokens: np.ndarray, rows: int, use_cache: bool = True) -> int | None:
        """Give `slot` pages for a prompt of `tokens` int32 and `rows` more, or all that a request may have; gives the
        number of its first tokens whose KV is there already. None, with nothing changed, where the pool is short.
        """
        path = self._cache.find(tokens)[: self._cache.reusable(len(tokens))] if use_cache else []
        most = min(len(tokens) + rows, self.capacity * self._size, self._limits.max_context)
        wanted = self.pages(most) - len(path)
        if wanted > len(self._free) + self._cache.idle - sum(node.readers == 0 for node in path):
            return None
        self._cache.hold(path)
        own = self._take(wanted)
        self._tables[slot] = _Table([node.page for node in path] + own, path, _undrafted(path))
        return len(path) * self._size

    def reopen(self, slot: int, tokens: np.ndarray) -> int:
        """As `open`, for a slot that has written nothing yet: takes what others have left in the cache meanwhile."""
        table = self._tables[slot]
        found = self._cache.find(tokens[: self._cache.reusable(len(tokens)) * self._size], table.path)
        self._cache.hold(found)
        for index, node in enumerate(found, len(table.path)):
            heapq.heappush(self._free, table.pages[index])
            table.pages[index] = node.page
        table.path += found
        table.undrafted = _undrafted(table.path)
        return len(table.path) * self._size

    def reserve(self, slot: int, tokens: int) -> bool:
        """See to it that `slot` has pages for `tokens` tokens in all, tree rows included; False, with nothing changed,
        where the pool is short. Raises ValueError beyond `max_context`."""
        if tokens > self._limits.max_context:
            raise ValueError(f"request slot {slot}: {tokens} tokens, the engine holds {self._limits.max_context}")
        table = self._tables[slot]
        wanted = self.pages(tokens) - len(table.pages)
        if wanted > len(self._free) + self._cache.idle:
            return False
        table.pages += self._take(wanted)
        return True

    def share(self, slot: int, tokens: np.ndarray) -> None:
        """Let others read the whole pages of `tokens` int32, which `slot` has written and will not write again."""
        table = self._tables[slot]
        self._cache.store(table.path, tokens, table.pages, table.undrafted)

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Take the pages of `slot`; the whole ones of `tokens` int32, whose KV it has written, stay in the cache."""
        table = self._tables.pop(slot)
        for page in self._cache.release(table.path, tokens, table.pages, table.undrafted):
            heapq.heappush(self._free, page)

    def _take(self, count: int) -> list[int]:
        """`count` pages, evicting as many as are missing; the caller has made sure that there are enough."""
        for _ in range(count - len(self._free)):
            page = self._cache.evict()
            if page is None:
                raise RuntimeError(f"KV pool: {count} pages were promised, {len(self._free)} are free and none cached")
            heapq.heappush(self._free, page)
        return [heapq.heappop(self._free) for _ in range(count)]

    # ---- the drafter's context ----

    def skip_draft(self, slot: int, start: int, stop: int) -> None:
        """The KV of positions `start` to `stop` of `slot` was written without the drafter's context."""
        self._tables[slot].undrafted.update(range(start // self._size, self.pages(stop)))

    def draft_start(self, slot: int) -> int:
        """For `draft_start`: the first position from which on the drafter's context is complete."""
        return self._size * (1 + max(self._tables[slot].undrafted, default=-1))

    # ---- the cache ----

    def match(self, tokens: np.ndarray) -> PrefixMatch:
        """What a prompt of `tokens` int32 would find in the cache."""
        return self._cache.match(tokens)

    def clear_cache(self) -> None:
        """Forget all cached text that nobody reads."""
        while (page := self._cache.evict()) is not None:
            heapq.heappush(self._free, page)

    # ---- addresses ----

    def reserved_tokens(self, slot: int) -> int:
        """Tokens that `slot` has room for."""
        return min(len(self._tables[slot].pages) * self._size, self._limits.max_context)

    def block_table(self, slot: int) -> np.ndarray:
        """int32 [pages_per_request] pages of `slot` in order, 0 past its last."""
        row = np.zeros(self._limits.pages_per_request, np.int32)
        pages = self._tables[slot].pages
        row[: len(pages)] = pages
        return row

    def slots(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """int32 KV slot of each position of request slot `slot`; raises IndexError beyond its pages."""
        table = np.asarray(self._tables[slot].pages, np.int32)
        return (table[positions // self._size] * self._size + positions % self._size).astype(np.int32)


def _undrafted(path: list[Node]) -> set[int]:
    return {index for index, node in enumerate(path) if not node.drafted}
