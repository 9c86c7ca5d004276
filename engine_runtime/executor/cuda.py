"""The CUDA executor: the phases of a plan as CUDA graphs on one device. Imports no torch, compiles nothing.

At load everything is allocated, every kernel image of the engine is loaded and every phase is captured once; a pass
is then one copy of what the host has written, and one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_runtime.executor.collectives import Collectives, SingleRank
from engine_runtime.executor.device import Device, device_arch
from engine_runtime.executor.mirror import Mirror
from engine_runtime.executor.weights import WeightSource
from plugins.core.engine_file import EngineError
from plugins.core.kernel import CudaError
from plugins.core.plan import Arg, Phase, Plan, Step, pair
from plugins.core.plugin import Launch, get_plugin
from plugins.core.spec import DTYPES, TensorSpec
from plugins.core.state import Limits, host_buffers

GRAPH_BYTES = 8 << 10  # of device memory for each kernel of a graph
_POISON = 0xFF
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class BoundStep:
    """One step with the addresses of its operands, ready to be put on the stream."""

    step: Step
    addresses: tuple[int, ...]
    kernels: tuple[Any, ...]


class CudaExecutor:
    """One rank of a plan on one device.

    cubins: kernel images by name. weights: where the packed weights come from. collectives: the transport between the
    ranks. progress: fraction and what is being done, at load. Raises `EngineError` where plan and device do not fit
    and where the device's memory does not hold the engine, with nothing left allocated.
    """

    def __init__(
        self,
        plan: Plan,
        cubins: Mapping[str, bytes],
        weights: WeightSource,
        device: Device,
        collectives: Collectives | None = None,
        progress: Progress = lambda fraction, what: None,
    ) -> None:
        self.plan = plan
        self.device = device
        self._collectives = SingleRank() if collectives is None else collectives
        if self._collectives.world != plan.tp:
            raise EngineError(f"plan for {plan.tp} ranks: {self._collectives.world} are connected")
        self._event = device.event()
        host = host_buffers(Limits(**plan.settings["limits"]))
        self._check_room(weights)
        self._arena = device.allocate(self._arena_bytes())
        device.fill(self._arena, 0, self._arena_bytes())
        self._mirror = Mirror(
            device,
            {name: spec for name, spec in plan.buffers.items() if name in host},
            {key: _written(phase) for key, phase in plan.phases.items()},
        )
        self._large = {name: device.allocate(spec.nbytes) for name, spec in plan.buffers.items() if name not in host}
        for name, address in self._large.items():
            device.fill(address, 0, plan.buffers[name].nbytes)
        self._weights = weights.upload(device, cubins, lambda fraction: progress(0.8 * fraction, "reading weights"))
        self._kernels: dict[Launch, Any] = {}
        self._phases: dict[str, tuple[BoundStep, ...]] = {}
        self._graphs: dict[str, Any] = {}
        for index, (key, phase) in enumerate(plan.phases.items()):
            progress(0.8 + 0.2 * index / len(plan.phases), f"capturing {key}")
            self._phases[key] = tuple(self._bind(step, cubins) for step in phase.steps)
            self._prepare(key)
            self._graphs[key] = device.capture(lambda key=key: self._enqueue_phase(key))  # type: ignore[misc]
        progress(1.0, "ready")

    # ---- Executor ----

    def run(self, phase: str) -> None:
        """Start the phase with key `phase`, e.g. "verify[16]"; whoever reads its results waits for it."""
        self._mirror.flush()
        self.device.replay(self._graphs[phase])
        self._mirror.ran(phase)

    def read(self, name: str, at: int | slice = slice(None)) -> np.ndarray:
        if name not in self._large:
            return self._mirror.read(name)[at]
        spec, start = self._rows(name, at)
        values = np.empty(spec.shape, DTYPES[spec.dtype][1])
        self.device.download(values, start)
        self.synchronize()
        return values[0] if isinstance(at, int) else values

    def write(self, name: str, values: Any, at: int | slice = slice(None)) -> None:
        if name not in self._large:
            self._mirror.write(name, values, at)
            return
        spec, start = self._rows(name, at)
        rows = np.empty(spec.shape, DTYPES[spec.dtype][1])
        rows[:] = values
        self.device.upload(start, rows)

    # ---- beside it ----

    def synchronize(self) -> None:
        """Wait for all passes that were started."""
        self.device.record(self._event)
        self.device.wait(self._event)

    def profile(self, phase: str, repeats: int = 5) -> list[tuple[str, str, float]]:
        """(node, plugin, seconds) of every step of `phase`: medians over replays of a graph with a time stamp after
        each step. Stamps keep neighbouring kernels from overlapping, so the sum is more than the phase takes."""
        steps = self._phases[phase]
        stamps = [self.device.event(timing=True) for _ in range(len(steps) + 1)]

        def body() -> None:
            self.device.record_in_graph(stamps[0])
            for bound, stamp in zip(steps, stamps[1:], strict=True):
                self._enqueue(bound)
                self.device.record_in_graph(stamp)

        graph = self.device.capture(body)
        self._mirror.flush()
        samples = []
        for _ in range(repeats):
            self.device.replay(graph)
            self.synchronize()
            samples.append([self.device.seconds(*both) for both in zip(stamps, stamps[1:], strict=False)])
        self.device.drop(graph)
        medians = np.median(np.array(samples), axis=0)
        return [(b.step.node, b.step.plugin, float(t)) for b, t in zip(steps, medians, strict=True)]

    def poison(self, phase: str) -> None:
        """Fill the arena and the large buffers that `phase` overwrites as a whole with NaN (integers: -1), for
        tests."""
        self.device.fill(self._arena, _POISON, self._arena_bytes())
        for step in self.plan.phases[phase].steps:
            for arg in step.outputs:
                if arg.kind == "buffer" and arg.name in self._large and arg.spec is not None:
                    self.device.fill(self._large[arg.name], _POISON, arg.spec.nbytes)

    def start_steps(self, phase: str) -> tuple[BoundStep, ...]:
        """Begin `phase` by hand: its steps, each to be given to `start_step` in order, then `end_steps`."""
        self._mirror.flush()
        return self._phases[phase]

    def start_step(self, bound: BoundStep) -> None:
        self._enqueue(bound)

    def end_steps(self, phase: str) -> None:
        self._mirror.fetch(phase)
        self._mirror.ran(phase)

    def operand(self, arg: Arg) -> np.ndarray:
        """What is at the address of an operand now, in storage dtype."""
        if arg.spec is None:
            raise ValueError("an absent operand has no value")
        values = np.empty(arg.spec.shape, DTYPES[arg.spec.dtype][1])
        self.device.download(values, self._address(arg))
        self.synchronize()
        return values

    def launches(self, phase: str) -> int:
        """Kernels that one pass of `phase` starts."""
        return sum(len(bound.kernels) for bound in self._phases[phase])

    def close(self) -> None:
        """Give everything back."""
        self._collectives.close()
        self.device.close()

    # ---- load ----

    def _arena_bytes(self) -> int:
        return self.plan.arena_bytes

    def _prepare(self, key: str) -> None:
        """What must happen before the phase `key` is captured."""

    def _check_room(self, weights: WeightSource) -> None:
        """Refuse an engine that the device's memory cannot hold, with the numbers, before anything is allocated."""
        plan = self.plan
        kv = sum(spec.nbytes for name, spec in plan.buffers.items() if name.endswith(("kv_pool", "draft_kv")))
        launches = sum(len(step.launches) for phase in plan.phases.values() for step in phase.steps)
        needed = {
            "weights": weights.nbytes,
            "KV": kv,
            "other buffers": plan.buffer_bytes() - kv,
            "arena": self._arena_bytes(),
            "graphs (estimated)": launches * GRAPH_BYTES,
        }
        free, total = self.device.memory()
        most = sum(needed.values())
        if most > free:
            parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needed.items())
            raise EngineError(
                f"rank {plan.rank}: {self.device.name}: the engine needs {most / 1e9:.2f} GB ({parts}), but "
                f"{free / 1e9:.2f} of {total / 1e9:.2f} GB are free: build with less --kv-tokens or a larger --tp"
            )

    def _bind(self, step: Step, cubins: Mapping[str, bytes]) -> BoundStep:
        plugin = get_plugin(step.plugin)
        operands = [arg for _, arg in pair(plugin.inputs, step.inputs)]
        operands += [arg for _, arg in pair(plugin.outputs, step.outputs)]
        operands.append(step.workspace)
        for launch in step.launches:
            if launch not in self._kernels:
                if launch.image not in cubins:
                    raise EngineError(f"step {step.node}: the engine file lacks the kernel {launch.image}: rebuild it")
                self._kernels[launch] = self.device.kernel(launch, cubins[launch.image])
        return self._bound(step, [self._address(arg) for arg in operands])

    def _bound(self, step: Step, addresses: Sequence[int]) -> BoundStep:
        """`step` on operands (inputs, outputs, workspace) at `addresses`; its kernels are loaded."""
        if self._in_place(step):
            addresses = (*addresses[:-1], addresses[0])
        return BoundStep(step, tuple(addresses), tuple(self._kernels[launch] for launch in step.launches))

    def _in_place(self, step: Step) -> bool:
        return step.tactic == "nccl" and step.plugin in self._collectives.in_place

    def _address(self, arg: Arg) -> int:
        if arg.kind == "none":
            return 0
        if arg.kind == "arena":
            return self._arena + arg.offset
        if arg.kind == "weight":
            return self._weights[arg.name]
        return self._large[arg.name] if arg.name in self._large else self._mirror.address(arg.name)

    def _enqueue_phase(self, key: str) -> None:
        for bound in self._phases[key]:
            self._enqueue(bound)
        self._mirror.fetch(key)

    def _enqueue(self, bound: BoundStep) -> None:
        """Put one step on the stream: what it needs of other ranks, then its kernels."""
        step, stream = bound.step, int(self.device.stream)
        if step.tactic == "nccl" and not self._in_place(step):
            spec = step.inputs[0].spec
            assert spec is not None
            self._collectives.run(step.plugin, bound.addresses[0], bound.addresses[-1], spec, self.device)
        for kernel in bound.kernels:
            kernel.start(bound.addresses, stream)

    def _rows(self, name: str, at: int | slice) -> tuple[TensorSpec, int]:
        """Spec and address of the rows `at` of a large buffer."""
        spec = self.plan.buffers[name]
        start, stop, stride = (at, at + 1, 1) if isinstance(at, int) else at.indices(spec.shape[0])
        if stride != 1 or not 0 <= start <= stop <= spec.shape[0]:
            raise IndexError(f"buffer {name}: rows {at} of {spec.shape[0]}")
        row = spec.nbytes // spec.shape[0]
        return TensorSpec((stop - start, *spec.shape[1:]), spec.dtype), self._large[name] + start * row


def open_device(plan: Plan, ordinal: int, again: str) -> Device:
    """Device `ordinal`, which `plan` must be built for; raises `EngineError`, `again` being the rebuild command."""
    try:
        found = device_arch(ordinal)
        if found != plan.arch:
            raise EngineError(f"built for {plan.arch}, device {ordinal} is {found}: rebuild with `{again}`")
        return Device(ordinal)
    except (CudaError, RuntimeError) as error:  # RuntimeError: cuda-bindings finds no driver
        raise EngineError(f"device {ordinal} cannot be used: {error}: see `python -m engine_runtime doctor`") from None


def _written(phase: Phase) -> set[str]:
    """Names of the persistent buffers that `phase` writes."""
    names = set()
    for step in phase.steps:
        plugin = get_plugin(step.plugin)
        mutated = [arg for name, arg in pair(plugin.inputs, step.inputs) if name in plugin.mutates]
        names |= {arg.name for arg in (*step.outputs, *mutated) if arg.kind == "buffer"}
    return names
