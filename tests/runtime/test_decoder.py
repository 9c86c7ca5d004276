"""The step loop: admission, slots, chunks, cancel, refusals, statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_runtime.budget import Speculation
from engine_runtime.decoder import Decoder, Event
from engine_runtime.generation import RequestUsage
from engine_runtime.sampling import SamplingParams
from plugins.core.plan import Plan
from plugins.core.state import FINISH_NAN
from tests.runtime import toy
from tests.runtime.toy import EOS, VOCAB, ToyExecutor, ask, drain, text, toy_limits, toy_plan

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("prompt", "changes", "sentence"),
    [
        ([], {}, "prompt: expected at least one token"),
        ([1, VOCAB], {}, "prompt: token 1: expected an id from 0 to 47, found 48"),
        ([-1], {}, "prompt: token 0: expected an id from 0 to 47, found -1"),
        (["a"], {}, "prompt: token 0: expected an id"),
        ([0] * 64, {}, "prompt: 64 tokens leave no room to generate in a context of 64.*at most 63"),
        ([0] * 63, {"kv_pages": 8}, "63 prompt tokens and 1 to generate need 8 KV pages, the engine has 7"),
    ],
)
def test_bad_requests_are_refused_before_anything_happens(
    prompt: list[Any], changes: dict[str, int], sentence: str
) -> None:
    executor = ToyExecutor(toy_limits(**{"max_context": 64, "page_size": 8, "kv_pages": 50, **changes}))
    decoder = Decoder(executor)
    with pytest.raises(ValueError, match=sentence):
        decoder.submit(ask(prompt))
    assert not decoder.busy and decoder.step() == [] and executor.log == []
    assert decoder.submit(ask(PROMPT, SamplingParams(max_tokens=4))) == 0


def test_a_plan_without_the_buckets_is_refused() -> None:
    executor = ToyExecutor(toy_limits())
    plan: Plan = toy_plan(toy_limits())
    for missing, sentence in (
        ("verify[520]", "phase verify: expected a bucket of at least 520, found"),
        ("draft[8]", "phase draft: expected a bucket of at least 8"),
        ("root[8]", "phase root: expected a bucket of at least 1, found none"),
    ):
        executor.plan = Plan(**{**vars(plan), "phases": {k: p for k, p in plan.phases.items() if k != missing}})
        with pytest.raises(ValueError, match=sentence):
            Decoder(executor)


def test_phases_of_one_request() -> None:
    """13 prompt tokens in chunks of 8; the append of a chunk comes before anything else runs."""
    executor = ToyExecutor(toy_limits(prefill_chunk=8), toy.right_drafter)
    decoder = Decoder(executor)
    decoder.submit(ask(list(range(20, 33)), SamplingParams(max_tokens=9, stop_ids=()), Speculation("chain")))
    drain(decoder)
    assert executor.log == [
        *("prefill[8]", "append[8]", "prefill[8]", "append[8]"),
        *("draft[1]", "verify[8]", "append[8]"),  # the first token came from the prefill; eight more, and the end
    ]


def test_plain_requests_run_no_drafts() -> None:
    """Only the drafter's context of the prompt is written: a request that finds it in the cache may draft."""
    executor = ToyExecutor(toy_limits(prefill_chunk=8))
    decoder = Decoder(executor)
    decoder.submit(ask(PROMPT, SamplingParams(max_tokens=3, stop_ids=()), Speculation("off")))
    drain(decoder)
    assert executor.log == ["prefill[8]", "append[8]", "root[8]", "verify[1]", "root[8]", "verify[1]"]


def test_without_a_drafter_everything_is_plain() -> None:
    executor = ToyExecutor(toy_limits(draft_depth=0))
    decoder = Decoder(executor)
    decoder.submit(ask(PROMPT, SamplingParams(max_tokens=3, stop_ids=()), Speculation("tree", 16)))
    drain(decoder)
    assert not any(name.startswith(("draft", "append")) for name in executor.log)


def test_the_last_token_is_not_drafted() -> None:
    executor = ToyExecutor(toy_limits())
    decoder = Decoder(executor)
    decoder.submit(ask(PROMPT, SamplingParams(max_tokens=2, stop_ids=()), Speculation("tree", 16)))
    drain(decoder)
    assert executor.log[-3:] == ["root[8]", "verify[1]", "append[8]"]


def test_first_come_first_served_when_slots_and_pages_are_short() -> None:
    limits = toy_limits(max_requests=2, max_rows=8, page_size=8, kv_pages=9, max_context=64)
    executor = ToyExecutor(limits)
    decoder = Decoder(executor)
    sizes = [10, 30, 2, 50, 1, 4]
    for index, size in enumerate(sizes):
        assert decoder.submit(ask([index + 1] * size, SamplingParams(max_tokens=6, stop_ids=()))) == index
    order: list[int] = []
    while decoder.busy:
        for event in decoder.step():
            if event.request not in order:
                order.append(event.request)
    assert order == list(range(len(sizes)))
    # everything was given back: a request that takes the whole pool fits again
    decoder.submit(ask([3] * 57, SamplingParams(max_tokens=7, stop_ids=())))
    assert len(text(drain(decoder), len(sizes))) == 7


def test_a_long_prompt_does_not_stall_the_others() -> None:
    """While one request is prefilled chunk by chunk, another one gets a token (or more) in each step."""
    executor = ToyExecutor(toy_limits(prefill_chunk=4))
    decoder = Decoder(executor)
    first = decoder.submit(ask([5], SamplingParams(max_tokens=60, stop_ids=()), Speculation("off")))
    decoder.step()
    second = decoder.submit(ask([6] * 40, SamplingParams(max_tokens=1)))
    for step in range(10):
        events = decoder.step()
        assert [event.request for event in events if event.request == first] == [first]
        assert (step == 9) == any(event.request == second for event in events)


def test_a_reused_slot_starts_afresh() -> None:
    """The same request gives the same text whatever its slot held before, drafter's state included."""
    limits = toy_limits(max_requests=1, max_rows=30)
    want = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    alone = Decoder(ToyExecutor(limits), calibrate=True)
    alone.submit(ask(PROMPT, want, Speculation("tree", 20)))
    expected, counts = text(drain(alone), 0), alone.stats
    executor = ToyExecutor(limits)
    decoder = Decoder(executor, calibrate=True)
    decoder.submit(ask([9] * 30, SamplingParams(2.0, 0.5, 3, 0.1, 77, 40, (1, 2)), Speculation("chain")))
    drain(decoder)
    executor.host["calibration"][:] = 0.1
    executor.host["draft_start"][:] = 99
    before = decoder.stats.passes
    decoder.submit(ask(PROMPT, want, Speculation("tree", 20)))
    assert text(drain(decoder), 1) == expected
    assert decoder.stats.passes - before == counts.passes  # not only the text: the same trees


def test_requests_come_and_go() -> None:
    """Churn: random submits and cancels; every request that ends has the text that it has alone."""
    rng = np.random.default_rng(4)
    limits = toy_limits(max_requests=3, max_rows=24, page_size=8, kv_pages=30, max_context=96, prefill_chunk=7)
    executor = ToyExecutor(limits)
    decoder = Decoder(executor)
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    texts: dict[int, list[int]] = {}
    ended: set[int] = set()
    cancelled: set[int] = set()
    for step in range(250):
        if step < 200 and rng.random() < 0.25:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
            params = SamplingParams(0.5, seed=step, max_tokens=int(rng.integers(1, 25)))
            modes = [Speculation("off"), Speculation("chain"), Speculation("tree", 12)]
            request = decoder.submit(ask(prompt, params, modes[rng.integers(3)]))
            requests[request] = (prompt, params)
            texts[request] = []
        if texts and rng.random() < 0.05:
            victim = int(rng.integers(len(texts)))
            decoder.cancel(victim)
            if victim not in ended:
                cancelled.add(victim)
        for event in decoder.step():
            assert event.request not in cancelled | ended
            texts[event.request] += event.output.tokens
            if event.output.finish is not None:
                ended.add(event.request)
                assert event.output.usage is not None
                assert event.output.usage.completion_tokens == len(texts[event.request])
    ended |= {event.request for event in drain_into(decoder, texts) if event.output.finish is not None}
    assert ended | cancelled == set(texts) and cancelled and len(ended) > 20
    for request in ended:
        prompt, params = requests[request]
        alone = Decoder(ToyExecutor(limits))
        alone.submit(ask(prompt, params, Speculation("off")))
        assert text(drain(alone), 0) == texts[request]


def drain_into(decoder: Decoder, texts: dict[int, list[int]]) -> list[Event]:
    events = drain(decoder)
    for event in events:
        texts[event.request] += event.output.tokens
    return events


def test_cancel_while_waiting_prefilling_and_decoding() -> None:
    executor = ToyExecutor(toy_limits(max_requests=1, max_rows=8, prefill_chunk=4))
    decoder = Decoder(executor)
    decoding = decoder.submit(ask(PROMPT[:2], SamplingParams(max_tokens=50, stop_ids=())))
    waiting = decoder.submit(ask(PROMPT, SamplingParams(max_tokens=5)))
    prefilling = decoder.submit(ask([8] * 30, SamplingParams(max_tokens=5)))
    decoder.step()
    assert decoder.status().waiting == (waiting, prefilling) and decoder.status().running == (decoding,)
    decoder.cancel(waiting)
    assert decoder.status().waiting == (prefilling,)
    decoder.cancel(decoding)
    assert [event.request for event in decoder.step()] == []  # the first chunk of `prefilling`
    decoder.cancel(prefilling)
    assert not decoder.busy and decoder.step() == []
    assert not executor.host["active"].any() and not executor.host["block_table"].any()
    decoder.cancel(decoding)  # it has ended: nothing to do
    with pytest.raises(ValueError, match="request 3: no such request"):
        decoder.cancel(3)


def test_stop_ids_come_from_the_model_unless_given() -> None:
    prompt = next(
        [first, second]
        for first in range(VOCAB)
        for second in range(VOCAB)
        if ToyExecutor(toy_limits()).target_logits([first, second]).argmax() == EOS
    )
    decoder = Decoder(ToyExecutor(toy_limits()))
    decoder.submit(ask(prompt, SamplingParams(max_tokens=5)))
    decoder.submit(ask(prompt, SamplingParams(max_tokens=5, stop_ids=())))
    events = drain(decoder)
    assert text(events, 0) == [EOS] and events[0].output.finish == "stop"
    assert len(text(events, 1)) == 5


def test_nan_ends_the_request_with_an_error() -> None:
    plain = Decoder(ToyExecutor(toy_limits()))
    plain.submit(ask(PROMPT, SamplingParams(max_tokens=12, stop_ids=()), Speculation("off")))
    tokens = text(drain(plain), 0)
    bad = tokens[6]
    good = tokens[: tokens.index(bad) + 1]
    for speculation in (Speculation("off"), Speculation("tree", 8)):
        executor = ToyExecutor(toy_limits(), toy.right_drafter)
        executor.nan_token = bad
        decoder = Decoder(executor)
        decoder.submit(ask(PROMPT, SamplingParams(max_tokens=12, stop_ids=()), speculation))
        other = decoder.submit(ask([EOS], SamplingParams(max_tokens=1)))
        events = drain(decoder)
        assert text(events, 0) == good  # what was drawn before the NaN is kept
        last = next(event for event in events if event.request == 0 and event.output.finish is not None)
        assert last.output.finish == "error" and "NaN" in str(last.output.error)
        assert next(event for event in events if event.request == other).output.finish == "length"
        assert executor.host["finish"][0] == FINISH_NAN


def test_statistics_of_a_perfect_chain() -> None:
    executor = ToyExecutor(toy_limits(), toy.right_drafter)
    decoder = Decoder(executor)
    decoder.submit(ask(PROMPT, SamplingParams(max_tokens=17, stop_ids=()), Speculation("chain")))
    events = drain(decoder)
    stats = decoder.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.tokens, stats.passes) == (5, 17, 16, 2)
    assert stats.rows == 16 and stats.tokens_per_pass == 8.0 and stats.drafted_passes == 2
    assert stats.offered == stats.reached == stats.accepted == [2] * 7
    usage = events[-1].output.usage
    assert usage == RequestUsage(5, completion_tokens=17, passes=2, rows=16, accepted=14)
    assert decoder.seconds.prefill > 0 and decoder.seconds.draft > 0 and decoder.seconds.verify > 0


def test_a_pass_without_progress_is_an_error_not_a_hang() -> None:
    executor = ToyExecutor(toy_limits())
    decoder = Decoder(executor)
    decoder.submit(ask(PROMPT, SamplingParams(max_tokens=50, stop_ids=())))
    decoder.step()
    executor._accept = lambda operands: executor.host["num_emitted"].fill(0)
    with pytest.raises(RuntimeError, match="request 0: a decode pass gave no token"):
        decoder.step()
