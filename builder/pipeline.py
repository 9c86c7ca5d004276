"""Checkpoint -> passes -> ONNX -> rank graphs -> plans: everything of a build but the weight bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import onnx

from builder.config import DraftConfig, ModelConfig
from builder.export import export, with_rows
from builder.fuse import fuse
from builder.graph import WEIGHT, Graph, from_onnx, to_onnx
from builder.model.draft import Draft
from builder.model.ops import register
from builder.model.passes import Append, DraftPass, Pass, Prefill, Root, Verify
from builder.model.state import engine_buffers
from builder.model.target import Target
from builder.model.weights import recipes_of
from builder.options import BuildOptions
from builder.planner import plan_phase
from builder.shard import shard
from plugins.core.packing import WeightRecipe
from plugins.core.plan import Plan, Weight
from plugins.core.state import Limits

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExportedPass:
    """One pass as ONNX: `name` and `bucket` are those of the plan's phase."""

    name: str
    bucket: int
    model: onnx.ModelProto


def export_passes(
    config: ModelConfig,
    draft: DraftConfig | None,
    options: BuildOptions,
    router_dtype: str = "bfloat16",
    progress: Progress = lambda message: None,
) -> tuple[list[ExportedPass], dict[str, WeightRecipe]]:
    """Unsharded ONNX graphs of every pass, and the recipe of every weight they name."""
    register()
    limits = options.limits(config, draft)
    buffers = engine_buffers(config, draft, limits, options.activations, options.kv, tp=1)
    taps = draft.target_layer_ids if draft is not None else ()
    target = Target(config, tuple(taps), options.mla_norm_eps, router_dtype, options.activations)
    drafter = Draft(draft, options.amplitude(draft)) if draft is not None else None

    chunks = _prefill_buckets(limits.prefill_chunk)
    blocks = _powers_of_two(limits.max_requests)

    # name, buckets, and the pass for one bucket; the other buckets of a family follow from its first
    families: list[tuple[str, list[int], Callable[[int], Pass]]] = []
    for rows in chunks:  # a family each: short chunks take another form of MLA
        families.append(("prefill", [rows], lambda rows: Prefill(target, buffers, limits, rows)))
    families.append(("root", [limits.max_requests], lambda _: Root(buffers, limits)))
    families.append(("verify", list(options.verify_buckets), lambda rows: Verify(target, buffers, limits, rows)))
    if drafter is not None:
        appended = sorted({*(count * limits.path_length for count in blocks), *chunks})
        families.append(("append", appended, lambda rows: Append(drafter, buffers, limits, rows)))
        families.append(("draft", blocks, lambda count: DraftPass(target, drafter, buffers, limits, count)))

    passes, recipes = [], {}
    for name, buckets, make in families:
        traced: Graph | None = None
        for bucket in buckets:
            progress(f"export {name}[{bucket}]")
            module = make(bucket)
            if traced is None:
                graph = traced = export(module, f"{name}[{bucket}]")
                recipes.update(recipes_of(module))
            else:
                graph = with_rows(traced, f"{name}[{bucket}]", module.state.rows)
            passes.append(ExportedPass(name, bucket, to_onnx(graph)))
    return passes, recipes


def plan_rank(
    passes: list[tuple[str, int, Graph]],
    recipes: dict[str, WeightRecipe],
    config: ModelConfig,
    draft: DraftConfig | None,
    options: BuildOptions,
    rank: int,
) -> Plan:
    """The plan of one rank from the exported graphs."""
    limits = options.limits(config, draft)
    buffers = engine_buffers(config, draft, limits, options.activations, options.kv, options.tp)
    phases, weights, arena = {}, {}, 0
    for name, bucket, graph in passes:
        ranked = fuse(shard(graph, recipes, buffers, options.tp, rank))
        phase, nbytes = plan_phase(ranked, name, bucket, options.arch)
        phases[phase.key] = phase
        arena = max(arena, nbytes)
        for value in ranked.inputs(WEIGHT):
            key = value.removeprefix(WEIGHT)
            weights[key] = Weight(ranked.specs[value], recipes[key])
    return Plan(
        tp=options.tp,
        rank=rank,
        arch=options.arch,
        activation_dtype=options.activations,
        arena_bytes=arena,
        buffers=buffers,
        weights=weights,
        phases=phases,
        settings=_settings(config, draft, limits),
    )


def plan_passes(
    passes: list[ExportedPass],
    recipes: dict[str, WeightRecipe],
    config: ModelConfig,
    draft: DraftConfig | None,
    options: BuildOptions,
    progress: Progress = lambda message: None,
) -> list[Plan]:
    """Plans of all ranks, in rank order, from the exported graphs."""
    graphs = [(p.name, p.bucket, from_onnx(p.model)) for p in passes]
    plans = []
    for rank in range(options.tp):
        progress(f"plan rank {rank}")
        plans.append(plan_rank(graphs, recipes, config, draft, options, rank))
    return plans


def build_plans(config: ModelConfig, draft: DraftConfig | None, options: BuildOptions) -> list[Plan]:
    """Plans of all ranks straight from configurations, e.g. for full-size tests without a checkpoint."""
    passes, recipes = export_passes(config, draft, options)
    return plan_passes(passes, recipes, config, draft, options)


def _settings(config: ModelConfig, draft: DraftConfig | None, limits: Limits) -> dict:
    model = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    drafter = None
    if draft is not None:
        drafter = {
            "block_size": draft.block_size,
            "mask_token_id": draft.mask_token_id,
            "num_taps": len(draft.target_layer_ids),
        }
    return {"limits": asdict(limits), "model": model, "draft": drafter}


def _prefill_buckets(chunk: int) -> list[int]:
    """The chunk, and an eighth of it for short prompts and the rest behind a prefix that is already cached."""
    return [chunk // 8, chunk] if chunk >= 128 else [chunk]


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, .. and `most` itself."""
    powers = []
    value = 1
    while value < most:
        powers.append(value)
        value *= 2
    return [*powers, most]
