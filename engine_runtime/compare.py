"""`python -m engine_runtime compare`: every step of a GPU engine against its operator's reference, while it generates.

Each step's reference is given what the device itself had before the step, so an error is that of the step alone: the
first step that differs is the one at fault.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_runtime.executor.cuda import BoundStep, CudaExecutor
from plugins.core.plan import Arg, Step, pair
from plugins.core.plugin import Runner, get_plugin
from plugins.core.spec import bf16_to_f32

TOLERANCE = 1e-2  # relative error of a step's result; bfloat16 results, computed in float32, are within 3e-3


@dataclass(frozen=True)
class Difference:
    """What one operand of one step differs by: |found - reference| / |reference| for floats, the share of elements
    that are not equal for integers."""

    phase: str
    node: str
    plugin: str
    operand: str
    error: float

    @property
    def fails(self) -> bool:
        return not self.error <= TOLERANCE


class Comparer:
    """Runs phases of `executor` step by step beside the references, in float32.

    weights: packed weights by name in storage dtype. Raises ValueError for an engine of several ranks.
    """

    def __init__(self, executor: CudaExecutor, weights: Mapping[str, np.ndarray]) -> None:
        if executor.plan.tp != 1:
            raise ValueError(f"only engines of one rank can be compared, this one has {executor.plan.tp}")
        self._executor = executor
        self._weights = weights
        self._prepared: dict[tuple[str, str, str], Any] = {}
        self._runners: dict[tuple[str, str], Runner] = {}

    def run(self, phase: str, note: Callable[[Difference], None]) -> None:
        """Run `phase` as `Executor.run` does, and tell `note` what each written operand differs by."""
        steps = self._executor.start_steps(phase)
        for bound in steps:
            inputs = self._inputs(bound.step)
            self._executor.start_step(bound)
            for operand, expected, before, arg in self._reference(bound, inputs):
                found = _numbers(self._executor.operand(arg), arg)
                changed = None if before is None else (found != before) | (expected != before)
                note(Difference(phase, bound.step.node, bound.step.plugin, operand, _error(found, expected, changed)))
        self._executor.end_steps(phase)

    def _inputs(self, step: Step) -> list[np.ndarray | None]:
        plugin = get_plugin(step.plugin)
        return [
            None if arg.kind in ("none", "weight") else _numbers(self._executor.operand(arg), arg)
            for _, arg in pair(plugin.inputs, step.inputs)
        ]

    def _reference(
        self, bound: BoundStep, inputs: Sequence[np.ndarray | None]
    ) -> list[tuple[str, np.ndarray, np.ndarray | None, Arg]]:
        """(operand, value after the step, value before it where it was there, address) of all that the step writes."""
        import torch

        from engine_runtime.executor.cpu import SingleRank

        step, plugin = bound.step, get_plugin(bound.step.plugin)
        attrs = json.dumps(step.attrs, sort_keys=True)
        if (step.plugin, attrs) not in self._runners:
            self._runners[step.plugin, attrs] = plugin.reference(step.attrs, SingleRank())
        named = pair(plugin.inputs, step.inputs)
        operands: list[Any] = []
        for (name, arg), value in zip(named, inputs, strict=True):
            if arg.kind == "weight":
                operands.append(self._weight(step, name, arg, attrs))
            else:
                operands.append(None if value is None else torch.from_numpy(value.copy()))
        with torch.inference_mode():
            results = self._runners[step.plugin, attrs](*operands)
        results = (results,) if isinstance(results, torch.Tensor) else results or ()
        outputs = [(name, arg) for name, arg in pair(plugin.outputs, step.outputs) if arg.kind != "none"]
        written: list[tuple[str, np.ndarray, np.ndarray | None, Arg]] = [
            (name, result.numpy(), None, arg) for (name, arg), result in zip(outputs, results, strict=True)
        ]
        for (name, arg), before, operand in zip(named, inputs, operands, strict=True):
            if name in plugin.mutates:
                written.append((name, operand.numpy(), before, arg))
        return written

    def _weight(self, step: Step, operand: str, arg: Arg, attrs: str) -> Any:
        import torch

        from engine_runtime.executor.cpu import as_tensor

        key = (arg.name, operand, step.plugin + attrs)
        if key not in self._prepared:
            tensor = as_tensor(self._weights[arg.name], self._executor.plan.weights[arg.name].spec)
            self._prepared[key] = get_plugin(step.plugin).prepare(step.attrs, operand, tensor, torch.float32)
        return self._prepared[key]


class ComparingExecutor:
    """An `Executor` that compares the first `times` runs of every phase, for the step loop to drive."""

    def __init__(
        self, executor: CudaExecutor, weights: Mapping[str, np.ndarray], times: int, note: Callable[[Difference], None]
    ) -> None:
        self.plan = executor.plan
        self._executor = executor
        self._comparer = Comparer(executor, weights)
        self._left = dict.fromkeys(executor.plan.phases, times)
        self._note = note
        self.read, self.write, self.synchronize = executor.read, executor.write, executor.synchronize

    def run(self, phase: str) -> None:
        if self._left[phase]:
            self._left[phase] -= 1
            self._comparer.run(phase, self._note)
        else:
            self._executor.run(phase)


def _numbers(values: np.ndarray, arg: Arg) -> np.ndarray:
    """Storage dtype -> what the references take: bfloat16 as float32."""
    return bf16_to_f32(values) if arg.spec is not None and arg.spec.dtype == "bfloat16" else values


def _error(found: np.ndarray, expected: np.ndarray, among: np.ndarray | None) -> float:
    """See `Difference`; of the elements `among`, where not all count."""
    if among is not None:
        found, expected = found[among], expected[among]
    if found.size == 0:
        return 0.0
    if found.dtype.kind != "f":
        return float(np.mean(found != expected))
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    gap = np.where(same, 0.0, found.astype(np.float64) - expected)
    size = float(np.linalg.norm(np.nan_to_num(expected.astype(np.float64), posinf=0.0, neginf=0.0)))
    off = float(np.linalg.norm(gap))
    return off / size if size else off


def summary(differences: Sequence[Difference]) -> list[tuple[str, str, int, float]]:
    """(plugin, operand, comparisons, largest error), in order of first use."""
    table: dict[tuple[str, str], list[float]] = {}
    for difference in differences:
        table.setdefault((difference.plugin, difference.operand), []).append(difference.error)
    return [(plugin, operand, len(e), float(np.max(e))) for (plugin, operand), e in table.items()]


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` as `engine_runtime.cli` parses them. Returns 1 where a step differs."""
    from engine_runtime.budget import PLAIN, Speculation
    from engine_runtime.cli import CommandError
    from engine_runtime.decoder import Decoder
    from engine_runtime.engine import load_engine
    from engine_runtime.executor.cuda import open_device
    from engine_runtime.executor.weights import weight_source
    from engine_runtime.generation import GenerationRequest
    from engine_runtime.sampling import SamplingParams
    from plugins.core.engine_file import rebuild_command

    engine = load_engine(args.artifact, 0)
    if engine.plan.arch == "cpu" or not engine.weights:
        raise CommandError(f"{args.artifact}: expected an engine for a GPU with packed weights, found another")
    streamed = load_engine(args.artifact, 0, verify="size", map_weights=False)
    device = open_device(engine.plan, 0, rebuild_command(args.artifact, 1, engine.plan.arch))
    executor = CudaExecutor(engine.plan, engine.cubins, weight_source(streamed), device)
    differences: list[Difference] = []
    try:
        decoder = Decoder(ComparingExecutor(executor, engine.weights, args.passes, differences.append))
        rng = np.random.default_rng(args.seed)
        limits, vocab = decoder.limits, engine.plan.settings["model"]["vocab_size"]
        speculation = Speculation("tree", limits.max_rows // 4) if limits.draft_depth else PLAIN
        for length in (limits.prefill_chunk // 2 + 1, 3, 70):
            prompt = tuple(rng.integers(0, vocab // 2, length).tolist())
            params = SamplingParams(max_tokens=8, stop_ids=())
            decoder.submit(GenerationRequest(prompt, params, speculation))
        while decoder.busy:
            decoder.step()
    except ValueError as error:
        raise CommandError(str(error)) from None
    finally:
        executor.close()
    print(f"{'plugin':<18} {'operand':<18} {'compared':>8} {'largest error':>14}")
    for plugin, operand, count, most in summary(differences):
        print(f"{plugin:<18} {operand:<18} {count:>8} {most:>14.2e}")
    first = next((difference for difference in differences if difference.fails), None)
    if first is not None:
        print(f"first difference: {first.phase}, step {first.node}: {first.operand} is off by {first.error:.2e}")
        return 1
    print(f"every step is within {TOLERANCE:g} of its reference")
    return 0
