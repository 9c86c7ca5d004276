"""Reference of `draft_attention`: a DFlash block over its context (arXiv 2602.06036), with Qwen3's head
layout."""

from __future__ import annotations

import torch

from plugins.core.reference_math import angles, compute_dtype, paged_rows, rotate_halves
from plugins.rms_norm.reference import rms_norm


def draft_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    draft_requests: torch.Tensor,
    context_len: torch.Tensor,
    draft_start: torch.Tensor,
    block_table: torch.Tensor,
    kv_layer: torch.Tensor,
    inv_freq: torch.Tensor,
    amplitude: float,
    eps: float,
    sliding_window: int,
    page_size: int,
) -> torch.Tensor:
    """[B bs, h d]: grouped-query attention of every block row over context and block; zeros for padding
    blocks.

    qkv [B bs, (h + 2 g) d]; q_norm, k_norm [d]; draft_requests int32 [B] (-1: padding); context_len,
    draft_start int32 [R]; block_table int32 [R, pages]; kv_layer [2, S, g, d]; inv_freq float32 [d / 2].
    Row j of a block of request r has position context_len[r] + j. It sees the context positions from
    draft_start[r] (and among them the last `sliding_window`, if not 0) and, without causality, the whole
    block. Scores are q . k / sqrt(d) with per-head RMS norms and RoPE on q and k; softmax in float32
    (float64 for float64 qkv).
    """
    dtype = compute_dtype(qkv)
    blocks = draft_requests.shape[0]
    groups, dim = kv_layer.shape[2:]
    rows = qkv.view(qkv.shape[0], -1, dim)
    heads = rows.shape[1] - 2 * groups
    block = qkv.shape[0] // blocks

    base = context_len[draft_requests.clamp(min=0).long()]
    angle = angles((base[:, None] + torch.arange(block)).view(-1), inv_freq)
    q = rotate_halves(rms_norm(rows[:, :heads], q_norm, eps), angle, amplitude).to(dtype)
    k = rotate_halves(rms_norm(rows[:, heads : heads + groups], k_norm, eps), angle, amplitude).to(dtype)
    v = rows[:, heads + groups :].to(dtype)

    out = torch.zeros(blocks, block, heads, dim, dtype=dtype)
    for index, request in enumerate(draft_requests.tolist()):
        if request < 0:
            continue
        stop = int(context_len[request])
        start = min(int(draft_start[request]), stop)
        if sliding_window:
            start = max(start, stop - sliding_window)
        own = slice(index * block, (index + 1) * block)
        context = (paged_rows(pool, block_table[request], start, stop, page_size) for pool in kv_layer)
        keys, values = (
            torch.cat((past.to(dtype), new[own])).transpose(0, 1) for past, new in zip(context, (k, v), strict=True)
        )  # [g, N, d]
        # the heads of a group share its keys: [g, (h / g) bs, d]
        queries = q[own].transpose(0, 1).reshape(groups, -1, dim)
        weights = torch.softmax((queries @ keys.transpose(1, 2)).mul_(dim**-0.5), dim=-1)
        out[index] = (weights @ values).view(heads, block, dim).transpose(0, 1)
    return out.view(blocks * block, heads * dim).to(qkv.dtype)
