"""Packer of dense weights: checkpoint rows as they are, cut for the rank, or gate and up interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from plugins.core.packing import Packer, WeightRecipe, chunks, split, total
from plugins.core.plugin import PluginError
from plugins.core.spec import DTYPES, TensorSpec

INTERLEAVE = 16  # rows of gate, then of up: half of the kernels' 32-row tile each
CHUNK_BYTES = 16 << 20
SHARD_AXIS = {"none": None, "rows": 0, "cols": 1}


class DensePacker(Packer):
    """Row-major matrices [N, K], or vectors [N], of one dtype.

    Recipe attrs:
      dtype: of the checkpoint and of the packed tensor, default "bfloat16".
      shard: "none" (default), "rows" or "cols": which axis of every source is cut into tp equal parts.
        Vectors are never cut.
      interleave: absent, or 16: the two sources gate and up (each cut first) alternate in blocks of 16 rows.
    Several sources without interleave follow each other along the rows: [q_r; k_r; v_r] on rank r.
    """

    layout_version = 1

    def spec(self, recipe: WeightRecipe, tp: int) -> TensorSpec:
        dtype = recipe.attrs.get("dtype", "bfloat16")
        if dtype not in DTYPES:
            raise _error(recipe, "dtype", f"one of {sorted(DTYPES)}", repr(dtype))
        parts = self._part_shapes(recipe, tp)
        return TensorSpec((total(parts, 0), *parts[0][1:]), dtype)

    def pack(self, recipe: WeightRecipe, read: Callable[[str], np.ndarray], tp: int, rank: int) -> Iterator[np.ndarray]:
        dtype = self.spec(recipe, tp).dtype
        axis = SHARD_AXIS[recipe.attrs.get("shard", "none")]

        def part(index: int) -> np.ndarray:
            name, shape = recipe.sources[index], recipe.shapes[index]
            source = read(name)
            if source.shape != shape or source.dtype != DTYPES[dtype][1]:
                found = f"{source.dtype} {list(source.shape)}"
                raise _error(recipe, name, f"{dtype} {list(shape)}", found)
            return source if axis is None else split(source, axis, tp, rank)

        if "interleave" not in recipe.attrs:
            for index in range(len(recipe.sources)):
                yield from chunks(part(index), CHUNK_BYTES)
            return
        gate, up = (part(i).reshape(-1, INTERLEAVE, self._part_shapes(recipe, tp)[i][1]) for i in range(2))
        blocks = max(1, CHUNK_BYTES // (2 * gate[:1].nbytes))
        for start in range(0, gate.shape[0], blocks):
            yield np.stack((gate[start : start + blocks], up[start : start + blocks]), axis=1)

    def unpack(self, recipe: WeightRecipe, packed: np.ndarray, tp: int) -> list[np.ndarray]:
        spec, parts = self.spec(recipe, tp), self._part_shapes(recipe, tp)
        rows = np.ascontiguousarray(packed).reshape(-1).view(DTYPES[spec.dtype][1]).reshape(spec.shape)
        if "interleave" in recipe.attrs:
            blocks = rows.reshape(-1, 2, INTERLEAVE, spec.shape[1])
            return [blocks[:, half].reshape(parts[half]) for half in range(2)]
        return np.split(rows, np.cumsum([shape[0] for shape in parts[:-1]]))

    def _part_shapes(self, recipe: WeightRecipe, tp: int) -> list[tuple[int, ...]]:
        """One rank's shape of every source; raises `PluginError` where the recipe makes no sense for `tp`."""
        shapes, shard = recipe.shapes, recipe.attrs.get("shard", "none")
        if not shapes or len(shapes) != len(recipe.sources):
            raise _error(recipe, "shapes", "one for every source, at least one", f"{len(shapes)} shapes")
        if shard not in SHARD_AXIS:
            raise _error(recipe, "shard", f"one of {list(SHARD_AXIS)}", repr(shard))
        axis = SHARD_AXIS[shard]
        parts = []
        for name, shape in zip(recipe.sources, shapes, strict=True):
            if len(shape) not in (1, 2) or shape[1:] != shapes[0][1:]:
                raise _error(recipe, name, f"rows like those of {list(shapes[0])}", list(shape))
            if axis is not None and (len(shape) != 2 or shape[axis] % tp):
                raise _error(recipe, name, f"a matrix whose {shard} divide by tp={tp}", list(shape))
            parts.append(tuple(size // tp if i == axis else size for i, size in enumerate(shape)))
        if "interleave" in recipe.attrs:
            if recipe.attrs["interleave"] != INTERLEAVE:
                raise _error(recipe, "interleave", str(INTERLEAVE), recipe.attrs["interleave"])
            if len(parts) != 2 or parts[0] != parts[1] or len(parts[0]) != 2 or parts[0][0] % INTERLEAVE:
                expected = f"gate and up of one shape, rows / tp a multiple of {INTERLEAVE} (tp={tp})"
                raise _error(recipe, "shapes", expected, [list(shape) for shape in shapes])
        return parts


def _error(recipe: WeightRecipe, what: str, expected: str, found: object) -> PluginError:
    where = recipe.sources[0] if recipe.sources else "no source"
    return PluginError(f"dense_gemm packer ({where}): {what}: expected {expected}, found {found}")


PACKER = DensePacker()
