"""Reference of `mla_attention`: latent attention (DeepSeek-V2, arXiv 2405.04434), paged, with a tree mask."""

from __future__ import annotations

import torch

from plugins.core.reference_math import compute_dtype, paged_rows


def visible_rows(mask: torch.Tensor | None, first: int, rows: int) -> torch.Tensor:
    """bool [rows, rows]: whether row first + i sees row first + j of its request.

    mask uint32 [T, words]: bit j % 32 of word j // 32 in line first + i. None: causal, j <= i.
    """
    if mask is None:
        return torch.ones(rows, rows, dtype=torch.bool).tril()
    bit = torch.arange(rows, dtype=torch.int32)
    words = mask.view(torch.int32)[first : first + rows].index_select(1, bit // 32)
    return (words >> (bit % 32) & 1).bool()


def attention_weights(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax of scores [..., rows, N] in place; `visible` [rows, rows] masks the last rows columns.

    A row that sees nothing gets zeros.
    """
    rows = visible.shape[0]
    context = scores.shape[-1] - rows
    scores[..., context:].masked_fill_(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    return weights if context else weights.masked_fill_(~visible.any(1)[:, None], 0.0)


def mla_attention(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    first_row: torch.Tensor,
    request_rows: torch.Tensor,
    context_len: torch.Tensor,
    block_table: torch.Tensor,
    kv_layer: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    page_size: int,
    absorbed: bool,
) -> torch.Tensor:
    """[T, h v]: softmax(scale * q . [latent ; k_rope]) over what a row sees, then W_UV; zeros for other rows.

    q [T, h, C + P] (absorbed) or [T, h, n + P]; w_uk [h, n, C]; w_uv [h, v, C]; kv_layer [S, C + P].
    Per request r: rows first_row[r] .. + request_rows[r] - 1 see positions below context_len[r], and the
    rows of this pass (stored from position context_len[r] on) that `mask` shows. All int32 [R], block_table
    [R, pages]. absorbed: u_h = sum_p P c_p and o_h = W_UV,h u_h; else keys W_UK,h c_p and values W_UV,h c_p
    are built first. Softmax in float32, or float64 for float64 q.
    """
    dtype = compute_dtype(q)
    heads, value, latent = w_uv.shape
    nope = w_uk.shape[1]
    # u of every row, absorbed, or its output: one batched W_UV product then serves all requests
    mixed = torch.zeros(heads, q.shape[0], latent if absorbed else value, dtype=dtype)
    lengths = zip(first_row.tolist(), request_rows.tolist(), context_len.tolist(), strict=True)
    for request, (first, rows, context) in enumerate(lengths):
        if rows == 0:
            continue
        kv = paged_rows(kv_layer, block_table[request], 0, context + rows, page_size).to(dtype)
        queries = q[first : first + rows].to(dtype).transpose(0, 1)  # [h, rows, dim]
        visible = visible_rows(mask, first, rows)
        if absorbed:
            scores = (queries.reshape(heads * rows, -1) @ kv.T).view(heads, rows, -1)
            weights = attention_weights(scores.mul_(scale), visible)
            u = weights.view(heads * rows, -1) @ kv[:, :latent]
            mixed[:, first : first + rows] = u.view(heads, rows, latent)
            continue
        c = kv[:, :latent]
        scores = queries[..., :nope] @ (w_uk.to(dtype) @ c.T)
        scores += queries[..., nope:] @ kv[:, latent:].T
        weights = attention_weights(scores.mul_(scale), visible)
        mixed[:, first : first + rows] = weights @ (c @ w_uv.to(dtype).transpose(1, 2))
    out = torch.bmm(mixed, w_uv.to(dtype).transpose(1, 2)) if absorbed else mixed
    return out.transpose(0, 1).flatten(1).to(q.dtype)
