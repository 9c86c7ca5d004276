"""Pages on demand, preemption and the prefix cache change when a text comes, never what it is; nothing is left behind.

On the toy engine of `tests.runtime.toy`, whose text depends on every KV slot and whose drafts check their context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine_runtime.budget import Speculation
from engine_runtime.decoder import Decoder, Event
from engine_runtime.generation import GenerationRequest
from engine_runtime.sampling import SamplingParams
from plugins.core.state import Limits
from tests.runtime import toy
from tests.runtime.toy import VOCAB, ToyExecutor, ask, drain, text, toy_limits

MODES = [Speculation("off"), Speculation("chain"), Speculation("tree", 12)]
PAGE = 8


class GuardedToy(ToyExecutor):
    """A toy that finds out when a pass writes to a page of the prefix cache."""

    decoder: Decoder | None = None

    def run(self, phase: str) -> None:
        assert self.decoder is not None
        pages = np.array(sorted(self.decoder._batch.pages._cache._by_page), np.int64)
        slots = (pages[:, None] * self.limits.page_size + np.arange(self.limits.page_size)).ravel()
        before = self.kv[:, slots].copy(), self.draft_kv[:, slots].copy()
        super().run(phase)
        assert np.array_equal(before[0], self.kv[:, slots], equal_nan=True), f"{phase} wrote to a shared page"
        assert np.array_equal(before[1], self.draft_kv[:, slots], equal_nan=True), f"{phase} wrote to a shared page"


def guarded(limits: Limits, drafter: toy.Drafter = toy.good_drafter) -> Decoder:
    executor = GuardedToy(limits, drafter)
    executor.decoder = Decoder(executor)
    return executor.decoder


def alone(request: GenerationRequest) -> list[int]:
    """The text of `request` on an engine of its own with room for everything, without drafts."""
    decoder = Decoder(ToyExecutor(toy_limits()))
    decoder.submit(replace(request, speculation=Speculation("off")))
    return text(drain(decoder), 0)


def nothing_is_left(decoder: Decoder) -> None:
    status = decoder.status()
    assert (status.waiting, status.running, status.kv_pages_used) == ((), (), 0)
    assert all(node.readers == 0 for node in decoder._batch.pages._cache._by_page.values())
    decoder.clear_cache()
    status = decoder.status()
    assert status.kv_pages_cached == 0
    pages = decoder._batch.pages
    assert sorted(pages._free) == list(range(1, decoder.limits.kv_pages))
    for name in ("active", "request_rows", "context_len", "block_table"):
        assert not decoder._executor.read(name).any(), name


def last(events: list[Event], request: int) -> Event:
    return next(event for event in events if event.request == request and event.output.finish is not None)


# ---- pages on demand ----


def test_pages_come_as_the_text_grows() -> None:
    decoder = guarded(toy_limits(page_size=PAGE, max_rows=8))
    decoder.submit(ask([1] * 10, SamplingParams(max_tokens=100, stop_ids=()), Speculation("off")))
    decoder.step()
    assert decoder.status().kv_pages_used == 2
    for _ in range(40):
        decoder.step()
    context = int(decoder._executor.read("context_len")[0])
    assert context == 51 and decoder.status().kv_pages_used == -(-context // PAGE)


def test_more_requests_run_than_could_all_have_their_worst_case() -> None:
    """Four requests of up to 60 tokens in a pool of 12 pages: all start at once, as each needs two at first."""
    limits = toy_limits(page_size=PAGE, max_rows=8, max_requests=4, max_context=64, kv_pages=13)
    decoder = guarded(limits)
    for token in range(4):
        decoder.submit(ask([token] * 10, SamplingParams(max_tokens=50, stop_ids=()), Speculation("off")))
    decoder.step()
    assert decoder.status().running == (0, 1, 2, 3)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_preempted_requests_go_on_where_they_were(temperature: float, mode: Speculation) -> None:
    limits = toy_limits(page_size=PAGE, max_rows=28, max_requests=4, max_context=64, kv_pages=13)
    decoder = guarded(limits)
    requests = [
        ask([token] * (7 + token), SamplingParams(temperature, seed=token, max_tokens=40, stop_ids=()), mode)
        for token in range(6)
    ]
    for request in requests:
        decoder.submit(request)
    events = drain(decoder)
    ends = [last(events, index).output for index in range(6)]
    for index, request in enumerate(requests):
        assert text(events, index) == alone(request)
        usage = ends[index].usage
        assert usage is not None and usage.completion_tokens == 40 and usage.prompt_tokens == len(request.prompt)
        assert usage.cached_tokens == 0  # its own pages, found again after a preemption, are no cached prompt
    preempted = [end.usage.preemptions for end in ends if end.usage]
    assert sum(preempted) == decoder.status().preemptions > 0
    assert preempted[0] == 0, "the oldest was preempted"
    assert decoder.stats.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert decoder.stats.generated_tokens == 6 * 40
    order = [event.request for event in events if event.output.finish is not None]
    assert order[0] == 0
    nothing_is_left(decoder)


def test_the_youngest_is_preempted_and_returns_first() -> None:
    limits = toy_limits(page_size=PAGE, max_rows=4, max_requests=3, max_context=64, kv_pages=10)
    decoder = guarded(limits)
    for token in range(5):
        decoder.submit(ask([token] * 15, SamplingParams(max_tokens=30, stop_ids=()), Speculation("off")))
    seen = set()
    while decoder.busy:
        status = decoder.status()
        seen.add((status.running, status.waiting))
        together = status.running + status.waiting
        assert list(together) == sorted(together), "someone was overtaken"
        decoder.step()
    assert ((0, 1), (2, 3, 4)) in seen


def test_cached_text_goes_before_anybody_is_preempted() -> None:
    limits = toy_limits(page_size=PAGE, max_rows=8, max_requests=2, max_context=64, kv_pages=9)
    decoder = guarded(limits)
    decoder.submit(ask([3] * 33, SamplingParams(max_tokens=4, stop_ids=())))
    drain(decoder)
    assert decoder.status().kv_pages_cached == 4
    decoder.submit(ask([4] * 20, SamplingParams(max_tokens=40, stop_ids=())))
    drain(decoder)
    assert decoder.status().preemptions == 0
    # the second request's own text and what is left of the first fill the pool, but for the last, unfinished page
    assert decoder.status().kv_pages_cached == 8 - 1


def test_drafts_preempt_nobody() -> None:
    """A pool that holds both texts, but not the trees behind them."""
    limits = toy_limits(page_size=PAGE, max_rows=40, max_requests=2, max_context=64, kv_pages=9)
    decoder = guarded(limits, toy.wrong_drafter)
    for token in (1, 2):
        decoder.submit(ask([token] * 9, SamplingParams(max_tokens=23, stop_ids=()), Speculation("tree", 6)))
    drain(decoder)
    assert decoder.status().preemptions == 0


# ---- the prefix cache ----


def conversation(turns: int, mode: Speculation, temperature: float) -> list[GenerationRequest]:
    """Each prompt is the last one, its answer, and more."""
    prompt = tuple(range(20))
    result = []
    for turn in range(turns):
        request = ask(prompt, SamplingParams(temperature, seed=turn, max_tokens=13, stop_ids=()), mode)
        result.append(request)
        prompt += (*alone(request), 30 + turn, 5)
    return result


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_the_next_turn_finds_the_last_one(mode: Speculation, temperature: float) -> None:
    decoder = guarded(toy_limits(page_size=PAGE, max_rows=16))
    before = 0
    for index, request in enumerate(conversation(4, mode, temperature)):
        match = decoder.match(request.prompt)
        decoder.submit(request)
        events = drain(decoder)
        assert text(events, index) == alone(request)
        usage = events[-1].output.usage
        assert usage is not None and usage.cached_tokens == match.cached
        # all but the last token of the last turn's text has KV
        assert usage.cached_tokens == max(0, before - 1) // PAGE * PAGE
        before = len(request.prompt) + 13
        assert match.common == (0 if index == 0 else usage.cached_tokens)
    status = decoder.status()
    assert 0 < status.prefix_hits < status.prefix_queries == decoder.stats.prompt_tokens
    nothing_is_left(decoder)


def test_a_hit_brings_the_context_of_the_drafter() -> None:
    """Also where a request without drafts left the page: its prompt is in the drafter's context, too."""
    decoder = guarded(toy_limits(page_size=PAGE), toy.right_drafter)
    prompt = list(range(30))
    decoder.submit(ask(prompt, SamplingParams(max_tokens=1), Speculation("off")))
    drain(decoder)
    decoder.submit(ask([*prompt, 9], SamplingParams(max_tokens=20, stop_ids=()), Speculation("chain")))
    events = drain(decoder)
    assert events[-1].output.usage is not None and events[-1].output.usage.cached_tokens == 24
    assert decoder._executor.read("draft_start")[0] == 0
    assert decoder.stats.tokens_per_pass > 5


def test_text_without_drafter_context_is_left_out_of_drafts() -> None:
    """What a request without drafts generates is not in the drafter's context; who finds it drafts from behind it."""
    decoder = guarded(toy_limits(page_size=PAGE), toy.right_drafter)
    request = ask(list(range(12)), SamplingParams(max_tokens=30, stop_ids=()), Speculation("off"))
    decoder.submit(request)
    answer = text(drain(decoder), 0)
    follow = ask([*request.prompt, *answer, 9], SamplingParams(max_tokens=20, stop_ids=()), Speculation("chain"))
    decoder.submit(follow)
    events = drain(decoder)
    assert text(events, 1) == alone(follow)
    assert decoder._executor.read("draft_start")[0] == 40 == last(events, 1).output.usage.cached_tokens  # type: ignore[union-attr]
    assert decoder.stats.tokens_per_pass > 1.3


def test_requests_that_arrive_together_share_their_beginning() -> None:
    limits = toy_limits(page_size=PAGE, max_rows=24, max_requests=4, prefill_chunk=16)
    decoder = guarded(limits)
    prompt = list(range(40))
    for token in range(4):
        decoder.submit(ask([*prompt, token], SamplingParams(0.8, seed=token, max_tokens=12, stop_ids=())))
    events = drain(decoder)
    for token in range(4):
        assert text(events, token) == alone(
            ask([*prompt, token], SamplingParams(0.8, seed=token, max_tokens=12, stop_ids=()))
        )
        assert last(events, token).output.usage.cached_tokens == (40 if token else 0)  # type: ignore[union-attr]
    prefills = sum(entry.startswith("prefill") for entry in decoder._executor.log)  # type: ignore[attr-defined]
    assert prefills == 3 + 3


def test_a_cancelled_request_leaves_what_it_has_written() -> None:
    decoder = guarded(toy_limits(page_size=PAGE, prefill_chunk=16))
    request = decoder.submit(ask(list(range(40)), SamplingParams(max_tokens=5)))
    decoder.step()
    decoder.step()
    decoder.cancel(request)
    assert decoder.status().kv_pages_cached == 4 and decoder.status().kv_pages_used == 0
    assert decoder.match(list(range(40))).cached == 32
    assert decoder.match([*range(35), 0, 0]) == replace(decoder.match(range(35)), common=32)
    nothing_is_left(decoder)


def test_kv_that_led_to_nan_is_not_kept() -> None:
    decoder = guarded(toy_limits(page_size=PAGE))
    executor = decoder._executor
    assert isinstance(executor, ToyExecutor)
    plain = ask(list(range(20)), SamplingParams(max_tokens=30, stop_ids=()), Speculation("off"))
    executor.nan_token = alone(plain)[-3]
    decoder.submit(plain)
    assert drain(decoder)[-1].output.finish == "error"
    assert decoder.match([*range(20), *alone(plain)]).cached == 16  # its prompt, which was fine when it was shared
    executor.nan_token = 30
    decoder.submit(ask([30] * 20))
    assert drain(decoder)[-1].output.finish == "error"
    assert decoder.match([30] * 20).common == 0
    nothing_is_left(decoder)


def test_prompt_logprobs_need_the_prompt_computed() -> None:
    decoder = guarded(toy_limits(page_size=PAGE))
    request = ask(list(range(40)), SamplingParams(max_tokens=3))
    for given in (request, replace(request, prompt_logprobs=0)):
        decoder.submit(given)
        usage = drain(decoder)[-1].output.usage
        assert usage is not None and usage.cached_tokens == 0
    assert decoder.status().prefix_queries == 40


# ---- timing ----


def test_every_second_is_somebody_s() -> None:
    """With a clock that a pass moves by one second: the requests' shares add up to the passes."""
    clock = FakeClock()
    decoder = Decoder(ClockedToy(toy_limits(max_requests=2), clock), clock=clock)
    for token in range(3):
        decoder.submit(ask([token] * 20, SamplingParams(max_tokens=10, stop_ids=())))
    events = drain(decoder)
    timings = [last(events, index).output.timing for index in range(3)]
    for part in ("prefill", "draft", "verify"):
        assert sum(getattr(timing, part) for timing in timings) == pytest.approx(getattr(decoder.seconds, part))
    assert decoder.seconds.prefill == 3 * 4  # two chunks each, with their appends
    assert timings[0] and timings[1] and timings[0].queue == timings[1].queue == 0
    assert timings[2] and timings[2].queue > 10  # no slot until another has ended


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class ClockedToy(ToyExecutor):
    def __init__(self, limits: Limits, clock: FakeClock) -> None:
        super().__init__(limits)
        self.clock = clock

    def run(self, phase: str) -> None:
        super().run(phase)
        self.clock.now += 1


# ---- anything at any time ----


@pytest.mark.parametrize("seed", range(6))
def test_stress(seed: int) -> None:
    """Submits, cancels and steps at random in a tiny pool, with prompts that share their beginnings. Every text is the
    one that the request has alone, and in the end every page is free or cached without a reader."""
    rng = np.random.default_rng(seed)
    limits = toy_limits(max_requests=3, max_rows=24, page_size=4, kv_pages=22, max_context=64, prefill_chunk=7)
    drafter = [toy.good_drafter, toy.right_drafter, toy.random_drafter][seed % 3]
    decoder = guarded(limits, drafter)
    begins = [rng.integers(0, VOCAB, 24).tolist() for _ in range(3)]
    requests: dict[int, GenerationRequest] = {}
    texts: dict[int, list[int]] = {}
    ended: set[int] = set()
    cancelled: set[int] = set()

    def step(prefill: int | None) -> None:
        for event in decoder.step(prefill):
            assert event.request not in cancelled | ended
            texts[event.request] += event.output.tokens
            if event.output.finish is not None:
                ended.add(event.request)
                usage = event.output.usage
                assert usage is not None and usage.completion_tokens == len(texts[event.request])
        status = decoder.status()
        assert status.kv_pages_used + status.kv_pages_cached + len(decoder._batch.pages._free) == limits.kv_pages - 1
        assert list(status.running + status.waiting) == sorted(status.running + status.waiting)

    for number in range(220):
        if number < 180 and rng.random() < 0.3:
            prompt = (
                begins[rng.integers(3)][: rng.integers(1, 25)] + rng.integers(0, VOCAB, rng.integers(1, 8)).tolist()
            )
            params = SamplingParams(float(rng.choice([0.0, 0.8])), seed=number, max_tokens=int(rng.integers(1, 33)))
            request = ask(prompt, params, MODES[rng.integers(3)])
            texts[index := decoder.submit(request)] = []
            requests[index] = request
        if texts and rng.random() < 0.08:
            victim = int(rng.integers(len(texts)))
            decoder.cancel(victim)
            if victim not in ended:
                cancelled.add(victim)
        step([0, 1, 3, None][rng.integers(4)])
    for _ in range(3000):
        if not decoder.busy:
            break
        step(None)
    assert ended | cancelled == set(texts) and cancelled and len(ended) > 25
    status = decoder.status()
    assert status.preemptions > 5 and status.prefix_hits > 100
    for index in ended:
        assert texts[index] == alone(requests[index])
    nothing_is_left(decoder)
