"""Reference of `moe_route` in plain torch."""

from __future__ import annotations

import torch


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    row_request: torch.Tensor,
    top_k: int,
    routed_scaling_factor: float,
    norm_topk_prob: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights (DeepSeek-V3, section 2.1.2, with one group).

    x [T, H], weight [E, H], bias [E], row_request int32 [T] -> (weights [T, k], experts int32 [T, k]).
      scores = sigmoid(x weight^T)                in float32 (float64 for float64 x)
      experts = top k of scores + bias            the lowest index first among equals
      weights = scores[experts]                   the bias serves the selection only
      weights /= sum(weights) + 1e-20             if norm_topk_prob
      weights *= routed_scaling_factor
    Rows with row_request -1 get weights 0 and experts -1.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.sigmoid(x.to(wide) @ weight.to(wide).t())
    # a stable sort, since torch.topk leaves the order of equal values open
    experts = torch.sort(scores + bias.to(wide), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, experts)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    padding = (row_request < 0)[:, None]
    weights = (weights * routed_scaling_factor).masked_fill(padding, 0)
    return weights, experts.to(torch.int32).masked_fill(padding, -1)


def routes_by_expert(route_experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """route_experts int32 [T, k], -1 for none -> expert_offsets int32 [E + 1], sorted_routes int32 [T k]."""
    flat = route_experts.reshape(-1)
    key = flat.masked_fill(flat < 0, num_experts)  # routes that do not exist go to the end
    ordered, routes = torch.sort(key, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=key.dtype)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    return offsets, routes.to(torch.int32).masked_fill_(ordered == num_experts, -1)
