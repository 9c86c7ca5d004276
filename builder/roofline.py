"""What a plan costs at least: bytes, arithmetic and link traffic of every step against the hardware's rates.

Computed, never measured. The time of a step is that of its slowest resource at 100 % of the published rate;
that of a phase is the sum over its steps, so overlap between steps is not counted (Williams, Waterman and
Patterson 2009).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from plugins.core.plan import Phase, Plan, Step
from plugins.core.plugin import get_plugin

BEFORE, AFTER = "before the layers", "after the layers"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Hardware:
    """One GPU: bytes of memory, and peak rates in bytes/s and FLOP/s (bfloat16 tensor cores, dense).

    label: memory as it is sold; `memory` is what the driver reports. link: bytes/s into the GPU from its
    peers. source: where the figures are from.
    """

    arch: str
    name: str
    label: str
    memory: int
    bandwidth: float
    flops: float
    link: float
    source: str


SM120 = Hardware(
    arch="SM120",
    name="RTX PRO 6000 Blackwell",
    label="96 GB",
    memory=97_887 << 20,
    bandwidth=1.792e12,
    flops=503.8e12,
    link=63.0e9,
    source="data sheet (Workstation Edition): 512-bit GDDR7 at 28 Gbit/s a pin, bf16 503.8 TFLOP/s, "
    "PCIe 5.0 x16 (16 lanes x 32 GT/s x 128/130); nvidia-smi: 97,887 MiB",
)
SM90 = Hardware(
    arch="SM90",
    name="H200 SXM",
    label="141 GB",
    memory=143_771 << 20,
    bandwidth=4.8e12,
    flops=989.5e12,
    link=450e9,
    source="data sheet: HBM3e 4.8 TB/s, bf16 989.5 TFLOP/s, NVLink 4 with 900 GB/s, half in each direction; "
    "nvidia-smi: 143,771 MiB",
)


def hardware_for(arch: str) -> Hardware:
    """The GPU that costs are computed for: the plan's own; for a CPU plan the RTX PRO 6000, as an example."""
    return SM90 if arch.startswith("sm_90") else SM120


@dataclass(frozen=True)
class Cost:
    """Sum over `steps` steps: bytes of memory, FLOP, bytes over the link, seconds by the slowest resource.

    memory_s, compute_s and link_s are the seconds of steps that wait for memory, arithmetic and the link:
    they add up to `seconds`.
    """

    steps: int = 0
    nbytes: int = 0
    flops: int = 0
    link_bytes: int = 0
    memory_s: float = 0.0
    compute_s: float = 0.0
    link_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.memory_s + self.compute_s + self.link_s

    @property
    def bound(self) -> str:
        """What takes most of the time: "memory", "compute" or "link"; "-" where there is nothing to do."""
        shares = {"memory": self.memory_s, "compute": self.compute_s, "link": self.link_s}
        return max(shares, key=lambda name: shares[name]) if self.seconds else "-"

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.steps + other.steps,
            self.nbytes + other.nbytes,
            self.flops + other.flops,
            self.link_bytes + other.link_bytes,
            self.memory_s + other.memory_s,
            self.compute_s + other.compute_s,
            self.link_s + other.link_s,
        )


@dataclass(frozen=True)
class StepCost:
    """One step of a phase: `index` is its position, `layer` its layer's number, `BEFORE` or `AFTER`."""

    index: int
    step: Step
    layer: int | str
    cost: Cost


@dataclass(frozen=True)
class PhaseCost:
    """All steps of a phase at `context` committed tokens a request on `hardware`."""

    phase: Phase
    hardware: Hardware
    context: int
    steps: tuple[StepCost, ...]

    @property
    def total(self) -> Cost:
        return _sum(step.cost for step in self.steps)

    def by_plugin(self) -> dict[str, Cost]:
        """Plugin -> cost, the slowest first."""
        sums = self._by(lambda step: step.step.plugin)
        return dict(sorted(sums.items(), key=lambda item: (-item[1].seconds, item[0])))

    def by_layer(self) -> dict[int | str, Cost]:
        """Layer (a number, `BEFORE` or `AFTER`) -> cost, in order of execution."""
        return self._by(lambda step: step.layer)

    def _by(self, key: Callable[[StepCost], Any]) -> dict[Any, Cost]:
        groups: dict[Any, Cost] = {}
        for step in self.steps:
            groups[key(step)] = groups.get(key(step), Cost()) + step.cost
        return groups


def step_cost(step: Step, context: int, hardware: Hardware) -> Cost:
    """Cost of one step; bytes and FLOP are the plugin's own account (`Plugin.cost`)."""
    inputs = [arg.spec for arg in step.inputs]
    outputs = [arg.spec for arg in step.outputs if arg.spec is not None]
    nbytes, flops = get_plugin(step.plugin).cost(step.attrs, inputs, outputs, context)
    link_bytes = _link_bytes(step)
    times = [nbytes / hardware.bandwidth, flops / hardware.flops, link_bytes / hardware.link]
    slowest = max(range(3), key=lambda i: times[i])
    waits = [time if i == slowest else 0.0 for i, time in enumerate(times)]
    return Cost(1, nbytes, flops, link_bytes, *waits)


def phase_cost(phase: Phase, context: int, hardware: Hardware) -> PhaseCost:
    """Cost of every step of `phase`."""
    steps = []
    layers = _layers(phase)
    for index, (step, layer) in enumerate(zip(phase.steps, layers, strict=True)):
        steps.append(StepCost(index, step, layer, step_cost(step, context, hardware)))
    return PhaseCost(phase, hardware, context, tuple(steps))


def plan_costs(plan: Plan, context: int) -> dict[str, PhaseCost]:
    """Phase key -> cost on the plan's hardware."""
    hardware = hardware_for(plan.arch)
    return {key: phase_cost(phase, context, hardware) for key, phase in plan.phases.items()}


def _sum(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def _link_bytes(step: Step) -> int:
    """Least bytes that enter a rank of N: 2 (N - 1) / N times the size of an all-reduce (Patarasuk and Yuan
    2009), or the parts of the N - 1 others in an all-gather.
    """
    if step.plugin not in ("all_reduce", "all_gather"):
        return 0
    world, part = step.attrs["tp_world"], step.inputs[0].spec
    size = 0 if part is None else part.nbytes
    return (world - 1) * size if step.plugin == "all_gather" else 2 * (world - 1) * size // world


def _layers(phase: Phase) -> list[int | str]:
    """Layer of every step, by the number in the name of the node or of a weight that it reads."""
    found: list[int | None] = []
    for step in phase.steps:
        names = [step.node, *(arg.name for arg in step.inputs if arg.kind == "weight")]
        matches = [match for match in map(_LAYER.search, names) if match]
        found.append(int(matches[0][1]) if matches else None)
    numbered = [index for index, layer in enumerate(found) if layer is not None]
    layers: list[int | str] = []
    for index, layer in enumerate(found):
        if layer is not None:
            layers.append(layer)
        elif not numbered or index < numbered[0]:
            layers.append(BEFORE)
        elif index > numbered[-1]:
            layers.append(AFTER)
        else:  # a node without a name of its own, inside the layers
            layers.append(layers[-1])
    return layers
