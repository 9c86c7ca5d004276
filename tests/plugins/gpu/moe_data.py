"""Random experts on a CUDA device, and the float64 reference of both stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_BYTES = 576


def random_tiles(experts: int, tile_rows: int, tile_columns: int, generator: torch.Generator) -> torch.Tensor:
    """Packed weights uint8 [E, N/32, K/32, 576]: random nibbles, scales 0.005 to 0.015."""
    tiles = torch.empty(experts, tile_rows, tile_columns, TILE_BYTES, dtype=torch.uint8, device="cuda")
    for tile in tiles:
        tile.random_(0, 256, generator=generator)
        scales = torch.rand(tile_rows, tile_columns, 32, device="cuda", generator=generator) * 0.01 + 0.005
        tile[..., 512:] = scales.bfloat16().view(torch.uint8)
    return tiles


def dense_rows(tiles: torch.Tensor) -> torch.Tensor:
    """One expert's tiles uint8 [N/32, K/32, 576] -> float64 [N, K] in tile order, exact (nothing is rounded)."""
    rows, columns, _ = tiles.shape
    words = tiles[..., :512].contiguous().view(torch.int32).view(rows, columns, 8, 4, 4)  # [.., g, t, row group]
    shifts = torch.arange(0, 32, 4, device=tiles.device, dtype=torch.int32)
    nibbles = ((words[..., None] >> shifts) & 15) - 8  # [.., g, t, row group, 8]
    scales = tiles[..., 512:].contiguous().view(torch.bfloat16).view(rows, columns, 8, 1, 4, 1)
    values = nibbles.double() * scales.double()
    return values.permute(0, 4, 2, 1, 3, 5).reshape(rows * 32, columns * 32)


@dataclass
class Lists:
    """`moe_route`'s lists on the device, and the experts on the host."""

    offsets: torch.Tensor
    routes: torch.Tensor
    bounds: list[int]


def gate_up_reference(x: torch.Tensor, weight: torch.Tensor, lists: Lists, top_k: int) -> torch.Tensor:
    """float64 [T k, I], zeros where there is no route."""
    out = x.new_zeros(lists.routes.shape[0], weight.shape[1] * 16, dtype=torch.float64)
    for expert, (start, end) in enumerate(zip(lists.bounds, lists.bounds[1:], strict=False)):
        if end > start:
            routes = lists.routes[start:end].long()
            y = x[routes // top_k].double() @ dense_rows(weight[expert]).t()
            gate, up = y.view(len(routes), -1, 2, 16).unbind(2)
            out[routes] = (torch.nn.functional.silu(gate) * up).reshape(len(routes), -1)
    return out


def down_reference(
    x: torch.Tensor, weight: torch.Tensor, lists: Lists, route_weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """float64 [T, H]."""
    tokens, top_k = route_weights.shape
    out = x.new_zeros(tokens, weight.shape[1] * 32, dtype=torch.float64)
    if shared is not None:
        out += shared.double()
    for expert, (start, end) in enumerate(zip(lists.bounds, lists.bounds[1:], strict=False)):
        if end > start:
            routes = lists.routes[start:end].long()
            y = x[routes].double() @ dense_rows(weight[expert]).t()
            out[routes // top_k] += y * route_weights.view(-1)[routes].double()[:, None]
    return out


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """|found - reference| / |reference|; NaN where anything is NaN."""
    return ((found.double() - reference).norm() / reference.norm()).item()
