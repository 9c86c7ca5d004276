"""The prefix cache: KV pages of text that was computed before, found again by its tokens.

A radix tree over token ids in which every node is one whole page: the text of a page is that of the nodes from the
root down to it. A page in the tree is never written again, so any number of requests may read it. A node that is read
is so along its whole path; what nobody reads may be evicted, least recently used leaves first. "Recently" counts
operations, not seconds, so that all ranks evict alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Node:
    """One page. key: its tokens (int32 bytes). drafted: whether the drafter's context was written too. readers:
    requests that have it in their block table. used: when it was read last."""

    key: bytes
    page: int
    parent: Node | None
    drafted: bool = True
    readers: int = 0
    used: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefixMatch:
    """How much of a prompt is known. cached: its first tokens whose KV would be reused, in whole pages and never the
    last token. common: its first tokens that some cached text begins with, so the index of the first that differs."""

    cached: int
    common: int


class PrefixCache:
    """The tree. It holds page numbers; the pages themselves belong to whoever owns the cache."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._root = Node(b"", 0, None)
        self._by_page: dict[int, Node] = {}
        self._leaves: list[tuple[int, int]] = []  # heap of (used, page); entries that no longer hold are skipped
        self._now = 0
        self.idle = 0

    @property
    def pages(self) -> int:
        """Pages in the tree; `idle` of them are read by nobody."""
        return len(self._by_page)

    def find(self, tokens: np.ndarray, path: Sequence[Node] = ()) -> list[Node]:
        """The nodes after `path` that hold the whole pages of `tokens` int32, as far as they go."""
        found: list[Node] = []
        node = path[-1] if path else self._root
        for key in self._keys(tokens, len(path)):
            if key not in node.children:
                break
            node = node.children[key]
            found.append(node)
        return found

    def match(self, tokens: np.ndarray) -> PrefixMatch:
        """What a request with the prompt `tokens` int32 would find now; counts as no use."""
        path = self.find(tokens)
        common = len(path) * self._size
        rest = tokens[common : common + self._size]
        node = path[-1] if path else self._root
        common += max((_common(rest, np.frombuffer(key, np.int32)) for key in node.children), default=0)
        return PrefixMatch(min(len(path), self.reusable(len(tokens))) * self._size, common)

    def reusable(self, tokens: int) -> int:
        """Pages of a prompt of `tokens` that may come from the cache: its last token must be computed."""
        return max(0, tokens - 1) // self._size

    def hold(self, nodes: Sequence[Node]) -> None:
        """One more reader of `nodes`, which continue a path that the reader holds."""
        self._now += 1
        for node in nodes:
            self.idle -= node.readers == 0
            node.readers += 1
            node.used = self._now

    def store(self, path: list[Node], tokens: np.ndarray, pages: Sequence[int], undrafted: set[int]) -> None:
        """Give the tree the whole pages of `tokens` int32 that a reader of `path` has written itself, until one is
        there already; the reader holds them, and `path` grows by them. pages: all of the reader's. undrafted: indices
        of those without the drafter's context.
        """
        start = len(path)
        for index, key in enumerate(self._keys(tokens, start), start):
            tip = path[-1] if path else self._root
            if key in tip.children:
                break
            path.append(self._add(tip, key, pages[index], index not in undrafted))
        self.hold(path[start:])

    def release(self, path: Sequence[Node], tokens: np.ndarray, pages: Sequence[int], undrafted: set[int]) -> list[int]:
        """A reader of `path` ends and leaves the whole pages of `tokens` int32 to the tree (see `store`); gives those
        of its own `pages` that the tree did not take."""
        self._now += 1
        for node in path:
            node.readers -= 1
            self.idle += node.readers == 0
            node.used = self._now
        tip = path[-1] if path else self._root
        spare = []
        stored = len(path)
        for index, key in enumerate(self._keys(tokens, len(path)), len(path)):
            if key in tip.children:
                tip = tip.children[key]
                spare.append(pages[index])  # another request was faster
            else:
                tip = self._add(tip, key, pages[index], index not in undrafted)
            tip.used = self._now
            stored = index + 1
        self._offer(tip)
        return spare + list(pages[stored:])

    def evict(self) -> int | None:
        """Forget the least recently used leaf that nobody reads and give its page; None where there is none."""
        while self._leaves:
            used, page = heapq.heappop(self._leaves)
            node = self._by_page.get(page)
            if node is None or node.used != used or not _evictable(node):
                continue
            del self._by_page[page]
            self.idle -= 1
            parent = node.parent
            if parent is not None:
                del parent.children[node.key]
                self._offer(parent)
            return page
        return None

    def _add(self, parent: Node, key: bytes, page: int, drafted: bool) -> Node:
        node = Node(key, page, parent, drafted, used=self._now)
        parent.children[key] = node
        self._by_page[page] = node
        self.idle += 1
        return node

    def _offer(self, node: Node) -> None:
        """`node` may be evicted from now on, if it is a leaf without readers."""
        if node.parent is None or not _evictable(node):
            return
        heapq.heappush(self._leaves, (node.used, node.page))
        if len(self._leaves) > 2 * len(self._by_page) + 16:  # mostly entries that no longer hold
            self._leaves = [(node.used, page) for page, node in self._by_page.items() if _evictable(node)]
            heapq.heapify(self._leaves)

    def _keys(self, tokens: np.ndarray, first: int) -> Iterator[bytes]:
        """The whole pages of `tokens` from page `first` on."""
        size = self._size
        for start in range(first * size, len(tokens) - size + 1, size):
            yield tokens[start : start + size].tobytes()


def _evictable(node: Node) -> bool:
    return node.readers == 0 and not node.children


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common prefix."""
    count = min(len(first), len(second))
    differ = np.flatnonzero(first[:count] != second[:count])
    return int(differ[0]) if len(differ) else count
