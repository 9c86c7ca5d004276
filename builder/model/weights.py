"""Weights of the model definition: meta parameters that know how they are made from the checkpoint."""

from __future__ import annotations

from torch import nn

from builder.model.ops import empty
from plugins.core.packing import WeightRecipe


def weight(recipe: WeightRecipe) -> nn.Parameter:
    """Unsharded meta parameter in the packed layout of `recipe`, which stays attached as `.recipe`."""
    parameter = nn.Parameter(empty(recipe.spec(tp=1)), requires_grad=False)
    parameter.recipe = recipe  # type: ignore[attr-defined]
    return parameter


def matrix(
    *sources: str,
    shapes: list[tuple[int, ...]],
    shard: str = "none",
    interleave: int = 0,
    dtype: str = "bfloat16",
) -> nn.Parameter:
    """Row-major matrix or vector made of one or more checkpoint tensors stacked along rows (`dense_gemm` packer)."""
    attrs: dict[str, object] = {"shard": shard, "dtype": dtype}
    if interleave:
        attrs["interleave"] = interleave
    return weight(WeightRecipe("dense_gemm", sources, tuple(shapes), attrs))


def gate_up(prefix: str, hidden_size: int, intermediate_size: int) -> nn.Parameter:
    """[2 I, H]: gate and up rows alternating 16 by 16, as `dense_gemm` with silu_mul reads them."""
    shape = (intermediate_size, hidden_size)
    names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    return matrix(*names, shapes=[shape, shape], shard="rows", interleave=16)


def recipes_of(module: nn.Module) -> dict[str, WeightRecipe]:
    """Recipe of every parameter of `module` by its qualified name."""
    return {name: parameter.recipe for name, parameter in module.named_parameters()}  # type: ignore[attr-defined]
