"""Weight packing: how one tensor of the engine is made from checkpoint tensors, for one tensor-parallel rank.

A `WeightRecipe` is data (it is stored in the engine file); the `Packer` it names is code that lives beside the
plugin that reads the layout. Packers stream: a layer of 384 experts is never held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from plugins.core.spec import TensorSpec


@dataclass(frozen=True)
class WeightRecipe:
    """How to make one packed weight.

    packer: name of the packer, "<plugin folder>" (its `pack.PACKER`).
    sources: checkpoint tensor names, in the order that the packer expects; a drafter tensor starts with "draft:".
    shapes: the checkpoint shapes of `sources` (unsharded).
    attrs: JSON-able options of the packer (e.g. {"shard": "rows"}).
    repeat: how often `sources` repeats one pattern (the experts of a layer), so that JSON stays small.
    """

    packer: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    repeat: int = 1
    patterns: tuple[str, ...] = ()

    @staticmethod
    def repeated(
        packer: str,
        patterns: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        repeat: int,
        attrs: dict[str, Any],
    ) -> WeightRecipe:
        """A recipe over `repeat` copies of `patterns`, in which "{}" stands for 0 .. repeat - 1."""
        sources = tuple(pattern.replace("{}", str(i)) for i in range(repeat) for pattern in patterns)
        return WeightRecipe(packer, sources, shapes * repeat, attrs, repeat, patterns)

    def to_json(self) -> dict[str, Any]:
        once = len(self.sources) // self.repeat
        return {
            "packer": self.packer,
            "sources": list(self.patterns or self.sources),
            "shapes": [list(shape) for shape in self.shapes[:once]],
            "attrs": self.attrs,
            "repeat": self.repeat,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> WeightRecipe:
        shapes = tuple(tuple(shape) for shape in value["shapes"])
        sources = tuple(value["sources"])
        if value["repeat"] > 1:
            return WeightRecipe.repeated(value["packer"], sources, shapes, value["repeat"], value["attrs"])
        return WeightRecipe(value["packer"], sources, shapes, value["attrs"])

    def spec(self, tp: int) -> TensorSpec:
        """Spec of the packed tensor on one of `tp` ranks."""
        return get_packer(self.packer).spec(self, tp)


class Packer:
    """Base of the packers. Arrays use the storage dtypes of `plugins.core.spec.DTYPES` (bfloat16 as uint16)."""

    layout_version: int = 1

    def spec(self, recipe: WeightRecipe, tp: int) -> TensorSpec:
        """Spec of the packed tensor of one rank; raises `PluginError` where the shapes cannot be sharded."""
        raise NotImplementedError

    def pack(self, recipe: WeightRecipe, read: Callable[[str], np.ndarray], tp: int, rank: int) -> Iterator[np.ndarray]:
        """Yield the packed bytes of `rank` in order, as contiguous arrays of a few MB to a few tens of MB each.

        `read(name)` gives a read-only view of a checkpoint tensor (memory-mapped, unsharded); it is called just
        before the tensor is used, so that pages can be dropped behind the stream. Yielded arrays are written to
        disk by another thread: they must not be changed afterwards. The bytes must be the same in every run.
        """
        raise NotImplementedError

    def unpack(self, recipe: WeightRecipe, packed: np.ndarray, tp: int) -> list[np.ndarray]:
        """Inverse of `pack` for one rank: this rank's part of every source, bit-exact, in checkpoint layout."""
        raise NotImplementedError


def split(array: np.ndarray, axis: int, tp: int, rank: int) -> np.ndarray:
    """Rank `rank`'s view of `array`, cut in `tp` equal parts along `axis`."""
    width = array.shape[axis] // tp
    index: list[slice] = [slice(None)] * array.ndim
    index[axis] = slice(rank * width, (rank + 1) * width)
    return array[tuple(index)]


def chunks(array: np.ndarray, limit: int = 16 << 20) -> Iterator[np.ndarray]:
    """Contiguous pieces of `array` along axis 0, at most about `limit` bytes each (at least one row)."""
    rows = max(1, limit // max(1, array[:1].nbytes))
    for start in range(0, array.shape[0], rows):
        yield np.ascontiguousarray(array[start : start + rows])


_PACKERS: dict[str, Packer] = {}


def get_packer(name: str) -> Packer:
    """The packer of plugin folder `name`, imported on first use."""
    if name not in _PACKERS:
        _PACKERS[name] = import_module(f"plugins.{name}.pack").PACKER
    return _PACKERS[name]


def total(shapes: Sequence[tuple[int, ...]], axis: int) -> int:
    """Sum of the sizes of `shapes` along `axis`."""
    return sum(shape[axis] for shape in shapes)
