"""The two halves of kv_b_proj as separate weights: W_UK for absorption and W_UV for the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from plugins.core.packing import Packer, WeightRecipe, chunks, split
from plugins.core.plugin import PluginError
from plugins.core.spec import TensorSpec

PARTS = ("uk", "uv")


class KvBPacker(Packer):
    """kv_b_proj [heads (n + v), C] bfloat16 -> w_uk [h, n, C] or w_uv [h, v, C], heads split over ranks.

    Per head the checkpoint holds n rows of W_UK, then v rows of W_UV. attrs: part ("uk" or "uv"), num_heads
    (of all ranks), qk_nope_head_dim (n), v_head_dim (v).
    """

    def _shape(self, recipe: WeightRecipe) -> tuple[int, int, int]:
        """(heads, n + v, C) of the source, checked against the attributes."""
        attrs = recipe.attrs
        heads, width = attrs["num_heads"], attrs["qk_nope_head_dim"] + attrs["v_head_dim"]
        if attrs["part"] not in PARTS:
            raise PluginError(f"mla_attention: part: expected one of {PARTS}, found {attrs['part']!r}")
        if len(recipe.shapes) != 1 or len(recipe.shapes[0]) != 2 or recipe.shapes[0][0] != heads * width:
            raise PluginError(
                f"mla_attention: kv_b_proj: expected one source [{heads} * {width}, C], found {recipe.shapes}"
            )
        return heads, width, recipe.shapes[0][1]

    def _rows(self, recipe: WeightRecipe) -> slice:
        """The rows of the part within one head."""
        nope = recipe.attrs["qk_nope_head_dim"]
        return slice(0, nope) if recipe.attrs["part"] == "uk" else slice(nope, None)

    def spec(self, recipe: WeightRecipe, tp: int) -> TensorSpec:
        heads, width, latent = self._shape(recipe)
        if heads % tp:
            raise PluginError(f"mla_attention: kv_b_proj: expected heads in multiples of tp={tp}, found {heads}")
        rows = len(range(width)[self._rows(recipe)])
        return TensorSpec((heads // tp, rows, latent), "bfloat16")

    def pack(self, recipe: WeightRecipe, read: Callable[[str], np.ndarray], tp: int, rank: int) -> Iterator[np.ndarray]:
        heads = read(recipe.sources[0]).reshape(self._shape(recipe))
        yield from chunks(split(heads, 0, tp, rank)[:, self._rows(recipe)])

    def unpack(self, recipe: WeightRecipe, packed: np.ndarray, tp: int) -> list[np.ndarray]:
        """The rank's rows of this part alone, [h n, C] or [h v, C] (the other part is another weight)."""
        return [packed.reshape(-1, packed.shape[-1])]


PACKER = KvBPacker()
