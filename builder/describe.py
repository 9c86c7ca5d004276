"""Text report of plans: model, weights, buffers, and what every phase costs at least. Needs no GPU and no artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

LONG_CONTEXT = 32_768  # tokens a request; the second context that costs are shown for, where the engine has as many

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


def load_plans(artifact: str | Path) -> list[Plan]:
    """Plans of every rank of the artifact in directory `artifact`.

    Raises `EngineError` where it is incomplete or of another version. Digests are not checked: `build.py verify` does.
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
    """Kind -> (tensors, bytes on this rank), in `KIND_ORDER`. A weight that several phases read counts once."""
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


def kv_bytes_per_token(plan: Plan) -> dict[str, int]:
    """KV buffer -> bytes that one token takes on this rank: (C + P) x element x layers for the target's latents."""
    slot_axis = {"kv_pool": 1, "draft_kv": 2}
    return {
        name: plan.buffers[name].nbytes // plan.buffers[name].shape[axis]
        for name, axis in slot_axis.items()
        if name in plan.buffers
    }


def arena_args(phase: Phase) -> list[Arg]:
    """Every operand of `phase` that lives in the arena, with repetitions."""
    return [
        arg for step in phase.steps for arg in (*step.inputs, *step.outputs, step.workspace) if arg.kind == "arena"
    ]


def phase_arena_bytes(phase: Phase) -> int:
    """Bytes from the arena's start that `phase` uses."""
    ends = [arg.offset + (arg.spec.nbytes if arg.spec else 0) for arg in arena_args(phase)]
    return -(-max(ends, default=0) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


def contexts(plan: Plan) -> tuple[int, int]:
    """Committed tokens a request that costs are shown for: none, and `LONG_CONTEXT` or as many as the engine takes."""
    return 0, min(LONG_CONTEXT, plan.settings["limits"]["max_context"])


def describe(plans: Sequence[Plan], phase: str | None = None) -> str:
    """The report. `plans` are all ranks of one engine; `phase` (a key such as "verify[8]") adds its list of steps.

    Raises `BuildError` for a phase that the engine does not have.
    """
    plan = plans[0]
    if phase is not None and phase not in plan.phases:
        raise BuildError(f"--phase {phase}: expected one of {', '.join(plan.phases)}")
    sections = [_header(plans), _weights(plan), _buffers(plan)]
    if len(plans) > 1:
        sections.append(_ranks(plans))
    sections.append(_phases(plan))
    if phase is not None:
        sections.append(_steps(plan, phase))
    return "\n\n".join(sections)


def model_line(plan: Plan) -> str:
    """The model in one line, e.g. for a title."""
    model, draft = plan.settings["model"], plan.settings["draft"]
    text = f"{model['num_layers']} layers, hidden size {model['hidden_size']:,}, vocabulary {model['vocab_size']:,}"
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
    """Specs of operands, with what they are: a weight "w:", a buffer "b:", a value of the arena plain, "-" absent."""
    marks = {"weight": "w:", "buffer": "b:", "arena": ""}
    return " ".join("-" if arg.spec is None else f"{marks[arg.kind]}{arg.spec}" for arg in args)


def _header(plans: Sequence[Plan]) -> str:
    plan = plans[0]
    width = max(map(len, facts(plan)))
    return "\n".join(f"{title:{width}}  {text}" for title, text in facts(plan).items())


def _bytes_table(title: str, counts: str, kinds: dict[str, tuple[int, int]]) -> str:
    total = sum(nbytes for _, nbytes in kinds.values())
    rows = [
        (kind, f"{count:,}", f"{nbytes:,}", size(nbytes), f"{100 * nbytes / max(total, 1):.1f}")
        for kind, (count, nbytes) in kinds.items()
    ]
    rows.append(("total", f"{sum(count for count, _ in kinds.values()):,}", f"{total:,}", size(total), "100.0"))
    columns = [(title, "<"), (counts, ">"), ("bytes", ">"), ("", ">"), ("%", ">")]
    return table(columns, rows)


def _weights(plan: Plan) -> str:
    return _bytes_table("WEIGHTS a rank", "tensors", weight_bytes(plan))


def _buffers(plan: Plan) -> str:
    kinds = {**buffer_bytes(plan), "arena": (1, plan.arena_bytes)}
    return _bytes_table("MEMORY a rank, beside weights", "buffers", kinds)


def _ranks(plans: Sequence[Plan]) -> str:
    columns = [("RANK", ">"), ("weights", ">"), ("buffers", ">"), ("arena", ">"), ("total", ">")]
    rows = []
    for plan in plans:
        parts = [plan.weight_bytes(), plan.buffer_bytes(), plan.arena_bytes]
        rows.append((plan.rank, *(f"{part:,}" for part in (*parts, sum(parts)))))
    return table(columns, rows)


def _phases(plan: Plan) -> str:
    costs = [plan_costs(plan, context) for context in contexts(plan)]
    rows = []
    for key, phase in plan.phases.items():
        first, second = (cost[key].total for cost in costs)
        row = (key, len(phase.steps), phase_arena_bytes(phase), *_cost_cells(first, second, 1e6, 1e9, 1e3))
        rows.append((*row[:2], f"{row[2]:,}", *row[3:]))
    columns = [("PHASE", "<"), ("steps", ">"), ("arena B", ">"), *_cost_columns(plan, "MB", "GFLOP", "ms")]
    return f"{table(columns, rows)}\n{hardware_line(hardware_for(plan.arch))}"


def _steps(plan: Plan, key: str) -> str:
    hardware = hardware_for(plan.arch)
    at: list[PhaseCost] = [phase_cost(plan.phases[key], context, hardware) for context in contexts(plan)]
    rows = []
    for first, second in zip(at[0].steps, at[1].steps, strict=True):
        step = first.step
        cells = _cost_cells(first.cost, second.cost, 1e3, 1e6, 1e6)
        operands = f"{shapes(step.inputs)} -> {shapes(step.outputs) or '(in place)'}"
        rows.append((first.index, step.node, step.plugin, step.tactic, *cells, operands))
    columns = [
        *((key, ">"), ("node", "<"), ("plugin", "<"), ("tactic", "<")),
        *_cost_columns(plan, "kB", "MFLOP", "us"),
        ("operands", "<"),
    ]
    sums = [("plugin", "<"), ("steps", ">"), *_cost_columns(plan, "MB", "GFLOP", "ms")]
    plugins = [
        (name, cost.steps, *_cost_cells(cost, at[1].by_plugin()[name], 1e6, 1e9, 1e3))
        for name, cost in at[0].by_plugin().items()
    ]
    totals = (at[0].total, at[1].total)
    plugins.append(("total", totals[0].steps, *_cost_cells(*totals, 1e6, 1e9, 1e3)))
    return f"{table(columns, rows)}\n\n{table(sums, plugins)}"


def _cost_columns(plan: Plan, data: str, work: str, time: str) -> list[tuple[str, str]]:
    names: Callable[[str], list[str]] = lambda unit: [f"{unit} @{context:,}" for context in contexts(plan)]  # noqa: E731
    return [(name, ">") for unit in (data, work, time) for name in names(unit)] + [("bound", "<")]


def _cost_cells(first: Cost, second: Cost, data: float, work: float, time: float) -> list[str]:
    """Cells of `_cost_columns` for the costs at the two contexts, in multiples of `data`, `work` and 1 / `time`."""
    pairs = (
        (first.nbytes / data, second.nbytes / data, 1),
        (first.flops / work, second.flops / work, 2),
        (first.seconds * time, second.seconds * time, 3),
    )
    cells = [f"{value:,.{digits}f}" for low, high, digits in pairs for value in (low, high)]
    return [*cells, first.bound if first.bound == second.bound else f"{first.bound}, {second.bound}"]
