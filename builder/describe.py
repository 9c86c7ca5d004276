"""Text report of plans: model, weights, buffers, and what every phase costs at least. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from builder.errors import BuildError
from builder.roofline import Cost, Hardware, PhaseCost, hardware_for, phase_cost, plan_costs
from plugins.core.container import decode_header, map_file, parse_json
from plugins.core.engine_file import (
    ENGINE_FORMAT,
    EngineError,
    check_files,
    engine_name,
    read_manifest,
    rebuild_command,
)
from plugins.core.plan import ARENA_ALIGNMENT, PLAN_VERSION, Arg, Phase, Plan, Weight

LONG_CONTEXT = 32_768  # tokens a request; the second context that costs are shown for

# Substrings of checkpoint names, tried in order, and what the weight is counted as.
WEIGHT_KINDS = (
    ("draft:", "drafter"),
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".self_attn.", "attention"),
    (".mlp.gate.", "router"),
    (".mlp.", "dense MLP"),
    ("embed_tokens", "vocabulary"),
    ("lm_head", "vocabulary"),
    ("norm", "norms"),
)
KIND_ORDER = (
    "routed experts",
    "attention",
    "shared experts",
    "dense MLP",
    "router",
    "norms",
    "vocabulary",
    "drafter",
    "other weights",
)
# Persistent buffers by name (up to the first dot); the rest is counted as "rows and requests".
BUFFER_KINDS = {"kv_pool": "KV pool", "draft_kv": "drafter KV", "logits": "logits", "taps": "taps"}
OTHER_BUFFERS = "rows and requests"

Units = tuple[tuple[str, float], tuple[str, float], tuple[str, float]]  # of memory traffic, arithmetic, time
COARSE: Units = (("MB", 1e6), ("GFLOP", 1e9), ("ms", 1e-3))
FINE: Units = (("kB", 1e3), ("MFLOP", 1e6), ("us", 1e-6))


def load_plans(artifact: str | Path) -> list[Plan]:
    """Plans of every rank of the artifact in directory `artifact`.

    Raises `EngineError` where it is incomplete or of another version. Digests are not checked: that is
    `build.py verify`.
    """
    base = Path(artifact)
    manifest = read_manifest(base)
    check_files(base, manifest)
    again = rebuild_command(base, manifest.tp, manifest.arch)
    plans = []
    for rank in range(manifest.tp):
        path = base / engine_name(rank)
        try:
            container = decode_header(map_file(path))
            if container.metadata.get("format") != ENGINE_FORMAT:
                raise ValueError(f"expected a file of format {ENGINE_FORMAT}")
            value = parse_json(container.metadata["plan"].encode())
            if value.get("version") != PLAN_VERSION:
                found = str(value.get("version"))[:40]
                raise ValueError(f"plan version: expected {PLAN_VERSION}, found {found}")
            plans.append(Plan.from_json(value))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{path}: plan cannot be read: {error}: rebuild with `{again}`") from None
    return plans


def weight_kind(weight: Weight) -> str:
    """What `weight` is counted as (a value of `KIND_ORDER`), by the checkpoint tensors it is made of."""
    source = weight.recipe.sources[0] if weight.recipe.sources else ""
    return next((kind for pattern, kind in WEIGHT_KINDS if pattern in source), KIND_ORDER[-1])


def weight_bytes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Kind -> (tensors, bytes on this rank), in `KIND_ORDER`. A weight counts once, whatever reads it."""
    sums = dict.fromkeys(KIND_ORDER, (0, 0))
    for weight in plan.weights.values():
        kind = weight_kind(weight)
        count, nbytes = sums[kind]
        sums[kind] = (count + 1, nbytes + weight.spec.nbytes)
    return {kind: pair for kind, pair in sums.items() if pair[0]}


def buffer_bytes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Kind -> (buffers, bytes on this rank), the KV pool first."""
    sums = dict.fromkeys((*BUFFER_KINDS.values(), OTHER_BUFFERS), (0, 0))
    for name, spec in plan.buffers.items():
        kind = BUFFER_KINDS.get(name.split(".")[0], OTHER_BUFFERS)
        count, nbytes = sums[kind]
        sums[kind] = (count + 1, nbytes + spec.nbytes)
    return {kind: pair for kind, pair in sums.items() if pair[0]}


def total_bytes(plan: Plan) -> int:
    """Weights, buffers and arena of this rank."""
    return plan.weight_bytes() + plan.buffer_bytes() + plan.arena_bytes


def kv_bytes_per_token(plan: Plan) -> dict[str, int]:
    """KV buffer -> bytes of one token on this rank; for the target's latents (C + P) x element x layers."""
    slot_axis = {"kv_pool": 1, "draft_kv": 2}
    return {
        name: plan.buffers[name].nbytes // plan.buffers[name].shape[axis]
        for name, axis in slot_axis.items()
        if name in plan.buffers
    }


def phase_arena_bytes(phase: Phase) -> int:
    """Bytes from the arena's start that `phase` uses."""
    args = [arg for step in phase.steps for arg in (*step.inputs, *step.outputs, step.workspace)]
    ends = [arg.offset + arg.spec.nbytes for arg in args if arg.kind == "arena" and arg.spec is not None]
    return -(-max(ends, default=0) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


def contexts(plan: Plan) -> tuple[int, int]:
    """The two numbers of committed tokens a request that costs are shown for."""
    return 0, min(LONG_CONTEXT, plan.settings["limits"]["max_context"])


def describe(plans: Sequence[Plan], phase: str | None = None) -> str:
    """The report on `plans`, all ranks of one engine; `phase`, e.g. "verify[8]", adds the list of its steps.

    Raises `BuildError` for a phase that the engine does not have.
    """
    plan = plans[0]
    if phase is not None and phase not in plan.phases:
        raise BuildError(f"--phase {phase}: expected one of {', '.join(plan.phases)}")
    weights = _bytes_table("WEIGHTS a rank", "tensors", weight_bytes(plan))
    sections = [_header(plan), weights, _buffers(plan), _ranks(plans), _phases(plan)]
    if phase is not None:
        sections.append(_steps(plan, phase))
    return "\n\n".join(sections)


def model_line(plan: Plan) -> str:
    """The model in one line, e.g. for a title."""
    model, draft = plan.settings["model"], plan.settings["draft"]
    text = f"{model['num_layers']} layers, hidden size {model['hidden_size']:,}"
    text += f", vocabulary {model['vocab_size']:,}"
    if draft is None:
        return f"{text}; no drafter"
    return f"{text}; drafter with blocks of {draft['block_size']} on {draft['num_taps']} taps"


def facts(plan: Plan) -> dict[str, str]:
    """Title -> text of the facts that head every report."""
    limits = plan.settings["limits"]
    per_token = [f"{nbytes:,} B ({name})" for name, nbytes in kv_bytes_per_token(plan).items()]
    kv_tokens = (limits["kv_pages"] - 1) * limits["page_size"]
    kv_dtype = plan.buffers["kv_pool"].dtype
    drafted = f"draft depth {limits['draft_depth']}, {limits['tree_top_k']} candidates a depth"
    return {
        "model": model_line(plan),
        "engine": f"tp {plan.tp}, arch {plan.arch}, {plan.activation_dtype} activations, {kv_dtype} KV",
        "limits": f"{limits['max_requests']} requests, {limits['max_context']:,} tokens each, "
        f"prefill {limits['prefill_chunk']:,} tokens a pass, verify up to {limits['max_rows']} rows",
        "tree": drafted if limits["draft_depth"] else "none (no drafter)",
        "KV pool": f"{kv_tokens:,} tokens in pages of {limits['page_size']}",
        "KV a token": " + ".join(per_token),
    }


def hardware_line(hardware: Hardware) -> str:
    """What costs are computed for, with every rate."""
    return (
        f"computed for {hardware.arch} ({hardware.name}) at 100 % of {hardware.bandwidth / 1e12:.3f} TB/s, "
        f"{hardware.flops / 1e12:.1f} TFLOP/s and {hardware.link / 1e9:.0f} GB/s a link"
    )


def size(nbytes: float) -> str:
    """Bytes in decimal units, e.g. "75.90 GB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def work(flops: float) -> str:
    """Floating point operations, e.g. "9.84 GFLOP"."""
    for factor, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if flops >= factor:
            return f"{flops / factor:.2f} {unit}"
    return f"{flops:.0f} FLOP"


def duration(seconds: float) -> str:
    """Seconds as milliseconds, or microseconds below 0.1 ms, e.g. "3.43 ms"."""
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} \u00b5s"


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned plain text. A column is (title, "<" or ">"); values are shown as `str` gives them."""
    texts = [[title for title, _ in columns], *([str(value) for value in row] for row in rows)]
    widths = [max(len(text[i]) for text in texts) for i in range(len(columns))]
    aligns = [align for _, align in columns]
    lines = [
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(text, aligns, widths, strict=True)).rstrip()
        for text in texts
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def shapes(args: Sequence[Arg]) -> str:
    """Specs of operands: "w:" marks that of a weight, "b:" that of a buffer, "-" an absent operand."""
    marks = {"weight": "w:", "buffer": "b:", "arena": ""}
    return " ".join("-" if arg.spec is None else f"{marks[arg.kind]}{arg.spec}" for arg in args)


def _header(plan: Plan) -> str:
    width = max(map(len, facts(plan)))
    return "\n".join(f"{title:{width}}  {text}" for title, text in facts(plan).items())


def _bytes_table(title: str, counted: str, kinds: dict[str, tuple[int, int]]) -> str:
    count, total = (sum(pair[i] for pair in kinds.values()) for i in range(2))
    rows = [
        (kind, f"{number:,}", f"{nbytes:,}", size(nbytes), f"{100 * nbytes / max(total, 1):.1f}")
        for kind, (number, nbytes) in [*kinds.items(), ("total", (count, total))]
    ]
    return table([(title, "<"), (counted, ">"), ("bytes", ">"), ("", ">"), ("%", ">")], rows)


def _buffers(plan: Plan) -> str:
    kinds = {**buffer_bytes(plan), "arena": (1, plan.arena_bytes)}
    return _bytes_table("MEMORY a rank, beside weights", "buffers", kinds)


def _ranks(plans: Sequence[Plan]) -> str:
    columns = [("RANK", ">"), ("weights", ">"), ("buffers", ">"), ("arena", ">"), ("total", ">")]
    rows = []
    for plan in plans:
        parts = [plan.weight_bytes(), plan.buffer_bytes(), plan.arena_bytes, total_bytes(plan)]
        rows.append((plan.rank, *(f"{part:,}" for part in parts)))
    hardware, most = hardware_for(plans[0].arch), max(map(total_bytes, plans))
    fits = "a rank fits" if most <= hardware.memory else f"A RANK IS {size(most - hardware.memory)} TOO LARGE"
    card = f"{hardware.name}, {hardware.label}, {size(hardware.memory)} for programs"
    return f"{table(columns, rows)}\n{fits}: {size(most)} on {card}"


def _phases(plan: Plan) -> str:
    low, high = (plan_costs(plan, context) for context in contexts(plan))
    units = _units(high.values())
    columns = [("PHASE", "<"), ("steps", ">"), ("arena bytes", ">"), *_cost_columns(plan, units)]
    rows = []
    for key, phase in plan.phases.items():
        cells = _cost_cells(low[key].total, high[key].total, units)
        rows.append((key, len(phase.steps), f"{phase_arena_bytes(phase):,}", *cells))
    shared = "@N: N committed tokens for each request that the rows of a pass can serve"
    return f"{table(columns, rows)}\n{hardware_line(hardware_for(plan.arch))}\n{shared}"


def _steps(plan: Plan, key: str) -> str:
    hardware = hardware_for(plan.arch)
    low, high = (phase_cost(plan.phases[key], context, hardware) for context in contexts(plan))
    rows = []
    for first, second in zip(low.steps, high.steps, strict=True):
        step = first.step
        operands = f"{shapes(step.inputs)} -> {shapes(step.outputs) or '(in place)'}"
        cells = _cost_cells(first.cost, second.cost, FINE)
        rows.append((first.index, step.node, step.plugin, step.tactic, *cells, operands))
    names = [(key, ">"), ("node", "<"), ("plugin", "<"), ("tactic", "<")]
    steps = table([*names, *_cost_columns(plan, FINE), ("operands (w: weight, b: buffer)", "<")], rows)
    longer = high.by_plugin()
    pairs = {name: (cost, longer[name]) for name, cost in low.by_plugin().items()}
    pairs["total"] = (low.total, high.total)
    units = _units([high])
    sums = [(name, first.steps, *_cost_cells(first, second, units)) for name, (first, second) in pairs.items()]
    return f"{steps}\n\n{table([(key, '<'), ('steps', '>'), *_cost_columns(plan, units)], sums)}"


def _units(costs: Iterable[PhaseCost]) -> Units:
    """The units in which the phases of an engine of that size have readable numbers."""
    return COARSE if max((cost.total.seconds for cost in costs), default=0) >= 1e-3 else FINE


def _cost_columns(plan: Plan, units: Units) -> list[tuple[str, str]]:
    titles = [f"{unit} @{context:,}" for unit, _ in units for context in contexts(plan)]
    return [*((title, ">") for title in titles), ("bound", "<")]


def _cost_cells(first: Cost, second: Cost, units: Units) -> list[str]:
    """Cells of `_cost_columns` for the costs at the two contexts."""
    pairs = ((first.nbytes, second.nbytes), (first.flops, second.flops), (first.seconds, second.seconds))
    cells = []
    for digits, (pair, (_, unit)) in enumerate(zip(pairs, units, strict=True), 1):
        cells += [f"{value / unit:,.{digits}f}" for value in pair]
    return [*cells, first.bound if first.bound == second.bound else f"{first.bound}, {second.bound}"]
