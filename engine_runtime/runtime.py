"""An engine, opened: weights mapped, ranks started, a decoder ready for requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from engine_runtime.budget import CostTable
from engine_runtime.decoder import Decoder, Event
from engine_runtime.engine import EngineError, load_engine
from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.grammar import Grammars
from engine_runtime.prefix_cache import PrefixMatch
from engine_runtime.profile import Profiled, StepTime, profile
from engine_runtime.ranks import DEFAULT_TIMEOUT, RankGroup, Rendezvous
from engine_runtime.scheduler import PrefillScheduler
from engine_runtime.stats import DecodeStats, EngineStatus, TimeSplit
from engine_runtime.step_costs import measure_costs
from engine_runtime.tokenizer import Tokenizer
from plugins.core.engine_file import Manifest, read_manifest, rebuild_command


@dataclass(frozen=True)
class Completion:
    """One finished request: all its tokens (a stop id included) and its last output, with why it ended and usage."""

    tokens: tuple[int, ...]
    last: Output


@dataclass(frozen=True)
class RankOptions:
    """What every rank is opened with."""

    path: str
    arch: str
    threads: int
    verify: Literal["digest", "size"]
    costs: CostTable | None
    calibrate: bool
    profile: bool
    tensorrt: bool


def open_cpu_rank(
    at: Rendezvous, options: RankOptions, progress: Callable[[float], None]
) -> tuple[Profiled, dict[str, float] | None]:
    """Executor of one rank on the CPU, and its seconds by plugin where the options ask for them."""
    import torch

    from engine_runtime.executor.cpu import CpuExecutor
    from engine_runtime.executor.gloo import GlooCommunicator

    torch.set_num_threads(options.threads)
    engine = load_engine(options.path, at.rank, verify=options.verify, progress=progress)
    weights = None if engine.manifest.weights == "splat" else engine.weights
    executor = CpuExecutor(engine.plan, weights, GlooCommunicator(at) if at.world > 1 else None)
    return executor, executor.collect_profile() if options.profile else None


def open_cuda_rank(
    at: Rendezvous, options: RankOptions, progress: Callable[[float], None]
) -> tuple[Profiled, dict[str, float] | None]:
    """Executor of one rank on the GPU with the rank's number; times by plugin come from `CudaExecutor.profile`."""
    from engine_runtime.executor.collectives import Nccl
    from engine_runtime.executor.cuda import CudaExecutor, open_device
    from engine_runtime.executor.weights import weight_source

    engine = load_engine(options.path, at.rank, verify=options.verify, map_weights=False)
    device = open_device(engine.plan, at.rank, rebuild_command(options.path, at.world, engine.plan.arch))
    try:
        nccl = Nccl(at.rank, at.world, Path(at.store), device, at.timeout) if at.world > 1 else None
        weights = weight_source(engine)

        def report(done: float, what: str) -> None:
            progress(done)

        if options.tensorrt:
            from engine_runtime.executor.tensorrt import TensorRtExecutor, check_tensorrt

            return TensorRtExecutor(engine, check_tensorrt(engine), weights, device, nccl, report), None
        return CudaExecutor(engine.plan, engine.cubins, weights, device, nccl, report), None
    except BaseException:
        device.close()
        raise


class RankRuntime:
    """One rank: engine, executor and decoder. Its methods are what `Runtime` mirrors to all ranks."""

    def __init__(
        self, at: Rendezvous, options: RankOptions, progress: Callable[[float], None] = lambda fraction: None
    ) -> None:
        if options.tensorrt and options.arch == "cpu":
            raise EngineError(f"{options.path}: built for the CPU: TensorRT plans exist for sm_120a alone")
        opened = open_cpu_rank if options.arch == "cpu" else open_cuda_rank
        self.executor, self.plugin_seconds = opened(at, options, progress)
        grammars = Grammars(lambda: Tokenizer.load(options.path))
        self.decoder = Decoder(self.executor, options.costs, options.calibrate, grammars)

    def submit(self, request: GenerationRequest) -> int:
        return self.decoder.submit(request)

    def step(self, prefill: int) -> list[Event]:
        return self.decoder.step(prefill)

    def cancel(self, request: int) -> None:
        self.decoder.cancel(request)

    def clear_cache(self) -> None:
        self.decoder.clear_cache()

    def measure_costs(self) -> CostTable:
        self.decoder.clear_cache()  # the passes that are measured write over its pages
        return measure_costs(self.executor)

    def use_costs(self, costs: CostTable | None) -> None:
        self.decoder.use_costs(costs)

    def read_profile(self, phase: str, context: int) -> list[StepTime]:
        self.decoder.clear_cache()
        return profile(self.executor, phase, context)

    def read_buffer(self, name: str) -> np.ndarray:
        """A copy of the persistent buffer `name`."""
        return self.executor.read(name).copy()


class Runtime:
    """Generation with one engine. Use as a context manager, or call `close`. Not thread-safe."""

    def __init__(self, manifest: Manifest, group: RankGroup, clock: Callable[[], float] = time.perf_counter) -> None:
        self.manifest = manifest
        self._group = group
        self._clock = clock
        self._scheduler = PrefillScheduler(self._rank.decoder.prefill_buckets)

    @staticmethod
    def open(
        directory: str | Path,
        tp: int | None = None,
        threads: int = 1,
        *,
        verify: Literal["digest", "size"] = "digest",
        costs: CostTable | None = None,
        calibrate: bool = False,
        profile: bool = False,
        tensorrt: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        progress: Callable[[float], None] | None = None,
    ) -> Runtime:
        """Open the engine in `directory` on this machine's GPUs or CPUs, whatever it was built for, one process a rank.

        tp: ranks, if the caller insists on a number (the engine's own is used). threads: of each CPU rank; the
        operators of a small model are too short to share. verify: "digest" or "size", see `load_engine`.
        costs: step times for the cost rule. calibrate: see `Decoder`. profile: add up seconds by plugin
        (`plugin_seconds`). tensorrt: run the TensorRT plans of the engine. timeout: seconds after which a silent
        rank is given up. progress: called while the engine is checked, with the fraction of rank 0's bytes that have
        been read. Raises `EngineError` for an engine that cannot be used, `RankError` where a rank fails.
        """
        manifest = read_manifest(directory)
        if tp is not None and tp != manifest.tp:
            raise EngineError(
                f"{directory}: built for {manifest.tp} ranks, started with {tp}: "
                f"rebuild with `python build.py CHECKPOINT -o {directory} --tp {tp}`"
            )
        options = RankOptions(str(directory), manifest.arch, threads, verify, costs, calibrate, profile, tensorrt)
        local = {} if progress is None else {"progress": progress}
        group = RankGroup(manifest.tp, RankRuntime, (options,), timeout, local)
        return Runtime(manifest, group)

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request; see `Decoder.submit`."""
        return self._group.call_checked("submit", request)

    def step(self) -> list[Event]:
        """One step of all requests; see `Decoder.step`. Prompts get the share that `PrefillScheduler` allows them."""
        decoder, decoding = self._rank.decoder, self._rank.decoder.decoding
        prefill, start = decoder.seconds.prefill, self._clock()
        events: list[Event] = self._group.call("step", self._scheduler.allow(decoding, decoder.remaining))
        prefill, step = decoder.seconds.prefill - prefill, self._clock() - start
        self._scheduler.observe(decoding, decoder.prefilled, prefill, step)
        return events

    def cancel(self, request: int) -> None:
        """Drop a request; see `Decoder.cancel`."""
        self._group.call_checked("cancel", request)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Run all `requests` and return when all have ended, in their order."""
        ids = [self.submit(request) for request in requests]
        tokens: dict[int, list[int]] = {request: [] for request in ids}
        last: dict[int, Output] = {}
        while len(last) < len(ids):
            for event in self.step():
                if event.request not in tokens:
                    continue  # submitted by someone else before
                tokens[event.request] += event.output.tokens
                if event.output.finish is not None:
                    last[event.request] = event.output
        return [Completion(tuple(tokens[i]), last[i]) for i in ids]

    def measure_costs(self) -> CostTable:
        """Measure the step costs on this machine and use them for the requests that follow.

        Takes about four times each verify and draft pass. Raises ValueError while requests are running and
        for an engine without a drafter.
        """
        if self.busy:
            raise ValueError("step costs can only be measured while no request is running")
        costs: CostTable = self._group.call("measure_costs")
        self._group.call_checked("use_costs", costs)  # all ranks decide by the times of rank 0
        return costs

    def profile(self, phase: str, context: int) -> list[StepTime]:
        """Times of the steps of a verify pass on rank 0; see `engine_runtime.profile.profile`.

        Raises ValueError also while requests are running.
        """
        if self.busy:
            raise ValueError("a pass can only be profiled while no request is running")
        steps: list[StepTime] = self._group.call("read_profile", phase, context)
        return steps

    def read_buffer(self, name: str) -> list[np.ndarray]:
        """Copies of the persistent buffer `name` of every rank, in rank order (bfloat16 as uint16)."""
        return self._group.call_all("read_buffer", name)

    def status(self) -> EngineStatus:
        """Queue, running requests, pages and cache counts."""
        return self._rank.decoder.status()

    def match(self, prompt: Sequence[int]) -> PrefixMatch:
        """What a request with the prompt `prompt` would find in the prefix cache; see `PrefixMatch`."""
        return self._rank.decoder.match(prompt)

    def clear_cache(self) -> None:
        """Forget the cached text that no running request reads."""
        self._group.call_checked("clear_cache")

    @property
    def busy(self) -> bool:
        return self._rank.decoder.busy

    @property
    def stats(self) -> DecodeStats:
        """Counts of all requests together."""
        return self._rank.decoder.stats

    @property
    def seconds(self) -> TimeSplit:
        """Where rank 0 spent its time, by part."""
        return self._rank.decoder.seconds

    @property
    def plugin_seconds(self) -> dict[str, float] | None:
        """Where rank 0 spent its time, by plugin; None unless opened with `profile`."""
        return self._rank.plugin_seconds

    @property
    def _rank(self) -> RankRuntime:
        return self._group.target

    def close(self) -> None:
        """Stop the ranks; may be called again."""
        self._group.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
