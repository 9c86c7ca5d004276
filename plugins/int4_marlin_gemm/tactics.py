"""CUDA tactics of `int4_marlin_gemm`: `gate_up.cu` and `down.cu` for few tokens, `prefill.cu` for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugins.core.cuda import ARCHS, MULTIPROCESSORS, divisor
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec
from plugins.int4_marlin_gemm.pack import TILE, TILE_BYTES

MOST_DECODE_TOKENS = 512
MOST_IN_PLACE = 4  # tokens whose sums the blocks of the second stage keep in shared memory
BLOCK_TOKENS = 8  # of a unit of work in the kernels for few tokens
PREFILL_TOKENS = 64  # the same for many
SCRATCH = 4 * 33
BLOCK_BYTES = 8  # of an entry in the kernels' list of blocks
MOST_EXPERTS = 1 << 16
Inputs = Sequence[TensorSpec | None]


@dataclass(frozen=True)
class Shape:
    """Sizes of a node; weights in tiles of 32 x 32."""

    down: bool
    tokens: int
    top_k: int
    experts: int
    tile_rows: int
    tile_columns: int
    has_shared: bool = False

    @staticmethod
    def of(attrs: Attrs, inputs: Inputs) -> Shape:
        weight, routes = inputs[1], inputs[3]
        assert weight is not None and routes is not None  # `infer` has checked the operands
        experts, rows, columns, _ = weight.shape
        shared = len(inputs) > 5 and inputs[5] is not None
        top_k = attrs["top_k"]
        return Shape(attrs["stage"] == "down", routes.numel // top_k, top_k, experts, rows, columns, shared)

    @property
    def routes(self) -> int:
        return self.tokens * self.top_k

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        return (
            ("EXPERTS", self.experts),
            ("TOP_K", self.top_k),
            ("TOKENS", self.tokens),
            ("K_TILES", self.tile_columns),
            ("N_TILES", self.tile_rows),
        )

    @property
    def most_blocks(self) -> int:
        """Entries of the list of blocks of `BLOCK_TOKENS` routes."""
        return min(self.routes, self.experts + self.routes // BLOCK_TOKENS)


def _ring(warps: int, stages: int, stage_tiles: int) -> int:
    """Bytes of shared memory: tiles and barriers."""
    return warps * stages * (stage_tiles * TILE_BYTES + 8)


def gate_up_launch(shape: Shape, arch: str) -> Launch:
    """A block for every 32 rows of an expert, in turn; its warps split K, 28 tiles each where K is 7168.

    Two blocks of 8 warps fill a multiprocessor of an H200; one, with a longer ring, that of sm_120a, which has less
    shared memory and a quarter of the bytes to move in a clock.
    """
    blocks_per_sm, stages = (2, 3) if arch == "sm_90a" else (1, 4)
    most_warps, most_stage = 8, 4
    warps = divisor(shape.tile_columns, most_warps)
    tiles = shape.tile_columns // warps
    stage_tiles = divisor(tiles, most_stage)
    constants = (
        ("WARPS", warps),
        ("SLICE", tiles),
        ("STAGES", stages),
        ("STAGE_TILES", stage_tiles),
        ("MIN_BLOCKS", blocks_per_sm),
    )
    units = shape.most_blocks * shape.tile_rows
    smem = _ring(warps, stages, stage_tiles) + 2 * warps * 1024 + shape.most_blocks * BLOCK_BYTES + SCRATCH
    return Launch(
        "int4_marlin_gemm/gate_up.cu",
        "gate_up",
        shape.constants + constants,
        grid=(min(units, blocks_per_sm * MULTIPROCESSORS[arch]), 1, 1),
        block=(32 * warps, 1, 1),
        smem=smem,
    )


def down_launch(shape: Shape, arch: str, in_place: bool) -> Launch:
    """`in_place`: a block for every 32 outputs, each warp with 128 bytes of sums a token in shared memory."""
    warps, blocks_per_sm, stages = 8, 2, 2
    most_stage = 8 if arch == "sm_90a" else 4  # lets two blocks share a multiprocessor
    stage_tiles = divisor(shape.tile_columns, most_stage)
    constants = (
        ("WARPS", warps),
        ("STAGES", stages),
        ("STAGE_TILES", stage_tiles),
        ("MIN_BLOCKS", blocks_per_sm),
        ("SUM", int(in_place)),
        ("HAS_SHARED", int(shape.has_shared)),
    )
    sums = warps * shape.tokens * 128 if in_place else 0
    return Launch(
        "int4_marlin_gemm/down.cu",
        "down",
        shape.constants + constants,
        grid=(shape.tile_rows if in_place else blocks_per_sm * MULTIPROCESSORS[arch], 1, 1),
        block=(32 * warps, 1, 1),
        smem=_ring(warps, stages, stage_tiles) + sums + shape.most_blocks * BLOCK_BYTES + SCRATCH,
    )


def prefill_launch(shape: Shape, arch: str) -> Launch:
    """2 blocks of 8 warps on every multiprocessor, whatever the routes turn out to be; 1 where the matrix is so small
    that finding the next tile row takes the registers of the second. Two tiles a step take registers that sm_120a
    does not leave.
    """
    blocks_per_sm = 2 if min(shape.tile_columns, shape.tile_rows) >= 8 else 1
    step_tiles = 2 if arch == "sm_90a" and shape.tile_columns % 4 == 0 else 1
    outputs = 32 if shape.down else 16
    results = PREFILL_TOKENS * (8 * outputs + 8) * 2
    blocks = shape.experts + shape.routes // PREFILL_TOKENS
    constants = (("DOWN", int(shape.down)), ("STEP_TILES", step_tiles), ("MIN_BLOCKS", blocks_per_sm))
    return Launch(
        "int4_marlin_gemm/prefill.cu",
        "prefill",
        shape.constants + constants,
        grid=(blocks_per_sm * MULTIPROCESSORS[arch], 1, 1),
        block=(256, 1, 1),
        smem=2 * step_tiles * PREFILL_TOKENS * 64 + results + blocks * BLOCK_BYTES + SCRATCH,
    )


def combine_launch(shape: Shape, float32: bool) -> Launch:
    """A thread for every 8 outputs."""
    threads = 256
    constants = (
        ("TOP_K", shape.top_k),
        ("TOKENS", shape.tokens),
        ("N_TILES", shape.tile_rows),
        ("HAS_SHARED", int(shape.has_shared)),
        ("FLOAT32", int(float32)),
    )
    pieces = shape.tokens * shape.tile_rows * TILE // 8
    grid = (-(-pieces // threads), 1, 1)
    return Launch("int4_marlin_gemm/combine.cu", "combine", constants, grid, block=(threads, 1, 1))


def _decode(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    shape = Shape.of(attrs, inputs)
    if not shape.down:
        return (gate_up_launch(shape, arch),)
    if shape.tokens <= MOST_IN_PLACE:
        return (down_launch(shape, arch, in_place=True),)
    return down_launch(shape, arch, in_place=False), combine_launch(shape, float32=True)


def _prefill(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    shape = Shape.of(attrs, inputs)
    launch = prefill_launch(shape, arch)
    return (launch, combine_launch(shape, float32=False)) if shape.down else (launch,)


def _decode_workspace(attrs: Attrs, inputs: Inputs) -> int:
    """Down for more than `MOST_IN_PLACE` tokens: a float32 result for every route."""
    shape = Shape.of(attrs, inputs)
    many = shape.down and shape.tokens > MOST_IN_PLACE
    return shape.routes * shape.tile_rows * TILE * 4 if many else 0


def _prefill_workspace(attrs: Attrs, inputs: Inputs) -> int:
    """Down: a bfloat16 result for every route."""
    shape = Shape.of(attrs, inputs)
    return shape.routes * shape.tile_rows * TILE * 2 if shape.down else 0


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    x = inputs[0]
    if x is None or x.dtype != "bfloat16":
        return f"takes bfloat16 activations, found {x}"
    experts = Shape.of(attrs, inputs).experts
    return None if experts < MOST_EXPERTS else f"takes fewer than {MOST_EXPERTS} experts, found {experts}"


def _decode_refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    tokens = Shape.of(attrs, inputs).tokens
    if tokens > MOST_DECODE_TOKENS:
        return f"takes up to {MOST_DECODE_TOKENS} tokens, found {tokens}"
    return _refuses(attrs, inputs)


def _prefill_refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    columns = Shape.of(attrs, inputs).tile_columns
    if columns < 2:
        return f"takes weights of 64 columns or more, found {columns * TILE}"
    return _refuses(attrs, inputs)


TACTICS = (
    Tactic("decode", ARCHS, _decode_refuses, _decode_workspace, _decode),
    Tactic("prefill", ARCHS, _prefill_refuses, _prefill_workspace, _prefill),
)
