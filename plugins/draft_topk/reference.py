"""Reference of `draft_topk`."""

from __future__ import annotations

import numpy as np
import torch


def exact_topk(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [N, K], columns int64 [N, K]) of the K largest entries a row, descending, ties by lowest
    column.

    torch.topk promises no order among equals and may keep any of those at the K-th value, so only that value
    is taken from it. No NaN.
    """
    threshold = torch.topk(logits, top_k, dim=1).values[:, -1:]
    rows, columns = (index.numpy() for index in (logits >= threshold).nonzero(as_tuple=True))
    values = logits.numpy()[rows, columns]
    order = np.lexsort((columns, -values, rows))
    first = np.searchsorted(rows, np.arange(logits.shape[0]))  # rows ascend and keep their places in `order`
    kept = order[first[:, None] + np.arange(top_k)]
    return torch.from_numpy(values[kept]), torch.from_numpy(columns[kept])


def draft_topk(logits: torch.Tensor, block_size: int, top_k: int, tp_rank: int) -> torch.Tensor:
    """Candidates float32 [B D, 2 K + 1] of logits float32 [B bs, V], D = bs - 1.

    Row 0 of a block (the anchor) predicts nothing; row j is depth j. Per row: K logits (descending, ties by
    lowest id), their global ids tp_rank * V + column as int32 bits, and the logsumexp of this rank's
    columns. NaN in a row makes the logsumexp NaN, and so keeps its candidates out of every tree.
    """
    vocabulary = logits.shape[1]
    rows = logits.view(-1, block_size, vocabulary)[:, 1:].reshape(-1, vocabulary)
    total = torch.logsumexp(rows, dim=1)
    if total.isnan().any():
        rows = rows.masked_fill(rows.isnan(), -torch.inf)
    values, columns = exact_topk(rows, top_k)
    out = torch.empty(rows.shape[0], 2 * top_k + 1)
    out[:, :top_k] = values
    out.view(torch.int32)[:, top_k:-1] = columns + tp_rank * vocabulary
    out[:, -1] = total
    return out
