"""Reference of `embed` in plain torch."""

from __future__ import annotations

import torch


def embed(tokens: torch.Tensor, table: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """tokens int32 [T], table [V, H] -> [T, H].

    The table holds ids tp_rank * V .. tp_rank * V + V - 1; other ids give zeros.
    """
    rows = table.shape[0]
    local = tokens - tp_rank * rows
    other = (local < 0) | (local >= rows)
    # fill rather than multiply by zero: a NaN in the row that stands in must not come through
    return table.index_select(0, local.masked_fill(other, 0)).masked_fill_(other[:, None], 0)
