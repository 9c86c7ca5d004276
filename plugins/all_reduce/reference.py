"""Reference of `all_reduce` in plain torch, given the operand of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plugins.rms_norm.reference import rms_norm


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((p0 + p1) + p2) + ... in at least float32."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total


def all_reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T, H] of every rank, in rank order -> their sum, accumulated in float32 and rounded once."""
    return _sum(parts).to(parts[0].dtype)


def all_reduce_norm(
    parts: Sequence[torch.Tensor], residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, rms_norm(h)) with h = residual + sum of parts, accumulated in float32 and rounded once.

    h has the dtype of the residual; the norm sees the rounded h, as it does where the operators are separate.
    """
    hidden = (residual + _sum(parts)).to(residual.dtype)
    return hidden, rms_norm(hidden, norm_weight, eps)
