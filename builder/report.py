"""One HTML page that shows an engine: memory, phases, the arena, costs by layer. No outside assets, no framework."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from builder.describe import (
    buffer_bytes,
    contexts,
    facts,
    hardware_line,
    model_line,
    phase_arena_bytes,
    shapes,
    size,
    weight_bytes,
)
from builder.report_figures import (
    GROUPS,
    Names,
    arena_map,
    layer_bars,
    lifetimes,
    memory_bar,
    phase_bars,
    plugin_class,
)
from builder.roofline import PhaseCost, hardware_for, plan_costs
from plugins.core.plan import Plan

TEMPLATE = Path(__file__).with_name("report_template.html")
DEFAULT_PHASES = ("verify[8]", "verify[4]", "verify[1]")  # shown first, where the engine has one of them
# Colours of the memory bar, those of the operators that read the weights.
MEMORY_CLASSES = {
    "routed experts": "c1",
    "attention": "c3",
    "shared experts": "c2",
    "dense MLP": "c0",
    "router": "c5",
    "norms": "c0",
    "vocabulary": "c6",
    "drafter": "c7",
    "KV pool": "c4",
    "drafter KV": "c7",
    "arena": "c8",
}
KEPT_APART = 0.004  # smaller parts of the memory bar are drawn as one; the table below it has all of them


def write_html(plans: Sequence[Plan], path: str | Path) -> None:
    """Write the page about `plans`, all ranks of one engine, to `path`. Figures are of rank 0."""
    Path(path).write_text(render(plans), encoding="utf-8")


def render(plans: Sequence[Plan]) -> str:
    """The page as text; every name in it is escaped."""
    plan, names = plans[0], Names()
    low, high = contexts(plan)
    at_low, at_high = plan_costs(plan, low), plan_costs(plan, high)
    body = [
        _header(plan, at_low),
        _memory(plans),
        _phases(plan, at_low, at_high),
        _selector(plan),
        *(_phase(plan, key, at_low[key], at_high[key], names) for key in plan.phases),
        _tactics(plan),
    ]
    # "<" is escaped, lest a name end the script element
    listed = json.dumps(list(names.index), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(model_line(plan)), body="\n".join(body), names=listed)


def _header(plan: Plan, costs: dict[str, PhaseCost]) -> str:
    tiles = [(size(plan.weight_bytes()), "weights of a rank"), (size(plan.buffer_bytes()), "buffers, KV pool included")]
    tiles.append((size(plan.arena_bytes), "arena"))
    for key in ("verify[1]", "verify[8]"):
        if key in costs:
            milliseconds = costs[key].total.seconds * 1e3
            tiles.append((f"{milliseconds:.2f} ms", f"{key}, no context, at 100 % of the hardware"))
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts(plan).items())
    boxes = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(of)}</span></div>' for value, of in tiles)
    return (
        f"<h1>{escape(model_line(plan))}</h1><p>Compiled engine: what one of {plan.tp} rank(s) holds and runs. Costs are "
        f'{escape(hardware_line(hardware_for(plan.arch)))}, not measured.</p><div class="tiles">{boxes}</div>'
        f'<div class="card"><dl>{rows}<dt>source of rates</dt><dd>{escape(hardware_for(plan.arch).source)}</dd>'
        "</dl></div>"
    )


def _memory(plans: Sequence[Plan]) -> str:
    plan = plans[0]
    hardware = hardware_for(plan.arch)
    kinds = {**weight_bytes(plan), **buffer_bytes(plan), "arena": (1, plan.arena_bytes)}
    used = sum(nbytes for _, nbytes in kinds.values())
    # a small engine would be invisible on the scale of a large card
    to_scale = used > hardware.memory / 20
    capacity, label = (hardware.memory, f"{hardware.label} card") if to_scale else (used, "all of the engine")
    parts = [(MEMORY_CLASSES.get(kind, "c0"), kind, nbytes) for kind, (_, nbytes) in kinds.items()]
    large = [part for part in parts if part[2] >= KEPT_APART * capacity]
    small = sum(part[2] for part in parts if part[2] < KEPT_APART * capacity)
    rows = []
    for css, kind, nbytes in sorted(parts, key=lambda part: -part[2]):
        shares = (f"{100 * nbytes / used:.2f}", f"{100 * nbytes / hardware.memory:.2f}")
        rows.append([f"{_swatch(css)}{escape(kind)}", f"{kinds[kind][0]:,}", f"{nbytes:,}", size(nbytes), *shares])
    total = [f"{100 * used / hardware.memory:.2f}"]
    rows.append(["total", f"{sum(count for count, _ in kinds.values()):,}", f"{used:,}", size(used), "100.00", *total])
    titles = ["kind", "tensors", "bytes", "", "% of engine", f"% of {hardware.label} card"]
    note = f"The card has {size(hardware.memory)} for programs ({hardware.label} as sold)."
    if used > hardware.memory:
        note += f" <b>The engine is {size(used - hardware.memory)} too large for it.</b>"
    sums = {p.weight_bytes() + p.buffer_bytes() + p.arena_bytes for p in plans}
    alike = "All ranks hold the same number of bytes." if len(sums) == 1 else f"Ranks hold {size(min(sums))} to {size(max(sums))}."
    bar = memory_bar([*large, ("c0", "small parts", small)], capacity, label)
    return (
        f"<h2>Memory of a rank</h2><p>Weights by kind, then what the runtime allocates once at load. {note} {alike}</p>"
        f'<div class="card">{bar}{_table(titles, rows, left=1, total=True)}</div>'
    )


def _phases(plan: Plan, at_low: dict[str, PhaseCost], at_high: dict[str, PhaseCost]) -> str:
    low, high = contexts(plan)
    rows, attributes = [], []
    for key, phase in plan.phases.items():
        first, second = at_low[key].total, at_high[key].total
        cells = [escape(key), f"{len(phase.steps):,}", size(phase_arena_bytes(phase))]
        cells += [size(first.nbytes), size(second.nbytes), f"{first.flops / 1e9:,.1f}", f"{second.flops / 1e9:,.1f}"]
        cells += [f"{first.seconds * 1e3:,.3f}", f"{second.seconds * 1e3:,.3f}", f"{size(first.link_bytes)}"]
        bound = first.bound if first.bound == second.bound else f"{first.bound}, {second.bound}"
        rows.append([*cells, bound])
        attributes.append(f' data-phase="{escape(key)}"')
    titles = ["phase", "steps", "arena"]
    titles += [f"{what} @{context:,}" for what in ("moved", "GFLOP", "ms") for context in (low, high)]
    titles += ["over the link", "bound"]
    bars = phase_bars([(key, cost.by_plugin()) for key, cost in at_low.items()])
    return (
        "<h2>Phases</h2><p>Least time of a pass by plugin, without context. A pass of T rows serves as many requests as "
        f"the engine takes, T at most; the columns @{high:,} count that many committed tokens for each. "
        "Select a phase to see its steps below.</p>"
        f'<div class="card">{_key()}{bars}</div>'
        f'<div class="card">{_table(titles, rows, left=1, attributes=attributes)}</div>'
    )


def _selector(plan: Plan) -> str:
    chosen = _default(plan)
    options = "".join(
        f'<option value="{escape(key)}"{" selected" if key == chosen else ""}>{escape(key)}</option>'
        for key in plan.phases
    )
    return f'<div class="bar"><h2>Inside <select id="phase" aria-label="phase">{options}</select></h2>{_key()}</div>'


def _phase(plan: Plan, key: str, low: PhaseCost, high: PhaseCost, names: Names) -> str:
    phase, (_, context) = plan.phases[key], contexts(plan)
    values = lifetimes(phase)
    end = max(len(phase.steps) - 1, 0)
    layer, first, last = _typical(low)
    starts: dict[int, str] = {}
    for step in low.steps:
        if step.layer not in starts.values() and not isinstance(step.layer, str):
            starts.setdefault(step.index, str(step.layer))
    if len(starts) > 16:
        starts = {index: text for index, text in starts.items() if int(text) % 10 == 0}
    steps = {index: phase.steps[index].plugin for index in range(first, last + 1)} if phase.steps else {}
    rows = []
    for one, two in zip(low.steps[first : last + 1], high.steps[first : last + 1], strict=True):
        step = one.step
        operands = f"{shapes(step.inputs)} \u2192 {shapes(step.outputs) or 'in place'}"
        cells = [str(one.index), f"{_swatch(plugin_class(step.plugin))}{escape(step.plugin)}", escape(step.tactic)]
        cells += [f"{one.cost.nbytes / 1e3:,.1f}", f"{one.cost.flops / 1e6:,.1f}", f"{one.cost.seconds * 1e6:,.2f}"]
        rows.append([*cells, f"{two.cost.seconds * 1e6:,.2f}", one.cost.bound, escape(operands), escape(step.node)])
    titles = ["step", "plugin", "tactic", "kB", "MFLOP", "\u00b5s @0", f"\u00b5s @{context:,}", "bound"]
    titles += ["operands (w: weight, b: buffer)", "node"]
    table = _table(titles, rows, left=3, wrap=(8, 9))
    where = f"layer {layer}" if not isinstance(layer, str) else "the whole pass"
    on = " on" if key == _default(plan) else ""
    by_layer = (
        '<h3>Cost by layer</h3><div class="two"><div><span class="soft">MB moved, no context</span>'
        f'{layer_bars(low.steps, names, "bytes")}</div><div><span class="soft">\u00b5s with {context:,} tokens of '
        f'context</span>{layer_bars(high.steps, names, "time")}</div></div>'
    )
    return (
        f'<section class="phase{on}" data-key="{escape(key)}"><div class="card"><b>{escape(key)}</b> '
        f'<span class="soft">{len(phase.steps):,} steps, {len(values):,} values in '
        f"{size(phase_arena_bytes(phase))} of arena ({size(sum(value.nbytes for value in values))} without reuse)</span>"
        f'{by_layer}<h3>Arena over the whole pass</h3><span class="soft">offset against step, marked where layers '
        f"begin</span>{arena_map(values, 0, end, names, starts)}<h3>Arena in {escape(where)}</h3>"
        f"{arena_map(values, first, last, names, steps)}</div>"
        f'<div class="card"><h3>Steps of {escape(where)}</h3>{table}</div></section>'
    )


def _tactics(plan: Plan) -> str:
    counts = Counter((step.plugin, step.tactic) for phase in plan.phases.values() for step in phase.steps)
    rows = [
        [f"{_swatch(plugin_class(plugin))}{escape(plugin)}", escape(tactic), f"{count:,}"]
        for (plugin, tactic), count in sorted(counts.items())
    ]
    table = _table(["plugin", "tactic", "steps in all phases"], rows, left=2)
    return f'<h2>Tactics</h2><div class="card">{table}</div>'


def _typical(cost: PhaseCost) -> tuple[int | str, int, int]:
    """The layer to show in detail: the middle one of those with the most common sequence of plugins, and its first and
    last step. All steps, as layer "", where the phase has no layers."""
    plugins: dict[int | str, tuple[str, ...]] = {}
    for step in cost.steps:
        if not isinstance(step.layer, str):
            plugins[step.layer] = (*plugins.get(step.layer, ()), step.step.plugin)
    if not plugins:
        return "", 0, max(len(cost.steps) - 1, 0)
    common = Counter(plugins.values()).most_common(1)[0][0]
    alike = [layer for layer, sequence in plugins.items() if sequence == common]
    chosen = alike[len(alike) // 2]
    indices = [step.index for step in cost.steps if step.layer == chosen]
    return chosen, indices[0], indices[-1]


def _default(plan: Plan) -> str:
    return next((key for key in (*DEFAULT_PHASES, *plan.phases) if key in plan.phases), "")


def _swatch(css: str) -> str:
    return f'<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{css}" width="10" height="10" rx="2"/></svg>'


def _key() -> str:
    items = [(plugin_class(plugins[0]), group) for group, plugins in GROUPS.items()] + [("c0", "other")]
    return f'<div class="key">{"".join(f"<span>{_swatch(css)}{escape(group)}</span>" for css, group in items)}</div>'


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    wrap: Sequence[int] = (),
    total: bool = False,
    attributes: Sequence[str] = (),
) -> str:
    """Cells are HTML. The first `left` columns and those of `wrap` are aligned left; `total` sets off the last row."""

    def css(i: int) -> str:
        return ' class="l wrap"' if i in wrap else ' class="l"' if i < left else ""

    head = "".join(f"<th{css(i).replace(' wrap', '')}>{escape(title)}</th>" for i, title in enumerate(titles))
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{css(i)}>{cell}</td>" for i, cell in enumerate(row))
        attribute = attributes[number] if attributes else ""
        last = ' class="sum"' if total and number == len(rows) - 1 else ""
        lines.append(f"<tr{last}{attribute}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
