"""The page pool: no page has two owners, page 0 never given out, shortage changes nothing, cached pages are reused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runtime.kv import PagePool
from tests.runtime.toy import toy_limits

LIMITS = toy_limits(max_requests=4, max_context=64, page_size=8, kv_pages=20)
SLOTS = range(4)


def text(length: int, kind: int = 0) -> np.ndarray:
    """Texts of different kinds have their first page in common, and no other."""
    return np.where(np.arange(length) < 8, 0, kind).astype(np.int32)


def table(pool: PagePool, slot: int) -> list[int]:
    return [page for page in pool.block_table(slot).tolist() if page]


ACTIONS = st.tuples(st.sampled_from(["open", "reserve", "share", "close"]), st.integers(0, 3), st.integers(1, 64))


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 2)), max_size=60))
@settings(deadline=None)
def test_every_page_has_one_owner(actions: list[tuple[tuple[str, int, int], int]]) -> None:
    pool = PagePool(LIMITS)
    texts: dict[int, np.ndarray] = {}
    content: dict[int, tuple[int, ...]] = {}  # text up to the end of a page, once its slot has written it
    for (action, slot, tokens), kind in actions:
        before = {s: table(pool, s) for s in texts}
        counts = (pool.used, pool.cached)
        if action == "open" and slot not in texts:
            prompt = text(min(tokens, 40), kind)
            cached = pool.open(slot, prompt, 9)
            if cached is None:
                assert counts == (pool.used, pool.cached) and before == {s: table(pool, s) for s in texts}
                continue
            assert cached % 8 == 0 and cached < len(prompt)
            texts[slot] = prompt
            for index in range(cached // 8):
                assert content[table(pool, slot)[index]] == tuple(prompt[: 8 * index + 8].tolist())
            assert len(table(pool, slot)) == -(-min(len(prompt) + 9, 64) // 8)
        elif action == "reserve" and slot in texts:
            short = -(-tokens // 8) - len(before[slot]) > pool.total - pool.used
            assert pool.reserve(slot, tokens) != short
            if short:
                assert before[slot] == table(pool, slot) and counts == (pool.used, pool.cached)
            else:
                assert table(pool, slot)[: len(before[slot])] == before[slot]
                assert pool.reserved_tokens(slot) >= tokens
        elif slot in texts:
            for index, page in enumerate(before[slot][: len(texts[slot]) // 8]):
                content[page] = tuple(texts[slot][: 8 * index + 8].tolist())
            if action == "share":
                pool.share(slot, texts[slot])
                assert before[slot] == table(pool, slot)
            else:
                pool.close(slot, texts.pop(slot))
        private = [page for s in texts for page in table(pool, s)[len(pool._tables[s].path) :]]
        shared = set(pool._cache._by_page)
        assert len(private) == len(set(private)) and not shared & set(private)
        assert sorted([*private, *shared, *pool._free]) == list(range(1, LIMITS.kv_pages))
        assert pool.used == len({page for s in texts for page in table(pool, s)})
        assert pool.used + pool.cached + len(pool._free) == pool.total == 19
    for slot in texts:
        pool.close(slot, texts[slot])
    assert pool.used == 0
    pool.clear_cache()
    assert pool.cached == 0 and sorted(pool._free) == list(range(1, LIMITS.kv_pages))


def test_a_prompt_never_comes_whole_from_the_cache() -> None:
    """The logits of its last token are needed."""
    pool = PagePool(LIMITS)
    assert pool.open(0, text(24), 1) == 0
    pool.close(0, text(24))
    for length, cached in ((7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (24, 16), (25, 24), (40, 24)):
        assert pool.match(np.zeros(length, np.int32)).cached == cached
        assert pool.open(0, np.zeros(length, np.int32), 1) == cached
        pool.close(0, np.zeros(0, np.int32))
    assert pool.open(0, text(24), 1, use_cache=False) == 0


def test_a_request_may_start_with_what_was_cached_after_its_admission() -> None:
    pool = PagePool(LIMITS)
    assert pool.open(0, text(30), 2) == pool.open(1, text(30), 2) == 0
    used = pool.used
    pool.share(0, text(30))
    assert pool.reopen(1, text(30)) == 24
    assert table(pool, 1)[:3] == table(pool, 0)[:3] and table(pool, 1)[3] != table(pool, 0)[3]
    assert pool.used == used - 3
    pool.close(0, text(30))
    pool.close(1, text(30))
    assert (pool.used, pool.cached) == (0, 3)


def test_drafts_start_behind_the_last_page_without_draft_context() -> None:
    pool = PagePool(LIMITS)
    pool.open(0, text(8), 30)
    pool.skip_draft(0, 10, 13)
    assert pool.draft_start(0) == 16
    pool.close(0, text(32))
    assert pool.open(1, text(30), 1) == 24 and pool.draft_start(1) == 16
    assert pool.open(2, text(12), 1) == 8 and pool.draft_start(2) == 0


def test_slot_of_a_position() -> None:
    pool = PagePool(LIMITS)
    pool.open(2, text(7), 1)
    pool.open(3, text(7), 1)
    assert pool.reserve(2, 20)
    pages = pool.block_table(2)
    assert pool.slots(2, np.arange(20)).tolist() == [pages[p // 8] * 8 + p % 8 for p in range(20)]
    with pytest.raises(IndexError):
        pool.slots(2, np.array([24]))


def test_pages_are_given_out_lowest_first() -> None:
    pool = PagePool(LIMITS)
    for slot in range(3):
        pool.open(slot, text(15), 1)
    pool.close(1, text(0))
    pool.open(3, text(23), 1)
    assert table(pool, 3) == [3, 4, 7]


def test_beyond_the_context_is_refused() -> None:
    pool = PagePool(LIMITS)
    pool.open(0, text(1), 1)
    with pytest.raises(ValueError, match="slot 0: 65 tokens, the engine holds 64"):
        pool.reserve(0, 65)
