"""Pictures of the HTML report as SVG text: memory bar, cost bars, arena map. Colours are classes of the
page's CSS.

Marks carry their tooltip as `data-t` (text) or, where there are thousands, as `data-v` (numbers, the first an
index into the names that `Names` collects), which the page's script spells out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from builder.describe import duration, size, work
from builder.roofline import Cost, StepCost
from plugins.core.plan import Phase

WIDTH = 1240  # user units of a figure over the whole page
CHARACTER = 6.6  # width of a character of a label inside a mark

# Operators that a colour stands for; all others are "other".
GROUPS = {
    "routed experts": ("int4_marlin_gemm",),
    "dense matrices": ("dense_gemm",),
    "attention": ("mla_attention", "draft_attention"),
    "attention inputs": ("mla_prepare", "draft_kv_append"),
    "router": ("moe_route",),
    "collectives": ("all_reduce", "all_gather"),
}
_CLASSES = {plugin: f"c{i}" for i, plugins in enumerate(GROUPS.values(), 1) for plugin in plugins}


def plugin_class(plugin: str) -> str:
    """CSS class of the colour of `plugin`."""
    return _CLASSES.get(plugin, "c0")


class Names:
    """Collects names and gives their index, so that thousands of marks can refer to them shortly."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.index.setdefault(name, len(self.index))


@dataclass(frozen=True)
class Lifetime:
    """A value in the arena: bytes, offset, first and last step (both included), and the plugin that writes
    it.
    """

    name: str
    plugin: str
    nbytes: int
    offset: int
    first: int
    last: int


def lifetimes(phase: Phase) -> list[Lifetime]:
    """Every value of the arena, in order of the step that writes it."""
    found: dict[str, Lifetime] = {}
    for index, step in enumerate(phase.steps):
        for arg in (*step.outputs, step.workspace, *step.inputs):
            if arg.kind != "arena" or arg.spec is None:
                continue
            known = found.get(arg.name)
            start = (known.plugin, known.first) if known else (step.plugin, index)
            found[arg.name] = Lifetime(arg.name, start[0], arg.spec.nbytes, arg.offset, start[1], index)
    return list(found.values())


def memory_bar(parts: Sequence[tuple[str, str, int]], capacity: int, label: str) -> str:
    """One horizontal bar of (class, name, bytes); `capacity` bytes are the whole width unless the parts need
    more.
    """
    used = sum(nbytes for _, _, nbytes in parts)
    whole = max(used, capacity)
    height, top = 64, 20
    svg = [_open(WIDTH, height + top + 22, f"{size(used)} of {size(capacity)}")]
    svg.append(f'<rect class="free" x="0" y="{top}" width="{WIDTH}" height="{height}" rx="3"/>')
    x = 0.0
    for css, name, nbytes in parts:
        width = WIDTH * nbytes / whole
        tip = f"{name}: {nbytes:,} bytes, {100 * nbytes / capacity:.2f} % of {label}"
        svg.append(_mark(css, x, top, max(width - 1, 0.4), height, f' data-t="{escape(tip)}"'))
        text = f"{name}  {size(nbytes)}"
        if width > CHARACTER * len(text) + 12:
            svg.append(_label(css, x + 8, top + height / 2 + 4, text))
        x += width
    free = whole - used
    if WIDTH * free / whole > 110:
        svg.append(f'<text x="{_n(x + 8)}" y="{top + height / 2 + 4:.0f}">free  {size(free)}</text>')
    edge = WIDTH * capacity / whole
    anchor = ' text-anchor="end"' if edge > WIDTH - 100 else ""
    svg.append(f'<path class="edge" d="M{_n(edge - 0.5)} {top - 6}v{height + 12}"/>')
    svg.append(f'<text x="{_n(edge)}" y="{top - 9}"{anchor}>{escape(label)}</text>')
    svg += _axis([(WIDTH * tick / whole, _tick(tick)) for tick in ticks(whole, 8)[1:-1]], top + height + 16)
    return "".join([*svg, "</svg>"])


def phase_bars(rows: Sequence[tuple[str, Mapping[str, Cost]]]) -> str:
    """A bar per (phase, plugin -> cost), stacked by plugin: time at 100 % of the hardware's rates."""
    left, step, bar, right = 92, 22, 14, 76
    most = max((sum(cost.seconds for cost in costs.values()) for _, costs in rows), default=0) or 1.0
    scale = (WIDTH - left - right) / most
    bottom = step * len(rows) + 4
    svg = [_open(WIDTH, bottom + 22, "Roofline time of every phase by plugin")]
    grid = ticks(most, 8)
    svg += [f'<path class="grid" d="M{_n(left + tick * scale)} 0v{bottom}"/>' for tick in grid]
    factor, unit = (1e3, "ms") if most >= 1e-3 else (1e6, "\u00b5s")
    svg += _axis([(left + tick * scale, f"{tick * factor:g} {unit}") for tick in grid], bottom + 16)
    for i, (key, costs) in enumerate(rows):
        y, x = i * step + 4, float(left)
        svg.append(f'<text x="{left - 10}" y="{y + 11}" text-anchor="end" class="strong">{escape(key)}</text>')
        for plugin, cost in _stacked(costs):
            width = cost.seconds * scale
            tip = f"{key}, {plugin}: {duration(cost.seconds)}, {size(cost.nbytes)}, {work(cost.flops)}"
            if width > 0.2:
                gap = 1 if width > 3 else 0
                svg.append(_mark(plugin_class(plugin), x, y, width - gap, bar, f' data-t="{escape(tip)}"'))
            x += width
        total = sum(cost.seconds for cost in costs.values())
        svg.append(f'<text x="{_n(x + 7)}" y="{y + 11}">{duration(total)}</text>')
    return "".join([*svg, "</svg>"])


def layer_bars(steps: Sequence[StepCost], names: Names, what: str) -> str:
    """A column per layer, stacked by plugin. `what`: "bytes" (MB of memory traffic) or "time" (us)."""
    left, top, height, width = 44, 8, 190, (WIDTH - 24) / 2
    columns: dict[int | str, dict[str, Cost]] = {}
    for step in steps:
        column = columns.setdefault(step.layer, {})
        plugin = step.step.plugin
        column[plugin] = column.get(plugin, Cost()) + step.cost

    def value(cost: Cost) -> float:
        return cost.nbytes / 1e6 if what == "bytes" else cost.seconds * 1e6

    most = max((sum(map(value, column.values())) for column in columns.values()), default=0) or 1.0
    scale = height / most
    svg = [_open(width, top + height + 24, f"Cost of every layer by plugin: {what}")]
    for tick in ticks(most, 5):
        y = top + height - tick * scale
        svg.append(f'<path class="grid" d="M{left} {_n(y)}H{_n(width)}"/>')
        svg.append(f'<text x="{left - 6}" y="{_n(y + 4)}" text-anchor="end">{tick:,g}</text>')
    pitch = (width - left) / max(len(columns), 1)
    bar = min(pitch * 0.78, 46)
    labels: list[tuple[float, str]] = []
    for i, (layer, column) in enumerate(columns.items()):
        x, y = left + pitch * i + (pitch - bar) / 2, float(top + height)
        for plugin, cost in _stacked(column):
            part = value(cost) * scale
            y -= part
            if part > 0.25:
                numbers = f"{names(plugin)} {names(str(layer))} {cost.nbytes} {cost.seconds * 1e6:.2f}"
                svg.append(
                    _mark(
                        plugin_class(plugin),
                        x,
                        y,
                        bar,
                        part - (0.6 if part > 3 else 0),
                        f' data-b="{numbers}"',
                    )
                )
        if not isinstance(layer, str) and (len(columns) <= 16 or layer % 10 == 0):
            labels.append((x + bar / 2, str(layer)))
    svg += _axis(labels, top + height + 18)
    return "".join([*svg, "</svg>"])


def arena_map(values: Sequence[Lifetime], first: int, last: int, names: Names, marks: Mapping[int, str]) -> str:
    """Steps `first` .. `last` from left to right, arena offsets upwards, a rectangle for the lifetime of a
    value.

    `marks`: step -> label below it (where a layer begins, or a step's plugin). Labels of rectangles are drawn
    where they fit.
    """
    left, top, height = 64, 8, 260
    shown = [value for value in values if value.last >= first and value.first <= last]
    most = max((value.offset + value.nbytes for value in shown), default=0) or 1
    pitch = (WIDTH - left) / max(last - first + 1, 1)
    scale = height / most
    svg = [_open(WIDTH, top + height + 38, f"Arena of steps {first} to {last}")]
    for tick in ticks(most, 5):
        y = top + height - tick * scale
        svg.append(f'<path class="grid" d="M{left} {_n(y)}H{WIDTH}"/>')
        svg.append(f'<text x="{left - 6}" y="{_n(y + 4)}" text-anchor="end">{_tick(tick)}</text>')
    base = top + height
    svg += [f'<path class="grid" d="M{_n(left + pitch * (at - first))} {top}V{base + 5}"/>' for at in marks]
    for value in shown:
        start, end = max(value.first, first), min(value.last, last)
        x, width = left + pitch * (start - first), pitch * (end - start + 1)
        tall = value.nbytes * scale
        y = base - (value.offset * scale) - tall
        gap = 1 if pitch > 8 else 0
        numbers = f"{names(value.name)} {value.nbytes} {value.offset} {value.first} {value.last}"
        box = (x, y, max(width - gap, 0.6), max(tall - (0.5 if tall > 2 else 0), 0.6))
        svg.append(_mark(plugin_class(value.plugin), *box, f' data-v="{numbers}"'))
        label = _short(value.name)
        if tall > 13 and width > CHARACTER * len(label) + 8:
            svg.append(_label(plugin_class(value.plugin), x + 4, y + tall / 2 + 4, label))
    offset = pitch / 2 if pitch > 30 else 0
    labels = [(left + pitch * (at - first) + offset, text) for at, text in marks.items()]
    if max(map(len, marks.values()), default=0) * CHARACTER + 4 > pitch > 30:  # too long to stand side by side
        svg += _axis(labels[::2], base + 18) + _axis(labels[1::2], base + 33)
    else:
        svg += _axis(labels, base + 20)
    return "".join([*svg, "</svg>"])


def ticks(most: float, count: int) -> list[float]:
    """About `count` round values from 0 to `most`."""
    if most <= 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def _stacked(costs: Mapping[str, Cost]) -> list[tuple[str, Cost]]:
    """In the order of the colours, "other" last, so that stacks of different phases and layers compare."""
    return sorted(costs.items(), key=lambda item: (plugin_class(item[0]).replace("c0", "c9"), item[0]))


def _short(name: str) -> str:
    """Last part of a value's name, with the number that tells it from others of its module."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _tick(nbytes: float) -> str:
    number, unit = size(nbytes).split(" ")
    return f"{float(number):g} {unit}"


def _label(css: str, x: float, y: float, text: str) -> str:
    return f'<text class="in on-{css}" x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'


def _open(width: float, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(label)}">'


def _axis(labels: Sequence[tuple[float, str]], y: float) -> list[str]:
    return [f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="middle">{escape(text)}</text>' for x, text in labels]


def _mark(css: str, x: float, y: float, width: float, height: float, data: str) -> str:
    return f'<path class="{css}" d="M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h-{_n(width)}z"{data}/>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
