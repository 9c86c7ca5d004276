"""The CPU executor: a plan run through the plugins' references, with the memory that the plan lays out.

Results of the references are copied to the addresses of the plan, so an error in the plan's memory shows on
the CPU exactly as it would on a GPU.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plugins.core.plan import Arg, Phase, Plan, Step, pair
from plugins.core.plugin import Communicator, Plugin, PluginError, Runner, get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.splat import splat
from plugins.core.torch_dtypes import TORCH_DTYPES

_POISON = 0xFF  # as float32 or bfloat16 a NaN, as int32 -1


class SingleRank:
    """The communicator of an engine with one rank."""

    rank = 0
    world = 1

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]


@dataclass(frozen=True)
class BoundStep:
    """One step with its operands resolved: `runner(*inputs)` gives what is copied to `outputs`."""

    node: str
    plugin: str
    runner: Runner
    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]


class CpuExecutor:
    """One rank of a plan, in memory of its own.

    weights: packed weights of this rank by name, in storage dtype; None fills every weight synthetically
    ("splat"). comm: transport between the ranks; None for an engine with one rank. Raises ValueError for a
    plan of another arch and for weights that are missing or of another spec.
    """

    def __init__(self, plan: Plan, weights: Mapping[str, np.ndarray] | None, comm: Communicator | None = None) -> None:
        if plan.arch != "cpu":
            raise ValueError(f"plan for arch {plan.arch!r}: the CPU executor runs 'cpu' plans, build with --arch cpu")
        self.plan = plan
        self._comm: Communicator = SingleRank() if comm is None else comm
        if self._comm.world != plan.tp:
            raise ValueError(f"plan for {plan.tp} ranks: the communicator has {self._comm.world}")
        self._arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
        self.buffers = {
            name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for name, spec in plan.buffers.items()
        }
        self._host = {name: _as_numpy(tensor) for name, tensor in self.buffers.items()}
        self._weights = weights
        self._tensors: dict[str, torch.Tensor] = {}
        self._prepared: dict[tuple[str, ...], Any] = {}
        self._runners: dict[tuple[str, str], Runner] = {}
        self._phases = {key: self._bind(phase) for key, phase in plan.phases.items()}
        self._tensors.clear()
        self._profile: dict[str, float] | None = None

    def run(self, phase: str) -> None:
        """Run the phase with key `phase`, e.g. "verify[16]"."""
        if self._profile is not None:
            for _, plugin, seconds in self.profile(phase):
                self._profile[plugin] = self._profile.get(plugin, 0.0) + seconds
            return
        with torch.inference_mode():
            for step in self._phases[phase]:
                result = step.runner(*step.inputs)
                if step.outputs:
                    _store(step, result)

    def profile(self, phase: str) -> list[tuple[str, str, float]]:
        """Run the phase once and return (node, plugin, seconds) of every step."""
        times = []
        with torch.inference_mode():
            for step in self._phases[phase]:
                start = time.perf_counter()
                result = step.runner(*step.inputs)
                if step.outputs:
                    _store(step, result)
                times.append((step.node, step.plugin, time.perf_counter() - start))
        return times

    def collect_profile(self) -> dict[str, float]:
        """From now on add up seconds by plugin in the returned table; costs a clock call per step."""
        self._profile = {}
        return self._profile

    def read(self, name: str, at: int | slice = slice(None)) -> np.ndarray:
        return self._host[name][at]

    def write(self, name: str, values: Any, at: int | slice = slice(None)) -> None:
        self._host[name][at] = values

    def synchronize(self) -> None:
        """Nothing to wait for: `run` returns when the pass is done."""

    def poison(self, phase: str) -> None:
        """Fill the arena and the buffers that `phase` overwrites as a whole with NaN (integers: -1), for tests."""
        self._arena.fill_(_POISON)
        for step in self.plan.phases[phase].steps:
            for arg in step.outputs:
                if arg.kind == "buffer":
                    self._view(arg).view(torch.uint8).fill_(_POISON)

    # ---- load ----

    def _bind(self, phase: Phase) -> tuple[BoundStep, ...]:
        return tuple(self._bind_step(step) for step in phase.steps)

    def _bind_step(self, step: Step) -> BoundStep:
        plugin = get_plugin(step.plugin)
        attrs = json.dumps(step.attrs, sort_keys=True)
        if (step.plugin, attrs) not in self._runners:
            self._runners[step.plugin, attrs] = plugin.reference(step.attrs, self._comm)
        inputs = tuple(
            self._weight(step, plugin, operand, arg, attrs) if arg.kind == "weight" else self._view(arg)
            for operand, arg in pair(plugin.inputs, step.inputs)
        )
        outputs = tuple(self._view(arg) for arg in step.outputs if arg.kind != "none")
        return BoundStep(step.node, step.plugin, self._runners[step.plugin, attrs], inputs, outputs)

    def _view(self, arg: Arg) -> Any:
        if arg.kind == "none" or arg.spec is None:
            return None
        if arg.kind == "arena":
            data = self._arena[arg.offset : arg.offset + arg.spec.nbytes]
        else:
            data = self.buffers[arg.name].reshape(-1).view(torch.uint8)[: arg.spec.nbytes]
        return data.view(TORCH_DTYPES[arg.spec.dtype]).view(arg.spec.shape)

    def _weight(self, step: Step, plugin: Plugin, operand: str, arg: Arg, attrs: str) -> Any:
        """The operand as the reference takes it. Steps that prepare one weight to equal tensors share them."""
        default = type(plugin).prepare is Plugin.prepare
        key = (arg.name,) if default else (arg.name, step.plugin, operand, attrs)
        if key not in self._prepared:
            if arg.name not in self._tensors:
                self._tensors[arg.name] = self._load(arg.name)
            dtype = TORCH_DTYPES[self.plan.activation_dtype]
            value = plugin.prepare(step.attrs, operand, self._tensors[arg.name], dtype)
            for other, known in self._prepared.items():
                if other[:3] == key[:3] and _equal(known, value):
                    value = known
                    break
            self._prepared[key] = value
        return self._prepared[key]

    def _load(self, name: str) -> torch.Tensor:
        spec = self.plan.weights[name].spec
        if self._weights is None:
            return as_tensor(splat(name, spec), spec)
        if name not in self._weights:
            raise ValueError(f"weight {name}: not in the weights file, rebuild the engine")
        array = self._weights[name]
        if array.shape != spec.shape or array.nbytes != spec.nbytes:
            raise ValueError(f"weight {name}: expected {spec}, found {array.dtype}{list(array.shape)}")
        return as_tensor(array, spec)


def _store(step: BoundStep, result: Any) -> None:
    results = (result,) if isinstance(result, torch.Tensor) else result
    for output, value in zip(step.outputs, results, strict=True):
        if output.shape != value.shape:
            raise PluginError(
                f"step {step.node}: {step.plugin} gave shape {list(value.shape)}, the plan holds {list(output.shape)}"
            )
        output.copy_(value)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as numpy; bfloat16 as uint16 bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """The same memory as a tensor of `spec`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # weights are mapped read-only and only read
        tensor = torch.from_numpy(array)
    return tensor.view(TORCH_DTYPES[spec.dtype])


def _equal(first: Any, second: Any) -> bool:
    both = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    return both and first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
