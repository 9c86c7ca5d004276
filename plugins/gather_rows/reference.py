"""Reference of `gather_rows` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_rows(rows: torch.Tensor, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """rows int32 [A], xs of [T, H] -> [A, H * len(xs)]; zeros where rows is -1."""
    padding = rows < 0
    index = rows.masked_fill(padding, 0)
    gathered = torch.cat([x.index_select(0, index) for x in xs], dim=1)
    return gathered.masked_fill_(padding[:, None], 0)  # not a product: row 0 may hold NaN
