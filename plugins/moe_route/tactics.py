"""CUDA tactics of `moe_route`: logits, then experts and lists; one kernel for both up to 128 tokens."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, divisor, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec
from plugins.dense_gemm.tactics import TILE, Cut, gemm_launch
from plugins.dense_gemm.tactics import refuses as matrix_refuses

MOST_DECODE_TOKENS = 128
MANY_TOKENS = 512  # from here on blocks of 64 tokens alone fill the chip
MOST_EXPERTS = 1024  # 32 a lane
MOST_TOP_K = 32  # a lane each
Inputs = Sequence[TensorSpec | None]


def _sizes(inputs: Inputs) -> tuple[int, int, int]:
    """tokens, experts, tiles of 32 columns."""
    x, weight = inputs[:2]
    assert x is not None and weight is not None  # `infer` has checked the operands
    return x.shape[0], weight.shape[0], x.shape[1] // TILE


def _logits(inputs: Inputs) -> Launch:
    """32 experts by up to 64 tokens a cluster of 8 blocks, which split K; with very many tokens 128 experts a block."""
    tokens, experts, columns = _sizes(inputs)
    entry = ("moe_route/logits.cu", "logits")
    if tokens > MANY_TOKENS:
        cluster = divisor(columns, 2)
        cut = Cut(4, 8, divisor(columns // cluster, 2), cluster, 2)
        return gemm_launch(tokens, experts, columns, cut, out_float32=True, entry=entry)
    token_tiles = next(t for t in (1, 2, 4, 8) if 8 * t >= tokens or t == 8)
    cluster = divisor(columns, 8)
    while 64 * token_tiles % cluster:
        cluster = divisor(columns, cluster - 1)
    k_warps = divisor(columns // cluster, 8 if token_tiles < 8 else 4)
    cut = Cut(1, token_tiles, k_warps, cluster, 3 if token_tiles == 4 else 4)
    return gemm_launch(tokens, experts, columns, cut, out_float32=True, entry=entry)


def _constants(attrs: Attrs, inputs: Inputs) -> tuple[tuple[str, int], ...]:
    tokens, experts, _ = _sizes(inputs)
    return (
        ("TOKENS", tokens),
        ("EXPERTS", experts),
        ("TOP_K", attrs["top_k"]),
        ("NORMALISE", int(attrs["norm_topk_prob"])),
        ("SCALING", float_bits(attrs["routed_scaling_factor"])),
    )


def _decode(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    tokens, experts, _ = _sizes(inputs)
    words = experts * -(-tokens // 32) + experts + 1 + 8 + 1 + 8 * attrs["top_k"]
    select = Launch(
        "moe_route/select.cu",
        "select_experts",
        _constants(attrs, inputs),
        grid=(-(-tokens // 8), 1, 1),
        block=(256, 1, 1),
        smem=4 * words,
    )
    return _logits(inputs), select


def _prefill(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    tokens, experts, _ = _sizes(inputs)
    source, constants, block = "moe_route/lists.cu", _constants(attrs, inputs), (256, 1, 1)
    return (
        _logits(inputs),
        Launch(source, "choose_experts", constants, grid=(-(-tokens // 8), 1, 1), block=block),
        Launch(source, "list_routes", constants, grid=(experts, 1, 1), block=block, smem=64),
    )


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    tokens, experts, _ = _sizes(inputs)
    return 4 * tokens * experts + 4  # float32 logits, a counter of blocks


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    _, experts, _ = _sizes(inputs)
    if experts > MOST_EXPERTS or attrs["top_k"] > MOST_TOP_K:
        return f"takes up to {MOST_EXPERTS} experts and top_k {MOST_TOP_K}, found {experts} and {attrs['top_k']}"
    return matrix_refuses(attrs, inputs)


def _decode_refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    tokens = _sizes(inputs)[0]
    if tokens > MOST_DECODE_TOKENS:
        return f"takes up to {MOST_DECODE_TOKENS} tokens, found {tokens}"
    return _refuses(attrs, inputs)


TACTICS = (
    Tactic("decode", ARCHS, _decode_refuses, _workspace, _decode),
    Tactic("prefill", ARCHS, _refuses, _workspace, _prefill),
)
