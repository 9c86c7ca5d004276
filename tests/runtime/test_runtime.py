"""The runtime on a built engine: poisoned memory, trees accepted off the spine, ranks, costs, synthetic weights."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.prefill_interference import measure
from builder.build import build, make_plans, open_source
from builder.options import BuildOptions
from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.decoder import Decoder
from engine_runtime.engine import EngineError, load_engine
from engine_runtime.executor.cpu import CpuExecutor
from engine_runtime.executor.null import check_ranks
from engine_runtime.generation import GenerationRequest
from engine_runtime.runtime import Completion, Runtime
from engine_runtime.sampling import SamplingParams
from plugins.core.splat import hash32
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft
from tests.runtime.toy import TREE, ask

PAGE = 16
OPTIONS = {"max_context": 192, "max_requests": 4, "page_size": PAGE, "verify_buckets": (1, 4, 16, 64)}
MODES = [Speculation("chain"), Speculation("tree", 6), Speculation("tree", 15)]

Text = tuple[tuple[int, ...], str]
Work = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of one tiny checkpoint: one rank, two ranks, these with a pool for one request, synthetic weights."""
    base = tmp_path_factory.mktemp("engines")
    for name in ("checkpoint", "draft"):
        (base / name).mkdir()
    make_tiny_draft(base / "draft", make_tiny_checkpoint(base / "checkpoint", seed=3), seed=4)
    tight = {"tp": 2, "kv_tokens": 192}
    for name, changes in (("one", {}), ("two", {"tp": 2}), ("tight", tight), ("splat", {"splat": True})):
        options = BuildOptions(arch="cpu", **{**OPTIONS, **changes})  # type: ignore[arg-type]
        source = open_source(base / "checkpoint", base / "draft", options, lambda message: None)
        plans = make_plans(source, options, lambda message: None)
        check_ranks(plans)
        build(source, options, plans, base / name, lambda message: None, lambda *progress: None)
    return {path.name: path for path in base.iterdir()}


def requests(count: int, temperature: float) -> Work:
    rng = np.random.default_rng(7)
    return [
        (
            rng.integers(0, 500, rng.integers(1, 70)).tolist(),
            SamplingParams(temperature, top_p=0.95, seed=i, max_tokens=8 + i % 12, stop_ids=()),
        )
        for i in range(count)
    ]


def asked(
    prompts: Sequence[list[int]], params: Sequence[SamplingParams], speculation: Speculation = TREE
) -> list[GenerationRequest]:
    return [ask(prompt, one, speculation) for prompt, one in zip(prompts, params, strict=True)]


class Poisoned(CpuExecutor):
    """Whatever a pass does not write itself is NaN (or -1) while it runs."""

    def run(self, phase: str) -> None:
        self.poison(phase)
        super().run(phase)


def hint(executor: CpuExecutor, decoder: Decoder, texts: list[Text]) -> None:
    """Put each request's plain text among the drafter's candidates, at a rank that changes with the position.

    A random drafter is never right; with this one trees are accepted along and off their spine.
    """
    depth = executor.plan.settings["limits"]["draft_depth"]

    def overwrite(candidates: torch.Tensor, draft_requests: torch.Tensor) -> None:
        width = candidates.shape[1] // 2
        for block, slot in enumerate(draft_requests.tolist()):
            if slot < 0:
                continue
            request = decoder._batch.slots[slot]
            rest = texts[request.id][0][len(request.generated) :]
            for d in range(min(depth, len(rest))):
                row = candidates[block * depth + d]
                ids = row[width:-1].view(torch.int32)
                rank = int(hash32(np.array([len(request.generated) + d], np.uint32), request.id)[0] % 3)
                ids[ids == rest[d]] = ids[rank].clone()
                ids[rank] = rest[d]
                row[:width] = torch.log_softmax(-torch.arange(width, dtype=torch.float32), 0)
                row[-1] = 0.0

    def hinted(inner: Callable[..., None]) -> Callable[..., None]:
        def runner(candidates: torch.Tensor, blocks: torch.Tensor, *rest: torch.Tensor) -> None:
            overwrite(candidates, blocks)
            inner(candidates, blocks, *rest)

        return runner

    for key, steps in executor._phases.items():
        if key.startswith("draft["):
            last = steps[-1]
            assert last.plugin == "ddtree_build"
            executor._phases[key] = (*steps[:-1], replace(last, runner=hinted(last.runner)))


def decode(
    executor: CpuExecutor, work: Work, speculation: Speculation, hints: list[Text] | None = None
) -> tuple[list[Text], Decoder]:
    decoder = Decoder(executor)
    if hints is not None:
        hint(executor, decoder, hints)
    for prompt, params in work:
        decoder.submit(ask(prompt, params, speculation))
    tokens: list[list[int]] = [[] for _ in work]
    finish: dict[int, str] = {}
    while decoder.busy:
        for event in decoder.step():
            assert event.output.error is None
            tokens[event.request] += event.output.tokens
            if event.output.finish is not None:
                finish[event.request] = event.output.finish
    return [(tuple(t), finish[i]) for i, t in enumerate(tokens)], decoder


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_text(engines: dict[str, Path], temperature: float) -> None:
    engine = load_engine(engines["one"], 0)
    work = requests(14, temperature)
    texts, _ = decode(Poisoned(engine.plan, engine.weights), work, PLAIN)
    assert len({text for text, _ in texts}) == len(texts)
    for mode in MODES:
        assert decode(Poisoned(engine.plan, engine.weights), work, mode)[0] == texts  # its own (random) drafter
        found, decoder = decode(Poisoned(engine.plan, engine.weights), work, mode, texts)
        assert found == texts
        assert decoder.stats.tokens_per_pass > (1.2 if mode.mode == "chain" else 1.9)
        assert decoder.stats.accepted[1] > 0


def test_kv_after_accepted_trees_is_that_of_a_fresh_prefill(engines: dict[str, Path]) -> None:
    engine = load_engine(engines["one"], 0)
    prompt, params = [5, 17, 300, 41], SamplingParams(max_tokens=60, stop_ids=())
    texts, _ = decode(CpuExecutor(engine.plan, engine.weights), [(prompt, params)], PLAIN)
    executor = CpuExecutor(engine.plan, engine.weights)
    decoder = Decoder(executor)
    hint(executor, decoder, texts)
    decoder.submit(ask(prompt, params, Speculation("tree", 15)))
    text = list(prompt)
    for _ in range(12):
        text += [token for event in decoder.step() for token in event.output.tokens]
    assert decoder.busy and decoder.stats.tokens_per_pass > 1.9
    found = committed(executor, len(text) - 1)
    executor = CpuExecutor(engine.plan, engine.weights)
    fresh = Decoder(executor)
    fresh.submit(ask(text[:-1], SamplingParams(max_tokens=9, stop_ids=())))
    fresh.step()
    for name, expected in committed(executor, len(text) - 1).items():
        assert np.allclose(found[name], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()), name


def committed(executor: CpuExecutor, tokens: int) -> dict[str, np.ndarray]:
    """KV of the target and of the drafter for the first `tokens` positions of slot 0."""
    assert executor.read("context_len")[0] >= tokens
    positions = np.arange(tokens)
    slots = executor.read("block_table")[0, positions // PAGE] * PAGE + positions % PAGE
    return {
        "target": executor.read("kv_pool")[:, slots].copy(),
        "drafter": executor.read("draft_kv")[:, :, slots].copy(),
    }


@pytest.fixture(scope="module")
def one(engines: dict[str, Path]) -> Iterator[Runtime]:
    with Runtime.open(engines["one"], threads=1) as runtime:
        yield runtime


def test_runtime_generates_what_the_decoder_does(engines: dict[str, Path], one: Runtime) -> None:
    work = requests(6, 0.8)
    engine = load_engine(engines["one"], 0)
    texts, _ = decode(CpuExecutor(engine.plan, engine.weights), work, PLAIN)
    prompts, params = zip(*work, strict=True)
    done = one.generate(asked(prompts, params, Speculation("tree", 8)))
    assert [(c.tokens, c.last.finish) for c in done] == texts
    assert all(c.last.error is None and c.last.usage and c.last.usage.completion_tokens == len(c.tokens) for c in done)
    assert not one.busy
    assert one.seconds.verify > 0 and one.plugin_seconds is None


def test_two_ranks_give_the_text_of_one(engines: dict[str, Path], one: Runtime) -> None:
    prompts, params = zip(*requests(5, 0.8), strict=True)
    with Runtime.open(engines["two"], threads=1, verify="size", profile=True) as two:
        for speculation in (PLAIN, Speculation("tree", 8)):
            expected = one.generate(asked(prompts, params, speculation))
            found = two.generate(asked(prompts, params, speculation))
            assert [(c.tokens, c.last.finish) for c in found] == [(c.tokens, c.last.finish) for c in expected]
        with pytest.raises(ValueError, match="prompt: token 0"):
            two.submit(ask([10**6]))
        request = two.submit(ask([1, 2, 3]))
        two.step()
        two.cancel(request)
        assert not two.busy and two.step() == []
        costs = two.measure_costs()
        assert costs.rows == (1, 4, 16, 64)
        assert [c.tokens for c in two.generate(asked(prompts, params))] == [c.tokens for c in expected]
        assert two.plugin_seconds is not None and two.plugin_seconds["all_reduce"] > 0
    assert not multiprocessing.active_children()


def cached_tokens(done: list[Completion]) -> int:
    return sum(c.last.usage.cached_tokens for c in done if c.last.usage)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_cached_prefix_changes_no_text(engines: dict[str, Path], name: str) -> None:
    """Second turns with the first one's KV and without, plain and drafted, cold and hot."""
    with Runtime.open(engines[name], threads=1) as runtime:
        for temperature in (0.0, 0.8):
            for speculation in (PLAIN, Speculation("tree", 8)):
                first = requests(5, temperature)
                prompts, params = zip(*first, strict=True)
                answers = runtime.generate(asked(prompts, params, speculation))
                turns = [[*p, *a.tokens, 7, 8] for p, a in zip(prompts, answers, strict=True)]
                hit = runtime.generate(asked(turns, params, speculation))
                assert cached_tokens(hit) > 100
                assert runtime.match(turns[0]).cached > 0
                runtime.clear_cache()
                assert runtime.match(turns[0]).cached == 0 and runtime.status().kv_pages_cached == 0
                missed = runtime.generate(asked(turns, params, speculation))
                assert cached_tokens(missed) == 0
                assert [c.tokens for c in hit] == [c.tokens for c in missed]
                runtime.clear_cache()


def test_preempted_requests_keep_their_text_on_two_ranks(engines: dict[str, Path], one: Runtime) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 500, 30).tolist() for _ in range(5)]
    params = [SamplingParams(0.8, seed=i, max_tokens=60, stop_ids=()) for i in range(5)]
    expected = one.generate(asked(prompts, params))
    with Runtime.open(engines["tight"], threads=1) as tight:
        found = tight.generate(asked(prompts, params))
        status = tight.status()
        assert status.preemptions > 0 and status.kv_pages_total == 12
        assert (status.running, status.waiting, status.kv_pages_used) == ((), (), 0)
    assert [c.tokens for c in found] == [c.tokens for c in expected]


def test_a_stream_keeps_its_speed_beside_a_long_prompt(engines: dict[str, Path]) -> None:
    """Half of it is meant; less is allowed here, as the scheduler's clock also sees what else this machine does."""
    stream = ask([5, 6, 7], SamplingParams(max_tokens=180, stop_ids=()), PLAIN)
    prompts = [tuple(range(i, i + 120)) for i in range(2)]
    with Runtime.open(engines["one"], threads=1) as runtime:
        found = max(
            (measure(runtime, stream, prompts, time.process_time) for _ in range(3)), key=lambda found: found.ratio
        )
    assert found.tokens > 5
    assert found.ratio > 0.35


def test_costs_are_measured_and_change_no_text(engines: dict[str, Path]) -> None:
    prompts, params = zip(*requests(4, 0.0), strict=True)
    with Runtime.open(engines["one"], threads=1) as runtime:
        expected = [c.tokens for c in runtime.generate(asked(prompts, params, PLAIN))]
        assert runtime.status().kv_pages_cached > 0
        table = runtime.measure_costs()
        assert runtime.status().kv_pages_cached == 0  # the measurement has written over them
        assert table.rows == (1, 4, 16, 64) and set(table.draft) == {1, 2, 4}
        assert table.verify_seconds(64, 0) > table.verify_seconds(1, 0)
        assert [c.tokens for c in runtime.generate(asked(prompts, params))] == expected
        runtime.submit(ask(prompts[0]))
        with pytest.raises(ValueError, match="only be measured while no request is running"):
            runtime.measure_costs()


def test_synthetic_weights_run(engines: dict[str, Path]) -> None:
    with Runtime.open(engines["splat"], threads=1) as runtime:
        (done,) = runtime.generate([ask([1, 2, 3], SamplingParams(max_tokens=12, stop_ids=()), Speculation("tree", 4))])
        assert len(done.tokens) == 12 and done.last.error is None
        assert np.isfinite(runtime.read_buffer("logits")[0][0]).all()


def test_another_number_of_ranks_is_refused(engines: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="built for 1 ranks, started with 2"):
        Runtime.open(engines["one"], tp=2)
