"""Torch pieces that several references share. Imported by reference.py files only (it needs torch)."""

from __future__ import annotations

import torch


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 for float64 operands, else float32: the dtype in which references rotate and take the
    softmax."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """float32 [T, dim / 2]: float32(position) * float32(inv_freq), rounded once as in transformers. At
    positions of 1e5 and more a float64 table differs visibly, so float64 references use it too."""
    return positions.to(torch.float32)[:, None] * inv_freq


def rotate_pairs(x: torch.Tensor, angle: torch.Tensor, amplitude: float) -> torch.Tensor:
    """RoPE on interleaved pairs: (a, b) -> amplitude * (a cos - b sin, a sin + b cos), order kept.

    x [T, heads, dim]; angle float32 [T, dim / 2].
    """
    turn = torch.polar(torch.full_like(angle, amplitude), angle)[:, None]
    pairs = torch.view_as_complex(x.to(compute_dtype(x)).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rotate_halves(x: torch.Tensor, angle: torch.Tensor, amplitude: float) -> torch.Tensor:
    """RoPE on (i, i + dim / 2) pairs, as in Llama and Qwen: x cos + rotate_half(x) sin.

    x [T, heads, dim]; angle float32 [T, dim / 2].
    """
    dtype = compute_dtype(x)
    cos, sin = (amplitude * angle.cos()).to(dtype)[:, None], (amplitude * angle.sin()).to(dtype)[:, None]
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def paged_rows(pool: torch.Tensor, pages: torch.Tensor, start: int, stop: int, page_size: int) -> torch.Tensor:
    """Rows of positions start .. stop - 1 of one request, [stop - start, ...].

    pool [S, ...]: one row a KV slot. pages i32: the request's row of the block table.
    """
    first = start // page_size
    used = pool.unflatten(0, (-1, page_size)).index_select(0, pages[first : -(-stop // page_size)])
    return used.flatten(0, 1)[start - first * page_size : stop - first * page_size]
