"""CUDA tactics of `dense_gemm`: one kernel (`gemm.cuh`), cut to the shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugins.core.cuda import ARCHS, MULTIPROCESSORS, divisor
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

TILE = 32
MOST_DECODE_TOKENS = 128
MOST_CLUSTER = 8
FILLED = 0.8  # of the multiprocessors: enough blocks not to cut K further
Inputs = Sequence[TensorSpec | None]


@dataclass(frozen=True)
class Cut:
    """How a matrix is cut among blocks and warps; the names are those of the kernel's constants."""

    row_tiles: int
    token_tiles: int
    k_warps: int
    cluster: int
    stages: int

    @property
    def smem(self) -> int:
        """Bytes of a block: the warps' rings, or their sums afterwards."""
        warps = self.row_tiles * self.k_warps
        return warps * max(self.stages * 512 * (4 + self.token_tiles), 1024 * self.token_tiles)


def choose_cut(tokens: int, rows: int, tile_columns: int, arch: str) -> Cut:
    """Few tokens: as many blocks as fill the chip, by cutting K between the blocks of a cluster and their warps.

    Every block reads the activations of its part of K again, so with more tokens a block takes more rows. Many
    tokens: 256 rows by 64 tokens a block, K whole.
    """
    token_tiles = next(t for t in (1, 2, 4, 8) if 8 * t >= tokens or t == 8)
    if tokens > MOST_DECODE_TOKENS:
        return Cut(8, token_tiles, 1, 1, 2)
    row_tiles = 2 if tokens > 64 or (tokens > 32 and rows >= 4096) else 1
    blocks = -(-rows // (row_tiles * TILE)) * -(-tokens // (8 * token_tiles))
    cluster = 1
    for candidate in (2, 4, MOST_CLUSTER):
        if tile_columns % candidate == 0 and blocks * cluster < FILLED * MULTIPROCESSORS[arch]:
            cluster = candidate
    warps = 8 if token_tiles <= 2 or tokens > 64 else 4
    stages = 2 if tokens > 64 else {1: 4, 2: 4, 4: 5, 8: 4}[token_tiles]  # up to 96 KB
    return Cut(row_tiles, token_tiles, divisor(tile_columns // cluster, warps // row_tiles), cluster, stages)


def gemm_launch(
    tokens: int,
    rows: int,
    tile_columns: int,
    cut: Cut,
    *,
    silu_mul: bool = False,
    out_float32: bool = False,
    entry: tuple[str, str] = ("dense_gemm/gemm.cu", "gemm"),
) -> Launch:
    """x [tokens, 32 tile_columns], weight [rows, 32 tile_columns]."""
    tiles = tile_columns // cut.cluster // cut.k_warps
    # the compiler unrolls very short loops, which with 64 sums a thread takes the registers of a second block
    blocks_per_sm = 1 if cut.token_tiles == 8 and tiles < 4 else 2
    constants = (
        ("TOKENS", tokens),
        ("N", rows),
        ("K_TILES", tile_columns),
        ("ROW_TILES", cut.row_tiles),
        ("TOKEN_TILES", cut.token_tiles),
        ("K_WARPS", cut.k_warps),
        ("CLUSTER", cut.cluster),
        ("SLICE", tiles),
        ("STAGES", cut.stages),
        ("MIN_BLOCKS", blocks_per_sm),
        ("SILU_MUL", int(silu_mul)),
        ("OUT_FLOAT32", int(out_float32)),
    )
    return Launch(
        *entry,
        constants,
        grid=(cut.cluster, -(-tokens // (8 * cut.token_tiles)), -(-rows // (TILE * cut.row_tiles))),
        block=(32 * cut.row_tiles * cut.k_warps, 1, 1),
        cluster=(cut.cluster, 1, 1),
        smem=cut.smem,
    )


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    x, weight = inputs
    assert x is not None and weight is not None  # `infer` has checked the operands
    tokens, columns = x.shape
    rows = weight.shape[0]
    cut = choose_cut(tokens, rows, columns // TILE, arch)
    silu_mul, out_float32 = attrs["activation"] == "silu_mul", attrs["out_dtype"] == "float32"
    return (gemm_launch(tokens, rows, columns // TILE, cut, silu_mul=silu_mul, out_float32=out_float32),)


def refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    """Also of the router's matrix: the first two operands are activations and weight, both bfloat16."""
    for spec in inputs[:2]:
        if spec is None or spec.dtype != "bfloat16":
            return f"takes bfloat16 activations and weights, found {spec}"
        if spec.shape[1] % TILE:
            return f"takes columns in multiples of {TILE}, found {spec}"
    return None


TACTICS = (Tactic("mma", ARCHS, refuses, launches=_launches),)
