"""Reference of `int4_marlin_gemm` in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from plugins.int4_marlin_gemm.pack import rows_of_tiles


def dequantise(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Checkpoint words and scales -> bfloat16 weights [N, K] (compressed-tensors "pack-quantized", 4 bits).

    words int32 [N, K / 8]: column k is bits 4 (k % 8) .. 4 (k % 8) + 3 of word k // 8, plus 8.
    scales bfloat16 [N, K / 32]. W[n, k] = q[n, k] * scales[n, k // 32], the product rounded to bfloat16.
    """
    rows, groups = scales.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = ((words[..., None] >> shifts) & 15) - 8  # the mask undoes the sign that the shift drags in
    return (nibbles.reshape(rows, groups, -1).to(torch.bfloat16) * scales[..., None]).reshape(rows, -1)


def dequantise_tiles(weight: torch.Tensor, stage: str, dtype: torch.dtype) -> torch.Tensor:
    """Packed uint8 [E, N/32, K/32, 576] -> [E, N, K]; for gate_up all gate rows, then all up rows."""
    experts, tile_rows, tile_columns, _ = weight.shape
    dense = torch.empty(experts, 32 * tile_rows, 32 * tile_columns, dtype=dtype)
    for expert in range(experts):
        parts = rows_of_tiles(weight[expert].numpy(), stage)
        dense[expert] = torch.cat(
            [dequantise(torch.from_numpy(w), torch.from_numpy(s).view(torch.bfloat16)) for w, s in parts]
        )
    return dense


def _grouped(x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """y[i] = weight[e] x[rows[i]] for bounds[e] <= i < bounds[e + 1]; weight [E, N, K] -> [len(rows), N]."""
    gathered = x.index_select(0, rows)
    y = x.new_empty(rows.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end > start:
            torch.mm(gathered[start:end], weight[expert].t(), out=y[start:end])
    return y


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_routes: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """x [T, H], weight [E, 2 I, H] (gate rows, then up rows) -> [T k, I]: row t k + j is silu(gate) * up of
    token t's j-th expert, zeros where there is no route.
    """
    bounds = expert_offsets.tolist()
    routes = sorted_routes[: bounds[-1]]
    gate, up = _grouped(x, routes // top_k, weight, bounds).chunk(2, dim=-1)
    return x.new_zeros(sorted_routes.shape[0], gate.shape[1]).index_copy_(0, routes.long(), silu(gate) * up)


def down(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_offsets: torch.Tensor,
    sorted_routes: torch.Tensor,
    route_weights: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """x [T k, I], weight [E, H, I], route_weights [T, k], shared [T, H] or None -> [T, H]:
    shared[t] + sum over j of route_weights[t, j] * (weight[expert of route t k + j] x[t k + j]).

    The sum is float32 (float64 for float64 x), j ascending, then shared, and rounded once.
    """
    tokens, top_k = route_weights.shape
    bounds = expert_offsets.tolist()
    routes = sorted_routes[: bounds[-1]].long()
    wide = torch.promote_types(x.dtype, torch.float32)
    expert_out = _grouped(x, routes, weight, bounds).to(wide)
    weighted = expert_out * route_weights.reshape(-1).to(wide).index_select(0, routes)[:, None]
    by_route = weighted.new_zeros(tokens * top_k, weight.shape[1]).index_copy_(0, routes, weighted)
    total = by_route.view(tokens, top_k, -1).sum(1)
    return (total if shared is None else total + shared).to(x.dtype)
