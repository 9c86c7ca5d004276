"""`python -m engine_runtime tactics`: what lies between the plugins, timed as our kernels and as TensorRT's.

Every kind of glue step of every phase runs over all layers that have it, in one CUDA graph, once natively and once as
TensorRT plans of that step alone. `build.py --tensorrt --tactics FILE` then leaves to TensorRT what it does faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine_runtime.engine import Engine, EngineError, load_engine
from engine_runtime.executor.collectives import Collectives, SingleRank, StandIn
from engine_runtime.executor.cuda import BoundStep, CudaExecutor, open_device
from engine_runtime.executor.tensorrt import check_tensorrt
from engine_runtime.executor.weights import weight_source
from plugins.core.engine_file import rebuild_command
from plugins.core.tensorrt import glue_kind, is_glue, segment_key

REPEATS = 9

Times = dict[str, dict[str, dict[str, float]]]  # phase -> kind -> "native_us" and "tensorrt_us" of one step


def measure(executor: CudaExecutor, runtime: Any, strategy: Any, engine: Engine, note: Callable[[str], None]) -> Times:
    """Times of every kind of glue; runtime: TensorRT's, strategy: that of user-managed memory."""
    times: Times = {}
    for key in engine.plan.phases:
        kinds: dict[str, list[BoundStep]] = {}
        for bound in executor.start_steps(key):
            if is_glue(bound.step):
                kinds.setdefault(glue_kind(bound.step), []).append(bound)
        times[key] = {}
        for kind, bounds in kinds.items():
            native = seconds(executor, lambda some=bounds: native_run(executor, some))  # type: ignore[misc]
            data = engine.tensorrt[segment_key(key, kind)]
            with tensorrt_steps(executor, runtime, strategy, data, bounds) as run:
                run()  # TensorRT for RTX compiles its kernels at the first run
                executor.synchronize()
                found = {"native_us": native, "tensorrt_us": seconds(executor, run)}
            times[key][kind] = {name: 1e6 * value / len(bounds) for name, value in found.items()}
            note(f"{key} {kind}: {', '.join(f'{name} {us:.2f}' for name, us in times[key][kind].items())}")
    return times


def seconds(executor: CudaExecutor, body: Callable[[], None]) -> float:
    """Of a graph of what `body` puts on the stream: the median of replays that follow each other."""
    device = executor.device
    graph = device.capture(body)
    stamps = [device.event(timing=True) for _ in range(REPEATS + 1)]
    device.replay(graph)
    device.record(stamps[0])
    for stamp in stamps[1:]:
        device.replay(graph)
        device.record(stamp)
    executor.synchronize()
    taken = [device.seconds(*both) for both in zip(stamps, stamps[1:], strict=False)]
    device.drop(graph)
    return float(np.median(taken))


def native_run(executor: CudaExecutor, bounds: Sequence[BoundStep]) -> None:
    for bound in bounds:
        executor.start_step(bound)


@contextmanager
def tensorrt_steps(
    executor: CudaExecutor, runtime: Any, strategy: Any, data: bytes, bounds: Sequence[BoundStep]
) -> Iterator[Callable[[], None]]:
    """The same steps by a TensorRT plan, on the same addresses."""
    plan = runtime.deserialize_cuda_engine(data)
    if plan is None:
        raise EngineError(f"step {bounds[0].step.node}: TensorRT cannot load its plan here")
    context = plan.create_execution_context(strategy)
    scratch = executor.device.allocate(plan.device_memory_size_v2)
    context.set_device_memory(scratch, plan.device_memory_size_v2)

    def run() -> None:
        for bound in bounds:
            for name, address in zip(("x", "weight", "y"), bound.addresses[:3], strict=True):
                context.set_tensor_address(name, address)
            if not context.execute_async_v3(int(executor.device.stream)):
                raise EngineError(f"step {bound.step.node}: TensorRT did not run")

    try:
        yield run
    finally:
        executor.synchronize()
        executor.device.free(scratch)


def run(args: argparse.Namespace) -> int:
    """Carry out the command, on rank 0's part of the engine and one GPU."""
    engine = load_engine(args.artifact, 0, map_weights=False)
    trt = check_tensorrt(engine)
    device = open_device(engine.plan, 0, rebuild_command(args.artifact, engine.plan.tp, engine.plan.arch))
    collectives: Collectives = StandIn(engine.plan.tp) if engine.plan.tp > 1 else SingleRank()
    executor = CudaExecutor(engine.plan, engine.cubins, weight_source(engine), device, collectives)
    try:
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        times = measure(executor, runtime, strategy, engine, lambda line: print(line, file=sys.stderr))
    finally:
        executor.close()
    result = {
        "device": device.name,
        "date": datetime.date.today().isoformat(),
        "tensorrt": engine.plan.settings["tensorrt"],
        "phases": times,
    }
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    total = sum(len(kinds) for kinds in times.values())
    faster = sum(t["tensorrt_us"] < t["native_us"] for kinds in times.values() for t in kinds.values())
    print(f"TensorRT is faster at {faster} of {total} kinds of steps: build.py ... --tensorrt --tactics {args.output}")
    return 0
