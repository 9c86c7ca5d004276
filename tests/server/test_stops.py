"""Stop strings: the result depends on the text alone."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from engine_runtime.server.stops import StopStrings

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_any_cut_gives_the_same_text_and_stop(text, stops, cuts, include) -> None:
    # by definition: the first position at which some stop is complete, and the longest stop that ends there
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    found = max((s for s in stops if text[: ends[0]].endswith(s)), key=len) if ends else None
    expected = text if found is None else text[: ends[0]] if include else text[: ends[0] - len(found)]
    filter_ = StopStrings(stops, include)
    shown = ""
    for piece in cut(text, cuts):
        shown += filter_.push(piece)
        assert expected.startswith(shown)
    shown += filter_.flush()
    assert shown == expected and filter_.found == found


@given(LETTERS, STOPS)
def test_only_what_may_still_become_a_stop_is_held_back(text, stops) -> None:
    filter_ = StopStrings(stops)
    shown = filter_.push(text)
    if filter_.found is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        beginnings = "|".join(re.escape(stop[:n]) for stop in stops for n in range(1, len(stop)))
        assert not beginnings or not re.search(f"(?:{beginnings})$", shown + "") or held
