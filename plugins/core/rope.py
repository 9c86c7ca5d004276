"""YaRN rotary frequencies, shared by the target's and the drafter's attention."""

from __future__ import annotations

import math

import numpy as np

# The attributes that every operator with RoPE carries (see `inv_freq`).
ROPE_ATTRS = {
    "rope_theta": "float",
    "rope_factor": "float",  # 1.0: plain RoPE
    "rope_original_max": "int",  # original_max_position_embeddings
    "rope_beta_fast": "float",
    "rope_beta_slow": "float",
    "rope_amplitude": "float",  # factor on cos and sin (1.0 for K2.6, see docs)
}


def inv_freq(
    dim: int, theta: float, factor: float, original_max: int, beta_fast: float, beta_slow: float
) -> np.ndarray:
    """float32 [dim / 2] angular frequencies of YaRN (Peng et al. 2023, as in DeepSeek-V3's reference code).

    Frequencies that turn more than `beta_fast` times within `original_max` positions are kept, those that turn
    less than `beta_slow` times are divided by `factor`, with a linear ramp over the index between.
    """
    # float32 roundings in transformers' order: at positions of 2e5 an ulp is an angle of 0.01. Powers are rounded
    # correctly (by way of float64), as torch's are but for an ulp here and there.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    power = (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)
    extrapolated = np.float32(1) / power
    if factor == 1.0:
        return extrapolated

    def dimension(turns: float) -> float:
        return dim * math.log(original_max / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high: float = min(math.ceil(dimension(beta_slow)), dim - 1)
    if high == low:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    interpolated = np.float32(1) / (np.float32(factor) * power)
    kept = 1 - ramp
    return (interpolated * (1 - kept) + extrapolated * kept).astype(np.float32)


def inv_freq_of(attrs: dict[str, float], dim: int) -> np.ndarray:
    """`inv_freq` from an operator's attributes."""
    return inv_freq(
        dim,
        attrs["rope_theta"],
        attrs["rope_factor"],
        int(attrs["rope_original_max"]),
        attrs["rope_beta_fast"],
        attrs["rope_beta_slow"],
    )
