"""Ranks as processes: same results as one rank, and a clear error, never a hang, when one of them fails."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from engine_runtime.ranks import RankError, RankGroup, Rendezvous
from tests.runtime.rank_targets import Failing, Small

TIMEOUT = 20.0


def test_two_ranks_compute_what_one_does() -> None:
    alone = Small(Rendezvous(0, 1, "", TIMEOUT), 1)
    group = RankGroup(2, Small, (2,), TIMEOUT)
    try:
        for tokens in ([0, 31, 15, 16], [7, 7, 20, 3]):
            alone.run(tokens)
            group.call("run", tokens)
            logits = group.call_all("read_buffer", "logits")
            assert len(logits) == 2
            assert np.array_equal(logits[0], logits[1])  # bit-identical on all ranks
            assert np.allclose(logits[0], alone.read_buffer("logits"), rtol=1e-6, atol=1e-6)
            sampled = group.call_all("read_buffer", "sampled")
            assert np.array_equal(sampled[0], sampled[1])
            assert np.array_equal(sampled[0], alone.read_buffer("sampled"))
    finally:
        group.close()
    group.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RankError, match="closed"):
        group.call("run", [0, 0, 0, 0])


def test_one_rank_needs_no_processes() -> None:
    group = RankGroup(1, Failing, ("nowhere",), TIMEOUT)
    assert group.call("count") == 1 and not multiprocessing.active_children()
    with pytest.raises(ValueError, match="refused"):
        group.call("refuse")
    assert group.call("count") == 1
    group.close()


def test_what_rank_0_refuses_the_others_never_hear_of() -> None:
    group = RankGroup(3, Failing, ("nowhere",), TIMEOUT)
    try:
        with pytest.raises(ValueError, match="refused"):
            group.call_checked("refuse")
        assert group.call("work") == [0.0, 1.0, 2.0]
    finally:
        group.close()


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("raise", "rank 1: RuntimeError: out of luck"),
        ("die", r"rank 1: its process (ended \(exit code 9\)|closed the connection)"),
        ("parent", "rank 0: RuntimeError: rank zero gives up"),
    ],
)
def test_a_failing_rank_is_named(where: str, sentence: str) -> None:
    group = RankGroup(2, Failing, (where,), TIMEOUT)
    start = time.monotonic()
    with pytest.raises(RankError, match=sentence):
        group.call("work")
    assert time.monotonic() - start < 2 * TIMEOUT
    assert not multiprocessing.active_children()
    with pytest.raises(RankError, match="closed"):
        group.call("work")


def test_an_interrupted_call_closes_the_group() -> None:
    group = RankGroup(2, Failing, ("interrupt",), TIMEOUT)
    with pytest.raises(KeyboardInterrupt):
        group.call("work")
    assert not multiprocessing.active_children()
    with pytest.raises(RankError, match="closed"):
        group.call("count")


def test_a_silent_rank_is_given_up() -> None:
    group = RankGroup(2, Failing, ("hang",), 8.0)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank [01]: "):
        group.call("work")
    assert time.monotonic() - start < 50
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("where", "sentence"), [("open", "cannot open"), ("import", "rank 1: ")])
def test_a_rank_that_cannot_open_is_named(where: str, sentence: str) -> None:
    with pytest.raises(RankError, match=sentence):
        RankGroup(2, Failing, (where,), TIMEOUT)
    assert not multiprocessing.active_children()


def test_groups_are_independent_and_follow_a_failed_start() -> None:
    with pytest.raises(RankError, match="rank 1: "):
        RankGroup(2, Failing, ("import",), TIMEOUT)
    first, second = RankGroup(2, Failing, ("nowhere",), TIMEOUT), RankGroup(3, Failing, ("nowhere",), TIMEOUT)
    try:
        assert first.call("work") == [0.0, 1.0]
        assert second.call("work") == [0.0, 1.0, 2.0]
        assert first.call("work") == [0.0, 1.0]
    finally:
        first.close()
        second.close()
