"""The null executor: walks every step of every phase without computing, and finds what would go wrong.

It re-derives each step's result specs from its plugin, keeps account of which value owns which bytes of the
arena, and compares the ranks. A plan that passes cannot read a value that another one has overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.core.plan import ARENA_ALIGNMENT, Arg, Phase, Plan, Step, pair
from plugins.core.plugin import ATTR_KINDS, Plugin, PluginError, get_plugin
from plugins.core.spec import DTYPES, TensorSpec

COLLECTIVES = ("all_reduce", "all_gather")
ARGUMENT_BYTES = 8  # of a pointer, and of an attribute passed by value
RANK_ATTRS = ("tp_rank",)  # the only attributes in which ranks may differ


class PlanError(Exception):
    """A plan that must not run; the message names phase, step and operand."""


@dataclass(frozen=True)
class PhaseReport:
    """What one phase does: steps, last arena byte it touches, buffers it writes, largest argument list in
    bytes, and its collectives as (node, plugin, bytes of the local operand)."""

    key: str
    steps: int
    arena_bytes: int
    writes: tuple[str, ...]
    argument_bytes: int
    collectives: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class _Owner:
    """Bytes [start, end) of the arena that hold `name`, written by `node`."""

    start: int
    end: int
    name: str
    node: str


@dataclass
class _Memory:
    """Who owns the arena: disjoint intervals. `lost` remembers which step overwrote a value that is gone."""

    owners: list[_Owner] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def write(self, start: int, end: int, name: str, node: str) -> None:
        for owner in [o for o in self.owners if o.start < end and start < o.end]:
            self.owners.remove(owner)
            self.lost[owner.name] = node
        self.lost.pop(name, None)
        self.owners.append(_Owner(start, end, name, node))

    def why_not(self, start: int, end: int, name: str) -> str | None:
        """Why [start, end) does not hold the value `name`; None if it does."""
        for owner in self.owners:
            if owner.name == name and owner.start <= start and end <= owner.end:
                return None
        if name in self.lost:
            return f"the value {name!r} was overwritten by step {self.lost[name]!r}"
        for owner in self.owners:
            if owner.name == name:
                return f"the value {name!r} lies at bytes {owner.start} to {owner.end}, read at {start} to {end}"
        return f"the value {name!r} has not been written in this phase"


Infer = Callable[[Plugin, Step], list[TensorSpec]]


def check_plan(plan: Plan, infer: Infer | None = None) -> list[PhaseReport]:
    """Walk every phase of `plan`; raises `PlanError` for the first thing wrong, else reports what the phases do."""
    infer = _CachedInfer() if infer is None else infer
    return [_check_phase(plan, phase, infer) for phase in plan.phases.values()]


def check_ranks(plans: Sequence[Plan]) -> list[PhaseReport]:
    """`check_plan` for all ranks of an engine (in rank order), and that they run in step with each other.

    All ranks must have the same phases, steps, addresses and specs, the same attributes except "tp_rank",
    and so the same sequence of collectives with equal sizes: anything else hangs or corrupts a collective.
    Only rank 0 is walked byte by byte; the others are equal to it where they pass.
    """
    first = plans[0]
    for rank, plan in enumerate(plans):
        if plan.rank != rank or plan.tp != len(plans):
            raise PlanError(f"rank {rank} of {len(plans)}: the plan is of rank {plan.rank} of {plan.tp}")
    reports = check_plan(first)
    for plan in plans[1:]:
        _check_symmetry(first, plan)
    return reports


# ---- one rank ----


@dataclass
class _CachedInfer:
    """`plugin.infer`, once per distinct (plugin, attributes, input specs)."""

    known: dict[Any, list[TensorSpec]] = field(default_factory=dict)

    def __call__(self, plugin: Plugin, step: Step) -> list[TensorSpec]:
        specs = tuple(arg.spec for _, arg in pair(plugin.inputs, step.inputs))
        key = (step.plugin, json.dumps(step.attrs, sort_keys=True), specs)
        if key not in self.known:
            self.known[key] = plugin.infer(step.attrs, specs)
        return self.known[key]


def _check_phase(plan: Plan, phase: Phase, infer: Infer) -> PhaseReport:
    memory = _Memory()
    top = arguments = 0
    writes: dict[str, None] = {}
    collectives = []
    for step in phase.steps:
        where = f"rank {plan.rank}, {phase.key}, step {step.node!r} ({step.plugin})"
        plugin = _check_schema(step, where)
        inputs = pair(plugin.inputs, step.inputs)
        outputs = pair(plugin.outputs, step.outputs)
        placed = [*inputs, *outputs, ("workspace", step.workspace)]
        for operand, arg in placed:
            _check_address(plan, arg, f"{where}: {operand}")
        for operand, arg in inputs:
            if arg.kind == "arena":
                start, end = _span(arg)
                reason = memory.why_not(start, end, arg.name)
                if reason is not None:
                    raise PlanError(f"{where}: {operand}: {reason}")
        _check_results(plugin, step, infer, where)
        _check_overlap(inputs, [*outputs, ("workspace", step.workspace)], where)
        for _, arg in [*outputs, ("workspace", step.workspace)]:
            if arg.kind == "arena":
                start, end = _span(arg)
                memory.write(start, end, arg.name or f"workspace of {step.node}", step.node)
            elif arg.kind == "buffer":
                writes[arg.name] = None
        writes.update(dict.fromkeys(arg.name for operand, arg in inputs if operand in plugin.mutates))
        top = max([top, *(_span(arg)[1] for _, arg in placed if arg.kind == "arena")])
        pointers = sum(arg.kind != "none" for _, arg in placed)
        values = sum(not isinstance(value, str) for value in step.attrs.values())
        arguments = max(arguments, ARGUMENT_BYTES * (pointers + values))
        if step.plugin in COLLECTIVES:
            spec = step.inputs[0].spec
            collectives.append((step.node, step.plugin, 0 if spec is None else spec.nbytes))
    return PhaseReport(phase.key, len(phase.steps), top, tuple(sorted(writes)), arguments, tuple(collectives))


def _check_schema(step: Step, where: str) -> Plugin:
    """Plugin, tactic, number of operands and attributes of `step`."""
    try:
        plugin = get_plugin(step.plugin)
    except PluginError as error:
        raise PlanError(f"{where}: {error}") from error
    if step.tactic not in [tactic.name for tactic in plugin.tactics]:
        known = ", ".join(tactic.name for tactic in plugin.tactics)
        raise PlanError(f"{where}: tactic {step.tactic!r}: expected one of {known}")
    for kind, names, args in (
        ("inputs", plugin.inputs, step.inputs),
        ("outputs", plugin.outputs, step.outputs),
    ):
        if len(args) > len(names):
            raise PlanError(f"{where}: expected at most {len(names)} {kind}, found {len(args)}")
        for name, (operand, arg) in zip(names, pair(names, args), strict=True):
            if arg.kind == "none" and not name.endswith("?"):
                raise PlanError(f"{where}: {operand}: a required operand is absent")
            if operand in plugin.mutates and arg.kind not in ("buffer", "none"):
                raise PlanError(f"{where}: {operand}: is written in place, expected a buffer, found {arg.kind}")
    for operand, arg in pair(plugin.outputs, step.outputs):
        if arg.kind not in ("arena", "buffer", "none"):
            raise PlanError(f"{where}: {operand}: expected an arena or buffer address, found {arg.kind!r}")
    if set(step.attrs) != set(plugin.attrs):
        odd = ", ".join(sorted(set(step.attrs) ^ set(plugin.attrs)))
        raise PlanError(f"{where}: attributes missing or unknown: {odd}")
    for name, kind in plugin.attrs.items():
        if type(step.attrs[name]) is not ATTR_KINDS[kind]:
            found = type(step.attrs[name]).__name__
            raise PlanError(f"{where}: attribute {name}: expected {kind}, found {found}")
    return plugin


def _check_address(plan: Plan, arg: Arg, where: str) -> None:
    """That `arg` names memory that exists and is large enough."""
    if arg.kind == "none":
        return
    if arg.spec is None:
        raise PlanError(f"{where}: {arg.kind} {arg.name!r} has no shape")
    if arg.spec.dtype not in DTYPES or any(size <= 0 for size in arg.spec.shape):
        raise PlanError(f"{where}: {arg.spec} is not a shape of positive sizes")
    if arg.kind == "arena":
        start, end = _span(arg)
        if start < 0 or end > plan.arena_bytes:
            raise PlanError(f"{where}: arena bytes {start} to {end} are outside the arena of {plan.arena_bytes} bytes")
        if start % ARENA_ALIGNMENT:
            raise PlanError(f"{where}: arena offset {start} is not a multiple of {ARENA_ALIGNMENT}")
    elif arg.kind == "buffer":
        spec = plan.buffers.get(arg.name)
        if spec is None:
            raise PlanError(f"{where}: the plan has no buffer {arg.name!r}")
        if arg.spec.dtype != spec.dtype:
            raise PlanError(f"{where}: buffer {arg.name!r} holds {spec.dtype}, the step sees {arg.spec.dtype}")
        if arg.spec.nbytes > spec.nbytes:
            raise PlanError(f"{where}: buffer {arg.name!r} is {spec}, the step sees more: {arg.spec}")
    elif arg.kind == "weight":
        weight = plan.weights.get(arg.name)
        if weight is None:
            raise PlanError(f"{where}: the plan has no weight {arg.name!r}")
        if arg.spec != weight.spec:
            raise PlanError(f"{where}: weight {arg.name!r} is {weight.spec}, the step sees {arg.spec}")
    else:
        raise PlanError(f"{where}: unknown kind of address {arg.kind!r}")
    if arg.kind != "arena" and arg.offset:
        raise PlanError(f"{where}: an offset ({arg.offset}) is only known in the arena, found in a {arg.kind}")


def _check_results(plugin: Plugin, step: Step, infer: Infer, where: str) -> None:
    try:
        expected = infer(plugin, step)
    except PluginError as error:
        raise PlanError(f"{where}: {error}") from error
    present = [(operand, arg) for operand, arg in pair(plugin.outputs, step.outputs) if arg.kind != "none"]
    if len(expected) != len(present):
        raise PlanError(f"{where}: the operator gives {len(expected)} outputs, the plan holds {len(present)}")
    for spec, (operand, arg) in zip(expected, present, strict=True):
        if arg.spec != spec:
            raise PlanError(f"{where}: {operand}: the operator gives {spec}, the plan holds {arg.spec}")


def _check_overlap(inputs: Sequence[tuple[str, Arg]], results: Sequence[tuple[str, Arg]], where: str) -> None:
    """That no result shares bytes with another result or with an input of the same step."""
    placed = [(operand, *_span(arg)) for operand, arg in results if arg.kind == "arena"]
    others = [(operand, *_span(arg)) for operand, arg in inputs if arg.kind == "arena"] + placed
    for operand, start, end in placed:
        for other, other_start, other_end in others:
            if other != operand and start < other_end and other_start < end:
                raise PlanError(f"{where}: {operand}: overlaps {other} in arena bytes {start} to {end}")


def _span(arg: Arg) -> tuple[int, int]:
    return arg.offset, arg.offset + (0 if arg.spec is None else arg.spec.nbytes)


# ---- all ranks ----


def _check_symmetry(first: Plan, plan: Plan) -> None:
    where = f"rank {plan.rank}"
    for name in ("arch", "activation_dtype", "arena_bytes", "buffers", "settings"):
        if getattr(plan, name) != getattr(first, name):
            raise PlanError(f"{where}: {name} differs from rank 0")
    if list(plan.phases) != list(first.phases):
        odd = sorted(set(plan.phases) ^ set(first.phases)) or list(plan.phases)
        raise PlanError(f"{where}: phases differ from rank 0: {', '.join(odd)}")
    if list(plan.weights) != list(first.weights):
        odd = sorted(set(plan.weights) ^ set(first.weights)) or ["their order"]
        raise PlanError(f"{where}: weights differ from rank 0: {', '.join(odd)}")
    for name, weight in plan.weights.items():
        if weight.spec != first.weights[name].spec:
            raise PlanError(f"{where}: weight {name!r}: {weight.spec} here, {first.weights[name].spec} on rank 0")
    for key, phase in plan.phases.items():
        other = first.phases[key]
        if len(phase.steps) != len(other.steps):
            raise PlanError(f"{where}, {key}: {len(phase.steps)} steps, {len(other.steps)} on rank 0")
        for step, twin in zip(phase.steps, other.steps, strict=True):
            difference = _difference(step, twin)
            if difference is not None:
                raise PlanError(f"{where}, {key}, step {step.node!r} ({step.plugin}): {difference}")


def _difference(step: Step, twin: Step) -> str | None:
    for name in ("node", "plugin", "tactic", "launches"):
        if getattr(step, name) != getattr(twin, name):
            return f"{name} {getattr(step, name)!r} here, {getattr(twin, name)!r} on rank 0"
    for name in step.attrs.keys() | twin.attrs.keys():
        if name not in RANK_ATTRS and step.attrs.get(name) != twin.attrs.get(name):
            return f"attribute {name} is {step.attrs.get(name)} here, {twin.attrs.get(name)} on rank 0"
    for name in ("inputs", "outputs", "workspace"):
        if getattr(step, name) != getattr(twin, name):
            return f"{name} differ from rank 0"
    return None
