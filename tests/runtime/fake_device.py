"""A device of the CUDA executor in host memory, whose work waits until somebody does, and steps run by references.

Nothing is done before it is waited for: host memory that is changed too early, or read too early, shows as on a GPU.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine_runtime.executor.collectives import Collectives
from engine_runtime.executor.cpu import SingleRank as NoTransport
from engine_runtime.executor.cuda import BoundStep, CudaExecutor
from engine_runtime.executor.weights import WeightSource
from plugins.core.plan import Arg, Plan, pair
from plugins.core.plugin import Runner, get_plugin
from plugins.core.torch_dtypes import TORCH_DTYPES

Work = Callable[[], None]


def memory(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class FakeDevice:
    """Stands in for `engine_runtime.executor.device.Device`; `room`: bytes of its memory."""

    name = "fake"
    stream = 0

    def __init__(self, room: int = 1 << 32) -> None:
        self._room = room
        self._blocks: dict[int, np.ndarray] = {}
        self._pinned: list[np.ndarray] = []
        self._queue: list[Work] = []
        self._recording: list[Work] | None = None
        self._done = 0  # pieces of work since the start
        self.uploads = 0

    def memory(self) -> tuple[int, int]:
        return self._room - sum(block.nbytes for block in self._blocks.values()), self._room

    def allocate(self, nbytes: int) -> int:
        block = np.full(nbytes + 256, 0xFF, np.uint8)
        start = block.ctypes.data + -block.ctypes.data % 256
        self._blocks[start] = block
        return start

    def pinned(self, nbytes: int) -> np.ndarray:
        self._pinned.append(np.zeros(nbytes, np.uint8))
        return self._pinned[-1]

    def _is_pinned(self, values: np.ndarray) -> bool:
        return any(np.shares_memory(values, block) for block in self._pinned)

    def fetched(self, address: int, like: np.ndarray) -> np.ndarray:
        """What is at `address` after all work so far, in the form of `like`."""
        values = np.empty_like(like)
        self.download(values, address)
        event = self.event()
        self.record(event)
        self.wait(event)
        return values

    def do(self, work: Work) -> None:
        (self._queue if self._recording is None else self._recording).append(work)

    def upload(self, to: int, values: np.ndarray) -> None:
        assert values.flags.c_contiguous
        given = values if self._is_pinned(values) else values.copy()
        flat = given.reshape(-1).view(np.uint8)
        self.uploads += 1
        self.do(lambda: np.copyto(memory(to, flat.nbytes), flat))

    def download(self, values: np.ndarray, source: int) -> None:
        assert values.flags.c_contiguous
        flat = values.reshape(-1).view(np.uint8)
        self.do(lambda: np.copyto(flat, memory(source, flat.nbytes)))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self.do(lambda: np.copyto(memory(to, nbytes), memory(source, nbytes)))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self.do(lambda: memory(address, nbytes).fill(byte))

    def capture(self, body: Work) -> list[Work]:
        self._recording = graph = []
        try:
            body()
        finally:
            self._recording = None
        return graph

    def replay(self, graph: list[Work]) -> None:
        self._queue += graph

    def event(self, timing: bool = False) -> dict[str, int]:
        return {"at": 0}

    def record(self, event: dict[str, int]) -> None:
        event["at"] = self._done + len(self._queue)

    def wait(self, event: dict[str, int]) -> None:
        count = max(0, event["at"] - self._done)
        now, self._queue = self._queue[:count], self._queue[count:]
        self._done += count
        for work in now:
            work()

    def seconds(self, start: dict[str, int], end: dict[str, int]) -> float:
        """A microsecond for every piece of work in between."""
        return 1e-6 * (end["at"] - start["at"])

    def drop(self, graph: list[Work]) -> None:
        graph.clear()

    def free(self, address: int) -> None:
        del self._blocks[address]

    def close(self) -> None:
        self._blocks.clear()


class ReferenceSteps:
    """What makes an executor run every step's reference in place of its kernels."""

    plan: Plan
    fake: FakeDevice

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._plugin_runners: dict[tuple[str, str], Runner] = {}
        super().__init__(*args, **kwargs)

    def _enqueue(self, bound: BoundStep) -> None:
        step = bound.step
        plugin = get_plugin(step.plugin)
        attrs = json.dumps(step.attrs, sort_keys=True)
        if (step.plugin, attrs) not in self._plugin_runners:
            self._plugin_runners[step.plugin, attrs] = plugin.reference(step.attrs, NoTransport())
        run = self._plugin_runners[step.plugin, attrs]
        names = [name for name, _ in pair(plugin.inputs, step.inputs)]
        inputs, outputs = bound.addresses[: len(names)], bound.addresses[len(names) : -1]

        def work() -> None:
            operands = []
            for name, (_, arg), address in zip(names, pair(plugin.inputs, step.inputs), inputs, strict=True):
                value = tensor(arg, address)
                if arg.kind == "weight":
                    assert value is not None
                    value = plugin.prepare(step.attrs, name, value, TORCH_DTYPES[self.plan.activation_dtype])
                operands.append(value)
            with torch.inference_mode():
                results = run(*operands)
                results = (results,) if isinstance(results, torch.Tensor) else results or ()
                kept = [(arg, at) for (_, arg), at in zip(pair(plugin.outputs, step.outputs), outputs, strict=True)]
                for (arg, address), result in zip([k for k in kept if k[0].kind != "none"], results, strict=True):
                    target = tensor(arg, address)
                    assert target is not None
                    target.copy_(result)

        self.fake.do(work)


class ReferenceExecutor(ReferenceSteps, CudaExecutor):
    """The CUDA executor on references."""

    def __init__(
        self, plan: Plan, weights: WeightSource, device: FakeDevice, collectives: Collectives | None = None
    ) -> None:
        self.fake = device
        super().__init__(plan, {}, weights, device, collectives)


def tensor(arg: Arg, address: int) -> torch.Tensor | None:
    if arg.kind == "none" or arg.spec is None:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.from_numpy(memory(address, arg.spec.nbytes))
    return flat.view(TORCH_DTYPES[arg.spec.dtype]).view(arg.spec.shape)
