"""Reference of `mla_prepare`: latent attention (DeepSeek-V2, arXiv 2405.04434) up to the scores."""

import torch

from plugins.core.reference_math import angles, rotate_pairs
from plugins.rms_norm.reference import rms_norm


def mla_prepare(
    qkv_a: torch.Tensor,
    q_a_norm: torch.Tensor,
    kv_a_norm: torch.Tensor,
    q_b: torch.Tensor,
    w_uk: torch.Tensor,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    kv_layer: torch.Tensor,
    inv_freq: torch.Tensor,
    amplitude: float,
    eps: float,
    absorb: bool,
) -> torch.Tensor:
    """q [T, h, C + P] (absorb: [W_UK^T q_nope ; rope(q_rope)]) or [T, h, n + P] ([q_nope ; rope(q_rope)]).

    qkv_a [T, Q + C + P]: the joint down projection. q = rms_norm(qkv_a[:, :Q]) q_b^T, per head n + P wide.
    Writes [rms_norm(latent) ; rope(k_rope)] of every row to kv_layer [S, C + P] at row_slot; the rotated
    part stays in interleaved order. Padding rows share slot 0, which nothing reads. inv_freq float32 [P / 2].
    """
    rows = qkv_a.shape[0]
    heads, nope, latent = w_uk.shape
    q_rank = q_b.shape[1]
    angle = angles(positions[:rows], inv_freq)
    c_q, c_kv, k_rope = qkv_a.split((q_rank, latent, qkv_a.shape[1] - q_rank - latent), dim=1)

    q = (rms_norm(c_q, q_a_norm, eps) @ q_b.T).unflatten(1, (heads, -1))
    q_nope, q_rope = q[..., :nope], rotate_pairs(q[..., nope:], angle, amplitude)
    if absorb:
        q_nope = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)

    k_rope = rotate_pairs(k_rope[:, None], angle, amplitude)[:, 0]
    entry = torch.cat((rms_norm(c_kv, kv_a_norm, eps), k_rope), dim=1)
    kv_layer[row_slot[:rows].long()] = entry.to(kv_layer.dtype)
    return torch.cat((q_nope, q_rope), dim=-1)
