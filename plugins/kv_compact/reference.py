"""Reference of `kv_compact`."""

from __future__ import annotations

import torch


def kv_compact(
    path_rows: torch.Tensor,
    num_emitted: torch.Tensor,
    first_row: torch.Tensor,
    row_slot: torch.Tensor,
    kv_pool: torch.Tensor,
) -> None:
    """Move the KV of row path_rows[r, i] to the slot of row first_row[r] + i, i < num_emitted[r], in all
    layers.

    path_rows int32 [R, path]; num_emitted, first_row int32 [R]; row_slot int32 [T]; kv_pool [L, S, width],
    written in place. Everything is read before anything is written, since a destination may be another row's
    source.
    """
    index = torch.arange(path_rows.shape[1])
    target = first_row[:, None] + index
    moved = (index < num_emitted[:, None]) & (path_rows != target)
    if moved.any():
        kv_pool[:, row_slot[target[moved]].long()] = kv_pool[:, row_slot[path_rows[moved].long()].long()]
