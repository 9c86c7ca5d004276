"""Prompts take at most half of the time from running streams, whatever a chunk costs; on a clock of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine_runtime.budget import Speculation
from engine_runtime.decoder import Decoder
from engine_runtime.runtime import Runtime
from engine_runtime.sampling import SamplingParams
from engine_runtime.scheduler import SHARE, PrefillScheduler
from plugins.core.plan import Phase, Plan
from plugins.core.state import Limits
from tests.runtime.toy import ToyExecutor, ask, toy_limits

BUCKETS = (4, 32)
PLAIN = Speculation("off")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedToy(ToyExecutor):
    """Two prefill buckets; a pass takes `seconds` of its phase."""

    def __init__(self, limits: Limits, clock: Clock, seconds: Callable[[str, int], float]) -> None:
        super().__init__(limits)
        phases = {**self.plan.phases, **{p.key: p for p in (Phase("prefill", b, ()) for b in BUCKETS)}}
        self.plan = Plan(**{**vars(self.plan), "phases": phases})
        self.clock, self.seconds = clock, seconds

    def run(self, phase: str) -> None:
        super().run(phase)
        self.clock.now += self.seconds(self.plan.phases[phase].name, self.plan.phases[phase].bucket)


class OneRank:
    """`RankGroup` for a decoder in this process."""

    def __init__(self, decoder: Decoder) -> None:
        self.target = SimpleNamespace(decoder=decoder)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.target.decoder, method)(*args)

    call_checked = call


def runtime(clock: Clock, costs: dict[str, float | dict[int, float]]) -> Runtime:
    """costs: seconds of a pass by phase, and by bucket where they differ."""

    def seconds(name: str, bucket: int) -> float:
        cost = costs.get(name, 0.0)
        return cost[bucket] if isinstance(cost, dict) else cost

    limits = toy_limits(prefill_chunk=BUCKETS[-1], max_requests=4, max_rows=8, max_context=256)
    decoder = Decoder(TimedToy(limits, clock, seconds), clock=clock)
    return Runtime(None, OneRank(decoder), clock)  # type: ignore[arg-type]


COSTS = {
    "chunks as dear as a step": {"prefill": 1.0, "verify": 1.0},
    "even the small chunk is dear": {"prefill": {4: 7.5, 32: 40.0}, "verify": 1.0},
    "the large chunk is very dear": {"prefill": {4: 0.7, 32: 60.0}, "verify": 1.0},
    "chunks are cheap": {"prefill": {4: 0.05, 32: 0.2}, "verify": 1.0},
    "steps vary": {"prefill": {4: 3.0, 32: 9.0}, "verify": {1: 0.5, 2: 1.0, 4: 2.0, 8: 4.0}},
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("prompts", [[200], [60, 70, 80], [5] * 12])
def test_a_stream_keeps_half_of_its_speed(name: str, prompts: Sequence[int]) -> None:
    clock = Clock()
    engine = runtime(clock, COSTS[name])
    stream = engine.submit(ask([1], SamplingParams(max_tokens=250, stop_ids=()), PLAIN))
    for _ in range(5):
        engine.step()
    start, steps = clock.now, 0
    engine.step()
    step = clock.now - start  # of the stream alone
    waiting = {engine.submit(ask([2] * n, SamplingParams(max_tokens=1), PLAIN)) for n in prompts}
    start = clock.now
    tokens = 0
    gaps = [0.0]
    while waiting and tokens < 200:
        before = clock.now
        for event in engine.step():
            if event.request == stream:
                tokens += 1
            if event.output.finish is not None:
                waiting.discard(event.request)
        gaps.append(clock.now - before)
        steps += 1
    assert tokens == steps  # one in every step
    dearest = COSTS[name]["prefill"]
    chunk = dearest[4] if isinstance(dearest, dict) else dearest
    spent = clock.now - start
    # a chunk and a step may have been saved up, and one chunk may be dearer than expected
    assert spent <= 2 * tokens * step + 2 * chunk + step
    assert max(gaps) <= 2 * step + chunk + 1e-9, "a burst"
    if waiting:  # it went on for long: the prompts must have had their half
        assert spent >= 1.6 * tokens * step


def test_prompts_get_everything_when_nothing_decodes() -> None:
    clock = Clock()
    engine = runtime(clock, {"prefill": {4: 1.0, 32: 4.0}, "verify": 1.0})
    engine.submit(ask([2] * 100, SamplingParams(max_tokens=1), PLAIN))
    log = engine._rank.decoder._executor.log  # type: ignore[attr-defined]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    prefills = [entry for entry in log if entry.startswith("prefill")]
    assert prefills == ["prefill[32]"] * 3 + ["prefill[4]"] and steps == 4


@pytest.mark.parametrize(
    ("cost", "remaining", "expected"),
    [
        ({4: 1.0, 32: 4.0}, 100, 32),
        ({4: 1.0, 32: 4.0}, 20, 20),  # 5 small chunks or one large: 5 s or 4 s
        ({4: 1.0, 32: 4.0}, 16, 16),  # a tie: fewer passes
        ({4: 1.0, 32: 4.0}, 12, 4),
        ({4: 1.0, 32: 4.0}, 3, 3),
        ({}, 20, 20),
        ({32: 8.0}, 9, 4),  # the small one has not been seen: an eighth, by its size
    ],
)
def test_the_rest_of_a_prompt_goes_the_quickest_way(cost: dict[int, float], remaining: int, expected: int) -> None:
    scheduler = PrefillScheduler(BUCKETS)
    for bucket, seconds in cost.items():
        scheduler.observe(0, bucket, seconds, seconds)
    assert scheduler.allow(0, remaining) == expected


def test_estimates_follow_what_is_measured() -> None:
    scheduler = PrefillScheduler(BUCKETS)
    assert scheduler.seconds(4) == 0.0
    scheduler.observe(0, 3, 1.0, 1.0)
    assert (scheduler.seconds(4), scheduler.seconds(32)) == (1.0, 8.0)
    for _ in range(30):
        scheduler.observe(0, 4, 2.0, 2.0)
    assert scheduler.seconds(4) == pytest.approx(2.0, rel=1e-3)


def test_credit_is_earned_spent_and_not_hoarded() -> None:
    scheduler = PrefillScheduler(BUCKETS)
    scheduler.observe(0, 4, 3.0, 3.0)
    assert scheduler.credit == 0.0  # nobody was kept waiting
    assert scheduler.allow(1, 50) == 0
    for seconds in range(1, 8):
        scheduler.observe(1, 0, 0.0, 1.0)
        assert scheduler.credit == pytest.approx(min(seconds * SHARE, 3.0 + SHARE))
    assert scheduler.allow(1, 0) == 0 and scheduler.allow(1, 50) == 4 and scheduler.allow(1, 2) == 2
    before = scheduler.credit
    scheduler.observe(1, 4, 6.0, 7.0)  # dearer than expected: the difference is owed
    assert scheduler.credit == pytest.approx(before + SHARE - 6.0) and scheduler.credit < 0
    assert scheduler.allow(1, 50) == 0 and scheduler.allow(0, 50) == 32
