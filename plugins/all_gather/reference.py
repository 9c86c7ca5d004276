"""Reference of `all_gather` in plain torch, given the operand of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def all_gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T, N] of every rank, in rank order -> [T, N * world]."""
    return torch.cat(list(parts), dim=1)
