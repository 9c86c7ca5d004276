"""One HTML page that shows an engine: memory, phases, the arena, costs by layer. No outside assets, no
framework.
"""

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
    duration,
    facts,
    hardware_line,
    model_line,
    phase_arena_bytes,
    shapes,
    size,
    total_bytes,
    weight_bytes,
    work,
)
from builder.errors import BuildError
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
from builder.roofline import PhaseCost, StepCost, hardware_for, plan_costs
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
    """Write the page about `plans`, all ranks of one engine, to `path`. Figures are of rank 0.

    Raises `BuildError` where `path` cannot be written.
    """
    page = render(plans)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path}: cannot be written: {error.strerror}") from None


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
    tiles = {
        "weights of a rank": size(plan.weight_bytes()),
        "buffers, KV pool included": size(plan.buffer_bytes()),
        "arena": size(plan.arena_bytes),
    }
    for key in ("verify[1]", "verify[8]"):
        if key in costs:
            title = f"{key}, no context, at 100 % of the hardware"
            tiles[title] = duration(costs[key].total.seconds)
    boxes = [f'<div class="tile"><b>{text}</b><span>{escape(title)}</span></div>' for title, text in tiles.items()]
    listed = {title: text for title, text in facts(plan).items() if title != "model"}  # that is the headline
    listed["source of rates"] = hardware_for(plan.arch).source
    rows = [f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in listed.items()]
    subject = f"one of {plan.tp} ranks" if plan.tp > 1 else "its only rank"
    rates = escape(hardware_line(hardware_for(plan.arch))).replace(" %", "&nbsp;%")
    return (
        f"<h1>{escape(model_line(plan))}</h1><p>A compiled engine: what {subject} holds and runs. "
        f'Costs are {rates}, not measured.</p><div class="tiles">{"".join(boxes)}</div>'
        f'<div class="card"><dl>{"".join(rows)}</dl></div>'
    )


def _memory(plans: Sequence[Plan]) -> str:
    plan = plans[0]
    hardware, used = hardware_for(plan.arch), total_bytes(plan)
    kinds = {**weight_bytes(plan), **buffer_bytes(plan), "arena": (1, plan.arena_bytes)}
    # a small engine would be invisible on the scale of a large card
    to_scale = used > hardware.memory / 20
    capacity, label = (hardware.memory, f"{hardware.label} card") if to_scale else (used, "all of the engine")
    parts = [(MEMORY_CLASSES.get(kind, "c0"), kind, nbytes) for kind, (_, nbytes) in kinds.items()]
    large = [part for part in parts if part[2] >= KEPT_APART * capacity]
    small = sum(part[2] for part in parts if part[2] < KEPT_APART * capacity)
    bar = memory_bar([*large, ("c0", "small parts", small)], capacity, label)

    everything = [("", "total", used)]
    rows = []
    for css, kind, nbytes in sorted(parts, key=lambda part: -part[2]) + everything:
        count = kinds[kind][0] if css else sum(number for number, _ in kinds.values())
        shares = [f"{100 * nbytes / used:.2f}", f"{100 * nbytes / hardware.memory:.2f}"]
        name = f"{_swatch(css) if css else ''}{escape(kind)}"
        rows.append([name, f"{count:,}", f"{nbytes:,}", size(nbytes), *shares])
    titles = ["kind", "tensors", "bytes", "", "% of engine", f"% of {hardware.label} card"]
    note = f"The card has {size(hardware.memory)} for programs ({hardware.label} as sold)."
    if used > hardware.memory:
        note += f" <b>The engine is {size(used - hardware.memory)} too large for it.</b>"
    sums = sorted({total_bytes(other) for other in plans})
    if len(plans) > 1:
        ranks = "All ranks hold as much" if len(sums) == 1 else f"Ranks hold {size(sums[0])} to {size(sums[-1])}"
        note += f" {ranks}."
    return (
        f"<h2>Memory of a rank</h2><p>Weights by kind, then what is allocated once at load. {note}</p>"
        f'<div class="card">{bar}{_table(titles, rows, left=1, total=True)}</div>'
    )


def _phases(plan: Plan, at_low: dict[str, PhaseCost], at_high: dict[str, PhaseCost]) -> str:
    rows = []
    for key, phase in plan.phases.items():
        first, second = at_low[key].total, at_high[key].total
        row = [escape(key), f"{len(phase.steps):,}", size(phase_arena_bytes(phase))]
        row += [size(cost.nbytes) for cost in (first, second)]
        row += [work(cost.flops) for cost in (first, second)]
        row += [duration(cost.seconds) for cost in (first, second)]
        bound = first.bound if first.bound == second.bound else f"{first.bound}, {second.bound}"
        rows.append([*row, size(first.link_bytes), bound])
    titles = ["phase", "steps", "arena"]
    titles += [f"{what} @{context:,}" for what in ("moved", "computed", "time") for context in contexts(plan)]
    table = _table(
        [*titles, "over the link", "bound"],
        rows,
        left=1,
        attributes=[f' data-phase="{escape(key)}"' for key in plan.phases],
    )
    # apart, for a prefill takes many times as long
    prefills = {key: cost.by_plugin() for key, cost in at_low.items() if cost.phase.name == "prefill"}
    others = {key: cost.by_plugin() for key, cost in at_low.items() if key not in prefills}
    charts = [
        f"<h3>{title}</h3>{phase_bars(list(group.items()))}"
        for title, group in (("Decoding", others), ("Prefill", prefills))
        if group
    ]
    return (
        "<h2>Phases</h2><p>Least time of a pass by plugin, without context. A pass of T rows serves as many "
        f"requests as the engine takes, T at most; the columns @{contexts(plan)[1]:,} count that many "
        "committed tokens for each. Select a phase to see its steps below.</p>"
        f'<div class="card">{_key()}{"".join(charts)}</div><div class="card">{table}</div>'
    )


def _selector(plan: Plan) -> str:
    chosen = _default(plan)
    options = [
        f'<option value="{escape(key)}"{" selected" if key == chosen else ""}>{escape(key)}</option>'
        for key in plan.phases
    ]
    select = f'<select id="phase" aria-label="phase">{"".join(options)}</select>'
    return f'<div class="bar"><h2>Inside {select}</h2>{_key()}</div>'


def _phase(plan: Plan, key: str, low: PhaseCost, high: PhaseCost, names: Names) -> str:
    phase, values = plan.phases[key], lifetimes(plan.phases[key])
    layer, first, last = _typical(low)
    where = "the whole pass" if layer is None else f"layer {layer}"
    unshared = size(sum(value.nbytes for value in values))
    parts = [
        f'<b>{escape(key)}</b> <span class="soft">{len(phase.steps):,} steps, {len(values):,} values in '
        f"{size(phase_arena_bytes(phase))} of arena ({unshared} without reuse)</span>"
    ]
    if layer is not None:
        captions = ("MB moved, no context", f"\u00b5s with {high.context:,} tokens of context")
        charts = (layer_bars(low.steps, names, "bytes"), layer_bars(high.steps, names, "time"))
        columns = zip(captions, charts, strict=True)
        pair = [f'<div><span class="soft">{caption}</span>{chart}</div>' for caption, chart in columns]
        parts.append(f'<h3>Cost by layer</h3><div class="two">{"".join(pair)}</div>')
        arena = arena_map(values, 0, len(phase.steps) - 1, names, _layer_marks(low))
        parts.append("<h3>Arena over the whole pass</h3>")
        parts.append(f'<span class="soft">offset against step, marked where layers begin</span>{arena}')
    if values:
        steps = {index: phase.steps[index].plugin for index in range(first, last + 1)}
        parts.append(f"<h3>Arena in {where}</h3>{arena_map(values, first, last, names, steps)}")
    on = " on" if key == _default(plan) else ""
    return (
        f'<section class="phase{on}" data-key="{escape(key)}"><div class="card">{"".join(parts)}</div>'
        f'<div class="card"><h3>Steps of {where}</h3>{_steps(low, high, first, last)}</div></section>'
    )


def _steps(low: PhaseCost, high: PhaseCost, first: int, last: int) -> str:
    rows = []
    for one, two in zip(low.steps[first : last + 1], high.steps[first : last + 1], strict=True):
        step, cost = one.step, one.cost
        operands = f"{shapes(step.inputs)} \u2192 {shapes(step.outputs) or 'in place'}"
        plugin = f"{_swatch(plugin_class(step.plugin))}{escape(step.plugin)}"
        row = [str(one.index), plugin, escape(step.tactic), f"{cost.nbytes / 1e3:,.1f}"]
        row += [f"{cost.flops / 1e6:,.1f}", f"{cost.seconds * 1e6:,.2f}", f"{two.cost.seconds * 1e6:,.2f}"]
        rows.append([*row, cost.bound, f"<b>{escape(step.node)}</b><br>{escape(operands)}"])
    titles = ["step", "plugin", "tactic", "kB", "MFLOP", "\u00b5s @0", f"\u00b5s @{high.context:,}", "bound"]
    return _table([*titles, "node and operands (w: weight, b: buffer)"], rows, left=3, wrap=8)


def _tactics(plan: Plan) -> str:
    counts = Counter((step.plugin, step.tactic) for phase in plan.phases.values() for step in phase.steps)
    rows = [
        [f"{_swatch(plugin_class(plugin))}{escape(plugin)}", escape(tactic), f"{count:,}"]
        for (plugin, tactic), count in sorted(counts.items())
    ]
    table = _table(["plugin", "tactic", "steps in all phases"], rows, left=2)
    return f'<h2>Tactics</h2><div class="card">{table}</div>'


def _typical(cost: PhaseCost) -> tuple[int | None, int, int]:
    """The layer to show in detail, its first and its last step.

    It is the middle one of the layers with the most common sequence of plugins; None (and all steps) where
    the phase has no layers.
    """
    layers: dict[int, list[StepCost]] = {}
    for step in cost.steps:
        if not isinstance(step.layer, str):
            layers.setdefault(step.layer, []).append(step)
    if not layers:
        return None, 0, len(cost.steps) - 1
    kinds = {layer: tuple(step.step.plugin for step in steps) for layer, steps in layers.items()}
    common = Counter(kinds.values()).most_common(1)[0][0]
    alike = [layer for layer, kind in kinds.items() if kind == common]
    chosen = alike[len(alike) // 2]
    return chosen, layers[chosen][0].index, layers[chosen][-1].index


def _layer_marks(cost: PhaseCost) -> dict[int, str]:
    """Step at which a layer begins -> its number; every tenth where there are many."""
    starts: dict[int, int] = {}
    for step in cost.steps:
        if not isinstance(step.layer, str):
            starts.setdefault(step.layer, step.index)
    every = 10 if len(starts) > 16 else 1
    return {index: str(layer) for layer, index in starts.items() if layer % every == 0}


def _default(plan: Plan) -> str:
    return next((key for key in (*DEFAULT_PHASES, *plan.phases) if key in plan.phases), "")


def _swatch(css: str) -> str:
    mark = f'<rect class="{css}" width="10" height="10" rx="2"/>'
    return f'<svg viewBox="0 0 10 10" aria-hidden="true">{mark}</svg>'


def _key() -> str:
    groups = [*((plugin_class(plugins[0]), group) for group, plugins in GROUPS.items()), ("c0", "other")]
    items = [f"<span>{_swatch(css)}{escape(group)}</span>" for css, group in groups]
    return f'<div class="key">{"".join(items)}</div>'


def _table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    wrap: int = -1,
    total: bool = False,
    attributes: Sequence[str] = (),
) -> str:
    """Cells are HTML. The first `left` columns are aligned left, as is column `wrap`, which may break lines.

    total: the last row is set off. attributes: of every row's element, each with a space before it.
    """
    kinds = ["l wrap" if i == wrap else "l" if i < left else "" for i in range(len(titles))]
    css = [f' class="{kind}"' if kind else "" for kind in kinds]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(css, titles, strict=True))
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(css, row, strict=True))
        attribute = attributes[number] if attributes else ""
        last = ' class="sum"' if total and number == len(rows) - 1 else ""
        lines.append(f"<tr{last}{attribute}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
