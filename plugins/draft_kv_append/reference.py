"""Reference of `draft_kv_append`."""

from __future__ import annotations

import torch

from plugins.core.reference_math import angles, rotate_halves
from plugins.rms_norm.reference import rms_norm


def draft_kv_append(
    kv: torch.Tensor,
    k_norm: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    inv_freq: torch.Tensor,
    amplitude: float,
    eps: float,
) -> None:
    """Write rope(rms_norm(keys)) and values of A rows to kv_layer [2, S, g, d] at `slots`.

    kv [A, 2 g d]: keys, then values. k_norm [d]; positions, slots int32 [at least A]; inv_freq float32 [d /
    2]. Padding rows share slot 0, which nothing reads.
    """
    rows = kv.shape[0]
    keys, values = kv.view(rows, 2, *kv_layer.shape[2:]).unbind(1)
    keys = rotate_halves(rms_norm(keys, k_norm, eps), angles(positions[:rows], inv_freq), amplitude)
    where = slots[:rows].long()
    kv_layer[0, where] = keys.to(kv_layer.dtype)
    kv_layer[1, where] = values.to(kv_layer.dtype)
