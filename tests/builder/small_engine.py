"""Engines for the tests of the reports: a plan made by hand, a small model, one phase of the real one."""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache
from pathlib import Path

from builder.config import load_draft_config, load_model_config
from builder.export import export
from builder.model.passes import Verify
from builder.model.state import engine_buffers
from builder.model.target import Target
from builder.model.weights import recipes_of
from builder.options import BuildOptions
from builder.pipeline import build_plans, plan_rank
from plugins.core.packing import WeightRecipe
from plugins.core.plan import NO_ARG, Arg, Phase, Plan, Step, Weight
from plugins.core.spec import TensorSpec
from tests.full_size import K26, K26_DRAFT, k26_config, k26_draft_config, write_config

SMALL_TEXT = {
    **{"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "vocab_size": 512},
    **{"n_routed_experts": 16, "num_experts_per_tok": 4, "max_position_embeddings": 4096},
    **{"bos_token_id": 500, "eos_token_id": 501, "pad_token_id": 502},
}
SMALL_DRAFT = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 4096},
    **{"layer_types": ["full_attention"] * 2, "block_size": 4, "num_target_layers": 4},
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 2]},
}
OPTIONS = BuildOptions(
    tp=2, arch="cpu", activation_dtype="bfloat16", max_context=256, max_requests=2, verify_buckets=(1, 4), splat=True
)


def small_directories(base: Path) -> tuple[Path, Path]:
    """Directories with the config.json of a small model and of its drafter."""
    model = copy.deepcopy(K26)
    model["text_config"] |= SMALL_TEXT
    model |= {key: SMALL_TEXT[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return write_config(base / "model", model), write_config(base / "draft", {**K26_DRAFT, **SMALL_DRAFT})


ROWS, IN, OUT = 3, 64, 32


def hand_plan() -> Plan:
    """x -> layer 0: matrix, sum over 4 ranks -> layer 1: the same matrix again."""
    weight = Arg("weight", "layers.0.matrix", 0, TensorSpec((OUT, IN), "bfloat16"))
    x = Arg("buffer", "x", 0, TensorSpec((ROWS, IN), "bfloat16"))
    y = Arg("arena", "y", 256, TensorSpec((ROWS, OUT), "bfloat16"))
    z = Arg("arena", "z", 512, TensorSpec((ROWS, OUT), "bfloat16"))
    gemm = {"activation": "none", "out_dtype": "activation"}
    steps = (
        Step("first", "dense_gemm", "reference", gemm, (x, weight), (y,)),
        Step("sum", "all_reduce", "reference", {"eps": 0.0, "tp_world": 4}, (y, NO_ARG, NO_ARG), (z,)),
        Step("layers.1.again", "dense_gemm", "reference", gemm, (x, weight), (y,)),
    )
    recipe = WeightRecipe("dense_gemm", ("model.layers.0.self_attn.o_proj.weight",), ((OUT, IN),), {"shard": "none"})
    limits = {"max_requests": 1, "max_context": 100, "prefill_chunk": 8, "max_rows": 4, "kv_pages": 3}
    limits |= {"page_size": 16, "draft_depth": 0, "tree_top_k": 1}
    model = {"num_layers": 2, "hidden_size": IN, "vocab_size": OUT}
    return Plan(
        tp=4,
        rank=0,
        arch="sm_120a",
        activation_dtype="bfloat16",
        arena_bytes=768,
        buffers={"x": x.spec, "kv_pool": TensorSpec((2, 48, 576), "bfloat16")},  # type: ignore[dict-item]
        weights={"layers.0.matrix": Weight(TensorSpec((OUT, IN), "bfloat16"), recipe)},
        phases={"verify[3]": Phase("verify", 3, steps)},
        settings={"limits": limits, "model": model, "draft": None},
    )


@lru_cache(maxsize=1)
def k26_verify_1() -> Plan:
    """Rank 0 of 8 of Kimi K2.6 with the one phase verify[1]; the drafter gives buffers and taps."""
    config, draft = k26_config(), k26_draft_config()
    options = BuildOptions(tp=8, arch="cpu", activation_dtype="bfloat16", max_context=262_144, prefill_chunk=4096)
    limits = options.limits(config, draft)
    buffers = engine_buffers(config, draft, limits, "bfloat16", "bfloat16", tp=1)
    target = Target(config, draft.target_layer_ids, options.mla_norm_eps, "bfloat16", "bfloat16")
    module = Verify(target, buffers, limits, 1)
    graph = export(module, "verify[1]")
    return plan_rank([("verify", 1, graph)], recipes_of(module), config, draft, options, 0)


@lru_cache(maxsize=1)
def small_plans() -> list[Plan]:
    """Both ranks of the small model with its drafter."""
    with tempfile.TemporaryDirectory() as directory:
        model, draft = small_directories(Path(directory))
        return build_plans(load_model_config(model), load_draft_config(draft), OPTIONS)
