"""Reference of `dense_gemm` in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def gemm(x: torch.Tensor, weight: torch.Tensor, widen: bool = False) -> torch.Tensor:
    """x [T, K], weight [N, K] -> x W^T [T, N].

    In the dtype of x, or with `widen` in at least float32 without a rounding to the dtype of x in between.
    """
    if widen:
        wide = torch.promote_types(x.dtype, torch.float32)
        return linear(x.to(wide), weight.to(wide))
    return linear(x, weight)


def gemm_silu_mul(x: torch.Tensor, weight: torch.Tensor, widen: bool = False) -> torch.Tensor:
    """x [T, K], weight [N, K] (N/2 gate rows, then N/2 up rows) -> silu(x gate^T) * (x up^T) [T, N/2]."""
    gate, up = gemm(x, weight, widen).chunk(2, dim=-1)
    return silu(gate) * up
