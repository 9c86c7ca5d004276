"""A small plan made by hand, for any number of ranks: embedding, norm, logits, sampled token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from plugins.core.packing import WeightRecipe
from plugins.core.plan import Arg, Phase, Plan, Step, Weight
from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec

ROWS, VOCAB, HIDDEN, REQUESTS = 4, 32, 64, 2
EPS = 1e-5


def arena(name: str, offset: int, *shape: int, dtype: str = "float32") -> Arg:
    return Arg("arena", name, offset, TensorSpec(shape, dtype))


def small_plan(tp: int = 1, rank: int = 0) -> Plan:
    """Phases verify[4] and verify[2]; x, s and y take turns in the arena."""
    part = VOCAB // tp
    buffers = {
        "tokens": TensorSpec((ROWS,), "int32"),
        "positions": TensorSpec((ROWS,), "int32"),
        "row_request": TensorSpec((ROWS,), "int32"),
        "temperature": TensorSpec((REQUESTS,), "float32"),
        "top_k": TensorSpec((REQUESTS,), "int32"),
        "top_p": TensorSpec((REQUESTS,), "float32"),
        "min_p": TensorSpec((REQUESTS,), "float32"),
        "seed": TensorSpec((REQUESTS,), "int64"),
        "penalized": TensorSpec((REQUESTS,), "int32"),
        "presence_penalty": TensorSpec((REQUESTS,), "float32"),
        "frequency_penalty": TensorSpec((REQUESTS,), "float32"),
        "repetition_penalty": TensorSpec((REQUESTS,), "float32"),
        "token_counts": TensorSpec((REQUESTS, VOCAB), "int32"),
        "logit_bias": TensorSpec((REQUESTS, VOCAB), "float32"),
        "row_masked": TensorSpec((ROWS,), "int32"),
        "vocab_mask": TensorSpec((ROWS, VOCAB // 32), "uint32"),
        "logits": TensorSpec((ROWS, VOCAB), "float32"),
        "sampled": TensorSpec((ROWS,), "int32"),
        "kv_pool": TensorSpec((1, 8, 4), "float32"),
        "path_rows": TensorSpec((REQUESTS, 2), "int32"),
        "num_emitted": TensorSpec((REQUESTS,), "int32"),
        "first_row": TensorSpec((REQUESTS,), "int32"),
        "row_slot": TensorSpec((ROWS,), "int32"),
    }
    shapes = {"table": (part, HIDDEN), "norm": (HIDDEN,), "head": (part, HIDDEN)}
    weights = {
        name: Weight(TensorSpec(shape, "bfloat16"), WeightRecipe("dense_gemm", (name,), (shape,), {}))
        for name, shape in shapes.items()
    }
    phases = [Phase("verify", rows, _steps(rows, tp, rank, buffers, weights)) for rows in (2, ROWS)]
    plan_phases = {phase.key: phase for phase in phases}
    return Plan(tp, rank, "cpu", "float32", 4096, buffers, weights, plan_phases, {"limits": {}})


def _steps(
    rows: int, tp: int, rank: int, buffers: dict[str, TensorSpec], weights: dict[str, Weight]
) -> tuple[Step, ...]:
    def buffer(name: str, *shape: int) -> Arg:
        spec = buffers[name]
        return Arg("buffer", name, 0, TensorSpec(shape, spec.dtype) if shape else spec)

    def weight(name: str) -> Arg:
        return Arg("weight", name, 0, weights[name].spec)

    def step(node: str, plugin: str, attrs: dict[str, Any], inputs: list[Arg], outputs: list[Arg]) -> Step:
        return Step(node, plugin, "reference", attrs, tuple(inputs), tuple(outputs))

    x = arena("x", 0, rows, HIDDEN)
    s = arena("s", 1024, rows, HIDDEN)
    y = arena("y", 0, rows, HIDDEN)
    part = arena("part", 2048, rows, VOCAB // tp)
    parameters = [buffer(name) for name in get_plugin("sample").inputs[3:-2]]
    logits = buffer("logits", rows, VOCAB)
    gemm = {"activation": "none", "out_dtype": "float32"}
    compact = [buffer(n) for n in ("path_rows", "num_emitted", "first_row", "row_slot", "kv_pool")]
    embed = {"tp_rank": rank, "out_dtype": "float32"}
    return (
        step("embed", "embed", embed, [buffer("tokens", rows), weight("table")], [x]),
        step("sum", "all_reduce", {"eps": EPS, "tp_world": tp}, [x], [s]),
        step("norm", "rms_norm", {"eps": EPS}, [s, weight("norm")], [y]),
        step("head", "dense_gemm", gemm, [y, weight("head")], [part]),
        step("gather", "all_gather", {"tp_world": tp}, [part], [logits]),
        step(
            "draw",
            "sample",
            {},
            [logits, buffer("positions"), buffer("row_request"), *parameters],
            [buffer("sampled", rows)],
        ),
        step("compact", "kv_compact", {}, compact, []),
    )


def small_weights(tp: int = 1, rank: int = 0) -> dict[str, np.ndarray]:
    """bfloat16 bits; the ranks' parts together are the same for every tp."""
    rng = np.random.default_rng(0)
    whole = {
        "table": rng.integers(0x3E00, 0x4000, (VOCAB, HIDDEN)),
        "norm": rng.integers(0x3F00, 0x4000, (HIDDEN,)),
        "head": rng.integers(0xBE00, 0xBF80, (VOCAB, HIDDEN)),
    }
    whole["head"][::2] -= 0x8000  # both signs
    part = VOCAB // tp
    cut = {name: a if name == "norm" else a[rank * part : (rank + 1) * part] for name, a in whole.items()}
    return {name: np.ascontiguousarray(a.astype(np.uint16)) for name, a in cut.items()}


def change_step(plan: Plan, node: str, key: str = "verify[4]", **changes: Any) -> Plan:
    """`plan` with fields of one step replaced."""
    phase = plan.phases[key]
    steps = tuple(replace(step, **changes) if step.node == node else step for step in phase.steps)
    return replace(plan, phases={**plan.phases, key: replace(phase, steps=steps)})


def find_step(plan: Plan, node: str, key: str = "verify[4]") -> Step:
    return next(step for step in plan.phases[key].steps if step.node == node)


def change_arg(plan: Plan, node: str, side: str, index: int, key: str = "verify[4]", **changes: Any) -> Plan:
    """`plan` with fields of one argument (side: "inputs" or "outputs") of one step replaced."""
    args = list(getattr(find_step(plan, node, key), side))
    args[index] = replace(args[index], **changes)
    return change_step(plan, node, key, **{side: tuple(args)})
