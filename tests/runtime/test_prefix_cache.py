"""The radix tree against a model that stores every cached prefix as plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_runtime.prefix_cache import Node, PrefixCache

SIZE = 3
TEXT = st.lists(st.integers(0, 1), max_size=5 * SIZE + 1)  # few tokens: prefixes are shared often


def ids(tokens: Any) -> np.ndarray:
    return np.asarray(tokens, np.int32)


@dataclass
class Entry:
    page: int
    readers: int
    used: int


class CacheAgainstModel(RuleBasedStateMachine):
    """The model: a dictionary from the text up to the end of a page to that page."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(SIZE)
        self.model: dict[tuple[int, ...], Entry] = {}
        self.readers: list[tuple[list[Node], list[int], list[int]]] = []  # path, text, pages
        self.next_page = 1
        self.now = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    def known(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Cached prefixes of `tokens` from the root on, without a gap."""
        found = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.model:
                break
            found.append(prefix)
        return found

    @rule(tokens=TEXT)
    def begin(self, tokens: list[int]) -> None:
        path = self.cache.find(ids(tokens))
        known = self.known(tokens)
        assert [node.page for node in path] == [self.model[prefix].page for prefix in known]
        self.cache.hold(path)
        self.now += 1
        for prefix in known:
            self.model[prefix].readers += 1
            self.model[prefix].used = self.now
        own = [self.next_page + i for i in range(-(-len(tokens) // SIZE) - len(path))]
        self.next_page += len(own)
        self.readers.append((path, tokens, [node.page for node in path] + own))

    @rule(which=st.integers(0, 99))
    def share(self, which: int) -> None:
        if not self.readers:
            return
        path, tokens, pages = self.readers[which % len(self.readers)]
        held = len(path)
        self.cache.store(path, ids(tokens), pages, set())
        self.now += 1
        for index, prefix in enumerate(self.prefixes(tokens)):
            if index < held:
                continue
            if prefix in self.model:
                break
            self.model[prefix] = Entry(pages[index], 1, self.now)
        assert [node.page for node in path] == pages[: len(path)]

    @rule(which=st.integers(0, 99), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        if not self.readers:
            return
        path, tokens, pages = self.readers.pop(which % len(self.readers))
        spare = self.cache.release(path, ids(tokens if keep else []), pages, set())
        self.now += 1
        taken = set()
        for index, prefix in enumerate(self.prefixes(tokens)):
            if index < len(path):
                self.model[prefix].readers -= 1
                self.model[prefix].used = self.now
            elif keep and prefix in self.model:
                self.model[prefix].used = self.now
            elif keep:
                self.model[prefix] = Entry(pages[index], 0, self.now)
                taken.add(pages[index])
        assert sorted(spare) == sorted(set(pages[len(path) :]) - taken)

    @rule()
    def evict(self) -> None:
        idle = {prefix: entry for prefix, entry in self.model.items() if entry.readers == 0}
        leaves = [p for p in idle if not any(o[: len(p)] == p for o in self.model if len(o) > len(p))]
        page = self.cache.evict()
        if not leaves:
            assert page is None
            return
        oldest = min(self.model[prefix].used for prefix in leaves)
        (gone,) = (prefix for prefix in leaves if self.model[prefix].page == page)
        assert self.model.pop(gone).used == oldest

    @rule(tokens=TEXT)
    def explain(self, tokens: list[int]) -> None:
        match = self.cache.match(ids(tokens))
        whole = len(self.known(tokens))
        assert match.cached == (min(whole, (len(tokens) - 1) // SIZE) * SIZE if tokens else 0)
        common = [next((i for i, (a, b) in enumerate(zip(tokens, p, strict=False)) if a != b), min(len(tokens), len(p)))
                  for p in self.model]  # fmt: skip
        assert match.common == max(common, default=0)

    @invariant()
    def counts(self) -> None:
        assert self.cache.pages == len(self.model)
        assert self.cache.idle == sum(entry.readers == 0 for entry in self.model.values())
        assert len(self.cache._leaves) <= 2 * len(self.model) + 17, "the heap of leaves grows without bound"


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_pages_without_draft_context_are_known_as_such() -> None:
    cache = PrefixCache(SIZE)
    text = ids(range(9))
    assert cache.release([], text, [1, 2, 3], {1}) == []
    assert [node.drafted for node in cache.find(text)] == [True, False, True]
