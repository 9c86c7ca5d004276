"""Packer of the routed experts: compressed-tensors int4 words and scales -> tiles that the kernel streams.

Layout, version 1: uint8 [E, N/32, K/32, 576]. A tile is 32 output rows by 32 input columns (one scale group):

- 512 bytes of nibbles: 32 lanes of 16 bytes. Lane g * 4 + t (g = 0..7, t = 0..3) holds four 32-bit words of
  the checkpoint, unchanged: those of tile rows g, g + 8, g + 16, g + 24 (in this order) and tile columns
  8 t .. 8 t + 7.
- 64 bytes of scales: 32 bfloat16 [g][4]: rows g, g + 8, g + 16, g + 24 for g = 0..7.

Why: the kernel runs mma.sync m16n8k16 with the weights as the 16-row A operand. The order of k inside a dot
product is free as long as the activations use the same one, so a lane can take a checkpoint word (8 columns
of one row) as its part of the A fragments of two k16 steps. Packing is then a pure transposition of 4-byte
words, one 16-byte load feeds a lane, and a lane gets its four scales as 8 bytes.

"gate_up": N = 2 I / tp, K = H; gate and up are cut by rows, and tile row j is rows 16 j .. 16 j + 15 of the
rank's gate, then the same rows of its up, so that one lane has gate and up of the same outputs.
"down": N = H, K = I / tp; cut by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from plugins.core.packing import Packer, WeightRecipe, split
from plugins.core.plugin import PluginError
from plugins.core.spec import TensorSpec

STAGES = ("gate_up", "down")
TILE = 32  # rows and columns of a tile; also the quantisation group along K
TILE_BYTES = 576
WORDS = 128  # 32-bit words of a tile's nibbles; 16 words of scales follow
SCRATCH_BYTES = 512 << 10  # of a pass of `_fill`: stays in a core's L2
_LANES = np.dtype("V64")  # the four lanes of one g: 16 words that are contiguous in a tile


class Int4Packer(Packer):
    """Recipe attrs: stage "gate_up" or "down". Sources, for every expert in order: gate.weight_packed
    (int32 [I, H/8]), gate.weight_scale (bfloat16 [I, H/32]), up.weight_packed, up.weight_scale; or
    down.weight_packed (int32 [H, I/8]), down.weight_scale (bfloat16 [H, I/32]).
    """

    layout_version = 1

    def spec(self, recipe: WeightRecipe, tp: int) -> TensorSpec:
        per_expert = 2 * _matrices(recipe)
        count = len(recipe.shapes)
        if not count or count % per_expert or count != len(recipe.sources):
            raise _error(recipe, f"expected {per_expert} sources an expert, each with a shape, found {count}")
        words = recipe.shapes[0]
        if len(words) != 2 or words[1] % 4:
            raise _error(recipe, f"expected words [N, K/8] with K a multiple of {TILE}, found {list(words)}")
        rows, columns = words[0], words[1] * 8
        expected = [(rows, columns // 8), (rows, columns // TILE)] * (len(recipe.shapes) // 2)
        for name, want, found in zip(recipe.sources, expected, recipe.shapes, strict=True):
            if tuple(found) != want:
                raise _error(recipe, f"{name}: expected shape {list(want)}, found {list(found)}")
        if _matrices(recipe) == 2:
            if rows % (16 * tp):
                raise _error(recipe, f"I / tp must be a multiple of 16: I={rows}, tp={tp}")
            shape = (2 * rows // tp, columns)
        else:
            if rows % TILE or columns % (TILE * tp):
                raise _error(recipe, f"H and I / tp must be multiples of 32: H={rows}, I={columns}, tp={tp}")
            shape = (rows, columns // tp)
        experts = len(recipe.shapes) // per_expert
        return TensorSpec((experts, shape[0] // TILE, shape[1] // TILE, TILE_BYTES), "uint8")

    def pack(self, recipe: WeightRecipe, read: Callable[[str], np.ndarray], tp: int, rank: int) -> Iterator[np.ndarray]:
        experts, tile_rows, tile_columns, _ = self.spec(recipe, tp).shape
        matrices = _matrices(recipe)
        axis = 0 if matrices == 2 else 1

        def part(index: int, dtype: type[np.generic]) -> np.ndarray:
            source, shape = read(recipe.sources[index]), recipe.shapes[index]
            if source.shape != shape or source.dtype != dtype:
                expected = f"{np.dtype(dtype)} {list(shape)}"
                found = f"{source.dtype} {list(source.shape)}"
                raise _error(recipe, f"{recipe.sources[index]}: expected {expected}, found {found}")
            return split(source, axis, tp, rank)

        for first in range(0, 2 * matrices * experts, 2 * matrices):
            tiles = np.empty((tile_rows, tile_columns, TILE_BYTES), np.uint8)
            words = [part(first + 2 * i, np.int32) for i in range(matrices)]
            scales = [part(first + 2 * i + 1, np.uint16) for i in range(matrices)]
            _fill(tiles, words, scales)
            yield tiles

    def unpack(self, recipe: WeightRecipe, packed: np.ndarray, tp: int) -> list[np.ndarray]:
        tiles = np.ascontiguousarray(packed).reshape(-1).view(np.uint8).reshape(self.spec(recipe, tp).shape)
        stage = recipe.attrs["stage"]
        return [array for expert in tiles for pair in rows_of_tiles(expert, stage) for array in pair]


def _fill(tiles: np.ndarray, words: list[np.ndarray], scales: list[np.ndarray]) -> None:
    """Write `tiles` uint8 [N/32, K/32, 576] from one matrix (down) or two (gate, up) of words and scales.

    Two steps, each fast in numpy: the four rows of a lane are interleaved into scratch with long inner loops
    over the row, then pieces of 64 bytes (8 for the scales) move to their tile.
    """
    tile_rows, tile_columns, _ = tiles.shape
    groups = 4 // len(words)  # groups of 8 rows that each matrix gives to a tile
    word_rows = [w.reshape(tile_rows, groups, 8, -1)[:, i] for w in words for i in range(groups)]
    scale_rows = [s.reshape(tile_rows, groups, 8, -1)[:, i] for s in scales for i in range(groups)]
    block = max(1, SCRATCH_BYTES // (tile_columns * TILE_BYTES))
    words_out = tiles[..., : 4 * WORDS].view(_LANES)  # [N/32, K/32, 8]
    scales_out = tiles[..., 4 * WORDS :].view(np.uint64)  # [N/32, K/32, 8]
    # [tile row, g, word or scale of the row, row group]
    word_scratch = np.empty((block, 8, 4 * tile_columns, 4), np.int32)
    scale_scratch = np.empty((block, 8, tile_columns, 4), np.uint16)
    lanes = word_scratch.reshape(block, 8, tile_columns, 16).view(_LANES)[..., 0].transpose(0, 2, 1)
    quads = scale_scratch.view(np.uint64)[..., 0].transpose(0, 2, 1)
    for start in range(0, tile_rows, block):
        end = min(start + block, tile_rows)
        count = end - start
        for group in range(4):
            word_scratch[:count, ..., group] = word_rows[group][start:end]
            scale_scratch[:count, ..., group] = scale_rows[group][start:end]
        words_out[start:end] = lanes[:count]
        scales_out[start:end] = quads[:count]


def rows_of_tiles(tiles: np.ndarray, stage: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inverse of `_fill`: one expert's tiles uint8 [N/32, K/32, 576] -> (words int32 [n, K/8], scales uint16
    [n, K/32]) of each matrix: gate and up (n = N/2), or down (n = N).
    """
    tile_rows, tile_columns, _ = tiles.shape
    words = tiles[..., : 4 * WORDS].view(np.int32).reshape(tile_rows, tile_columns, 8, 4, 4)
    scales = tiles[..., 4 * WORDS :].view(np.uint16).reshape(tile_rows, tile_columns, 8, 4)
    words = words.transpose(0, 4, 2, 1, 3)  # [tile row, row group, g, tile column, word]
    scales = scales.transpose(0, 3, 2, 1)
    pairs = []
    for groups in (slice(0, 2), slice(2, 4)) if stage == "gate_up" else (slice(0, 4),):
        part = words[:, groups].reshape(-1, 4 * tile_columns), scales[:, groups].reshape(-1, tile_columns)
        pairs.append(part)
    return pairs


def _matrices(recipe: WeightRecipe) -> int:
    """Matrices an expert: 2 for gate_up, 1 for down."""
    stage = recipe.attrs.get("stage")
    if stage not in STAGES:
        raise _error(recipe, f"stage: expected one of {STAGES}, found {stage!r}")
    return 2 if stage == "gate_up" else 1


def _error(recipe: WeightRecipe, what: str) -> PluginError:
    where = recipe.sources[0] if recipe.sources else "no source"
    return PluginError(f"int4_marlin_gemm packer ({where}): {what}")


PACKER = Int4Packer()
