"""The page allocator: no page is ever shared, page 0 never given out, and shortage changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_runtime.kv import OutOfPages, PageAllocator
from tests.runtime.toy import toy_limits

LIMITS = toy_limits(max_requests=4, max_context=64, page_size=8, kv_pages=20)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 64)), max_size=60))
def test_pages_are_never_shared(actions: list[tuple[int, int]]) -> None:
    """0 tokens releases the slot; anything else reserves."""
    pages = PageAllocator(LIMITS)
    model: dict[int, int] = {}
    for slot, tokens in actions:
        if tokens == 0:
            pages.release(slot)
            model.pop(slot, None)
        else:
            wanted = max(model.get(slot, 0), -(-tokens // 8))
            short = wanted - model.get(slot, 0) > 19 - sum(model.values())
            before = [pages.block_table(s).tolist() for s in range(4)]
            if short:
                with pytest.raises(OutOfPages, match=r"need \d+ more pages, the pool has \d+ free"):
                    pages.reserve(slot, tokens)
                assert [pages.block_table(s).tolist() for s in range(4)] == before
            else:
                pages.reserve(slot, tokens)
                model[slot] = wanted
        owned = [page for s in range(4) for page in pages.block_table(s).tolist() if page]
        assert len(owned) == len(set(owned)) == sum(model.values()) == pages.used_pages
        assert pages.free_pages + pages.used_pages == LIMITS.kv_pages - 1
        assert all(0 < page < LIMITS.kv_pages for page in owned)
        for s in range(4):
            table = pages.block_table(s)
            assert np.count_nonzero(table) == model.get(s, 0) and not table[model.get(s, 0) :].any()
            assert pages.reserved_tokens(s) == min(model.get(s, 0) * 8, 64)


def test_growing_keeps_what_is_there() -> None:
    pages = PageAllocator(LIMITS)
    pages.reserve(0, 9)
    first = pages.block_table(0)[:2].tolist()
    pages.reserve(1, 1)
    pages.reserve(0, 30)
    assert pages.block_table(0)[:2].tolist() == first
    pages.reserve(0, 3)
    assert pages.reserved_tokens(0) == 32


def test_slot_of_a_position() -> None:
    pages = PageAllocator(LIMITS)
    pages.reserve(2, 8)
    pages.reserve(3, 8)
    pages.reserve(2, 20)
    table = pages.block_table(2)
    positions = np.arange(20)
    expected = [table[p // 8] * 8 + p % 8 for p in range(20)]
    assert pages.slots(2, positions).tolist() == expected
    with pytest.raises(IndexError):
        pages.slots(2, np.array([24]))


def test_released_pages_come_back_lowest_first() -> None:
    pages = PageAllocator(LIMITS)
    for slot in range(3):
        pages.reserve(slot, 16)
    pages.release(1)
    pages.reserve(3, 24)
    assert pages.block_table(3)[:3].tolist() == [3, 4, 7]


def test_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 0: 65 tokens, the engine holds 64"):
        PageAllocator(LIMITS).reserve(0, 65)
