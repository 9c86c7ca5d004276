"""The full Kimi K2.6 at tp 8, from shapes alone: what a rank holds and what its plan looks like."""

from __future__ import annotations

from functools import lru_cache

import pytest

from builder.options import BuildOptions
from builder.pipeline import build_plans
from engine_runtime.executor.null import check_ranks
from plugins.core.plan import Plan
from tests.full_size import k26_config, k26_draft_config

OPTIONS = BuildOptions(
    tp=8,
    activation_dtype="bfloat16",
    max_context=262_144,
    max_requests=4,
    prefill_chunk=4096,
    verify_buckets=(1, 8, 32),
)
LAYERS, MOE_LAYERS, DRAFT_LAYERS = 61, 60, 6


@lru_cache(maxsize=1)
def plans() -> list[Plan]:
    return build_plans(k26_config(), k26_draft_config(), OPTIONS)


def test_weight_bytes_of_a_rank() -> None:
    """76.2 GB of target (experts, heads, vocabulary split; q_a, kv_a, router replicated), 0.9 GB of drafter."""
    target = sum(w.spec.nbytes for name, w in plans()[0].weights.items() if name.startswith("target."))
    draft = plans()[0].weight_bytes() - target
    assert target == pytest.approx(76.2e9, rel=0.02)
    # a rank's eighth of 6.958 GB, and the k and v matrices that are kept twice
    assert draft == pytest.approx(6.958e9 / 8 + 6 * 2 * 1024 * 7168 * 2 / 8, rel=0.01)


def test_kv_bytes_of_a_token() -> None:
    pool = plans()[0].buffers["kv_pool"]
    slots = pool.shape[1]
    assert pool.nbytes // slots == 70_272  # 576 values x 61 layers x 2 bytes
    assert slots >= 262_144
    assert plans()[0].buffers["draft_kv"].nbytes // slots == 6 * 2 * 128 * 2  # one KV head a rank


def test_steps_of_a_verify_pass() -> None:
    """A dense layer is 8 steps, an MoE layer 10; embedding, head, sampling and acceptance come on top."""
    steps = plans()[0].phases["verify[8]"].steps
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.plugin] = counts.get(step.plugin, 0) + 1
    assert counts == {
        "embed": 1,
        "all_reduce": 1 + 2 * LAYERS,  # all but the embedding's carry the residual add and the next norm
        "rms_norm": 1,
        "dense_gemm": 2 * LAYERS + 2 + 2 * MOE_LAYERS + 1,  # qkv_a and o; dense MLP; shared experts; lm_head
        "mla_prepare": LAYERS,
        "mla_attention": LAYERS,
        "moe_route": MOE_LAYERS,
        "int4_marlin_gemm": 2 * MOE_LAYERS,
        "all_gather": 1,
        "sample": 1,
        "ddtree_accept": 1,
        "kv_compact": 1,
    }
    assert sum(step.plugin == "all_reduce" for step in plans()[0].phases["draft[1]"].steps) == 1 + 2 * DRAFT_LAYERS


def test_arena_is_small_beside_the_weights() -> None:
    arena = plans()[0].arena_bytes
    # the largest pass is the prefill chunk: 4096 routes x 8 experts of 256 bf16 values and a few [4096, 7168] rows
    assert 100e6 < arena < 500e6


def test_all_ranks_pass_the_null_executor() -> None:
    check_ranks(plans())
