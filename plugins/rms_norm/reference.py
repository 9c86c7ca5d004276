"""Reference of `rms_norm` in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * cast(x * rsqrt(mean(x^2) + eps)) over the last axis (Zhang and Sennrich 2019).

    x [..., H], weight [H] in the dtype of x. The statistics and the scaling are float32 (float64 for float64
    x); the result is rounded to the dtype of x **before** it is multiplied by the weight, the order of
    transformers' DeepseekV3RMSNorm. Multiplying first and rounding once differs by up to one bfloat16 ulp.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
