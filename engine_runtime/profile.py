"""`python -m engine_runtime bench --profile PHASE`: where a pass spends its time, by operator and by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_runtime.executor import Executor
from engine_runtime.step_costs import fill, idle
from plugins.core.plan import Step
from plugins.core.plugin import get_plugin
from plugins.core.state import Limits

_LAYER = re.compile(r"layers\.(\d+)\.")
_COLOURS = (
    "#1f6feb",
    "#cf222e",
    "#1a7f37",
    "#bf8700",
    "#8250df",
    "#fd8c73",
    "#218bff",
    "#6e7781",
    "#4ac26b",
    "#a475f9",
)
_OTHER = "#d0d7de"


class Profiled(Executor, Protocol):
    """An executor that can time its steps."""

    def profile(self, phase: str) -> list[tuple[str, str, float]]:
        """Run `phase` with a time stamp after each step: (node, plugin, seconds) of every step."""
        ...


@dataclass(frozen=True)
class StepTime:
    """One step: seconds, and the bytes and FLOP that its operator says it moves and computes."""

    name: str  # the operator, with its stage or form
    layer: int | None
    seconds: float
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Total:
    """Sum of steps."""

    steps: int
    seconds: float
    nbytes: int
    flops: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """FLOP a second."""
        return self.flops / self.seconds if self.seconds else 0.0


def profile(executor: Profiled, phase: str, context: int) -> list[StepTime]:
    """Times of the steps of a verify pass over as many rows as it has, after `context` tokens.

    Only while no request runs: the rows and the KV are made up. Routed experts are counted as if routing was uniform.
    Raises ValueError for a phase that is no verify pass of the engine, and for a context that leaves no room.
    """
    limits = Limits(**executor.plan.settings["limits"])
    known = {f"verify[{rows}]": rows for rows in executor.plan.buckets("verify")}
    if phase not in known:
        raise ValueError(f"--profile {phase}: expected one of {', '.join(known)}")
    if not 0 <= context < limits.max_context:
        raise ValueError(f"--context {context}: expected 0 to {limits.max_context - 1}")
    fill(executor, limits, known[phase], context)
    times = executor.profile(phase)
    idle(executor)
    return [
        _step_time(step, t, context) for step, (_, _, t) in zip(executor.plan.phases[phase].steps, times, strict=True)
    ]


def _step_time(step: Step, seconds: float, context: int) -> StepTime:
    kind = step.attrs.get("stage") or step.attrs.get("form")
    names = [step.node, *(arg.name for arg in step.inputs if arg.kind == "weight")]
    layers = [match for match in map(_LAYER.search, names) if match]
    inputs = [arg.spec for arg in step.inputs]
    outputs = [arg.spec for arg in step.outputs if arg.spec is not None]
    nbytes, flops = get_plugin(step.plugin).cost(step.attrs, inputs, outputs, context)
    layer = int(layers[0][1]) if layers else None
    return StepTime(f"{step.plugin} {kind}" if kind else step.plugin, layer, seconds, nbytes, flops)


def totals(steps: Sequence[StepTime], key: Callable[[StepTime], str]) -> dict[str, Total]:
    """Sums by `key`, in order of first appearance."""
    groups: dict[str, list[StepTime]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return {
        name: Total(len(some), sum(s.seconds for s in some), sum(s.nbytes for s in some), sum(s.flops for s in some))
        for name, some in groups.items()
    }


def table(title: str, groups: dict[str, Total]) -> str:
    """Plain text, a line for each group and one for all."""
    whole = Total(*(sum(getattr(t, name) for t in groups.values()) for name in ("steps", "seconds", "nbytes", "flops")))
    lines = [f"{title:<28} {'steps':>6} {'us':>10} {'%':>6} {'MB':>10} {'GB/s':>8} {'GFLOP':>9} {'TFLOP/s':>8}"]
    for name, total in [*groups.items(), ("all", whole)]:
        share = 100 * total.seconds / (whole.seconds or 1.0)
        lines.append(
            f"{name:<28} {total.steps:>6} {1e6 * total.seconds:>10.1f} {share:>6.1f} {total.nbytes / 1e6:>10.2f} "
            f"{total.bandwidth / 1e9:>8.1f} {total.flops / 1e9:>9.3f} {total.rate / 1e12:>8.2f}"
        )
    return "\n".join(lines)


def report(phase: str, context: int, steps: Sequence[StepTime]) -> str:
    """Both tables. Stamps between steps keep kernels from overlapping, so the sums are more than a pass takes."""
    by_name = totals(steps, lambda step: step.name)
    slowest = dict(sorted(by_name.items(), key=lambda item: -item[1].seconds))
    by_layer = totals(steps, layer_of)
    return f"{table(f'{phase} @{context:,}', slowest)}\n\n{table('layer', by_layer)}"


def layer_of(step: StepTime) -> str:
    return "-" if step.layer is None else str(step.layer)


def picture(phase: str, context: int, steps: Sequence[StepTime]) -> str:
    """An SVG document: a column for each layer, its height the time, its parts the operators."""
    layers = list(totals(steps, layer_of))
    names = sorted(totals(steps, lambda s: s.name).items(), key=lambda item: -item[1].seconds)
    colour = dict(zip((name for name, _ in names), _COLOURS, strict=False))
    most = max(total.seconds for total in totals(steps, layer_of).values()) or 1.0
    left, top, height, width = 60, 40, 260, max(12, min(60, 900 // len(layers)))
    right = left + width * len(layers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 240} {top + height + 40}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{right + 240}" height="{top + height + 40}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="13">{phase} at {context:,} tokens: microseconds by layer</text>',
        f'<text x="{left - 8}" y="{top + 10}" text-anchor="end">{1e6 * most:.0f}</text>',
        f'<text x="{left - 8}" y="{top + height}" text-anchor="end">0</text>',
        f'<path d="M{left} {top + height}H{right}" stroke="#d0d7de"/>',
    ]
    for column, layer in enumerate(layers):
        base = float(top + height)
        inside = totals([step for step in steps if layer_of(step) == layer], lambda step: step.name)
        for name, total in inside.items():
            size = height * total.seconds / most
            base -= size
            place = f'x="{left + width * column + 1}" y="{base:.2f}" width="{width - 2}" height="{size:.2f}"'
            text = f"layer {layer}, {name}: {1e6 * total.seconds:.1f} us"
            parts.append(f'<rect {place} fill="{colour.get(name, _OTHER)}"><title>{text}</title></rect>')
        if column % max(1, len(layers) // 12) == 0:
            at = f'x="{left + width * (column + 0.5)}" y="{top + height + 18}"'
            parts.append(f'<text {at} text-anchor="middle">{layer}</text>')
    for row, (name, total) in enumerate(names[: len(_COLOURS)]):
        y = top + 10 + 18 * row
        parts.append(f'<rect x="{right + 16}" y="{y - 10}" width="12" height="12" fill="{colour[name]}"/>')
        parts.append(f'<text x="{right + 34}" y="{y}">{name}: {1e3 * total.seconds:.3f} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
