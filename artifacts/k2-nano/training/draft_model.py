"""Plain torch definition of the DFlash block drafter of K2-Nano.

A block is the last committed token (the anchor) followed by seven mask tokens; its rows see each other and the
projected target states of all positions before the anchor. Row j predicts the token j places after the anchor.

Shapes: B sequences, S context positions, Q = blocks * 8 rows, H hidden, A heads of 128.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from model import MLP, Weight, linear, rms_norm, yarn_inv_freq
from torch import Tensor, nn


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding: x [B,A,S,128], cos and sin broadcastable to [B,A,S,64] (float32)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class DraftAttention(nn.Module):
    """Attention whose keys and values come from the context rows and from the block rows."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, d, std = c["hidden_size"], c["head_dim"], c["initializer_range"]
        self.dim, self.eps = d, c["rms_norm_eps"]
        self.groups = c["num_attention_heads"] // c["num_key_value_heads"]
        self.q_proj = Weight(c["num_attention_heads"] * d, h, std=std)
        self.k_proj = Weight(c["num_key_value_heads"] * d, h, std=std)
        self.v_proj = Weight(c["num_key_value_heads"] * d, h, std=std)
        self.o_proj = Weight(h, c["num_attention_heads"] * d, std=std)
        self.q_norm = Weight(d)
        self.k_norm = Weight(d)

    def heads(self, x: Tensor) -> Tensor:
        """[B,S,A*128] -> [B,A,S,128]."""
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B,Q,H] normed block rows, context [B,S,H], rope tables for the S + Q rows, mask [B or 1,1,Q,S+Q]."""
        cos, sin = rope
        q = rms_norm(self.heads(linear(x, self.q_proj.weight)), self.q_norm.weight, self.eps, x.dtype)
        q = rotate_halves(q, cos[:, :, -x.shape[1] :], sin[:, :, -x.shape[1] :])
        rows = torch.cat((context, x), 1)
        k = rms_norm(self.heads(linear(rows, self.k_proj.weight)), self.k_norm.weight, self.eps, x.dtype)
        k = rotate_halves(k, cos, sin)
        v = self.heads(linear(rows, self.v_proj.weight))
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return linear(o.transpose(1, 2).flatten(-2), self.o_proj.weight)


class DraftLayer(nn.Module):
    """One drafter layer; the residual stream is float32."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.eps = c["rms_norm_eps"]
        self.input_layernorm = Weight(c["hidden_size"])
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = Weight(c["hidden_size"])
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"], c["initializer_range"], c["initializer_range"])

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B,Q,H] float32 -> the same after the layer."""
        dtype = context.dtype
        x = x + self.self_attn(rms_norm(x, self.input_layernorm.weight, self.eps, dtype), context, rope, mask).float()
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps, dtype)).float()


class Draft(nn.Module):
    """The drafter; the embedding and the head are the target's."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        h, std = config["hidden_size"], config["initializer_range"]
        self.config, self.dtype, self.block = config, dtype, config["block_size"]
        self.fc = Weight(h, h * len(config["target_layer_ids"]), std=std)
        self.hidden_norm = Weight(h)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Weight(h)
        inv_freq = yarn_inv_freq(config["rope_scaling"], config["rope_theta"], config["head_dim"])
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.amplitude = config["rope_scaling"]["attention_factor"]

    def context(self, states: list[Tensor]) -> Tensor:
        """The target's residual stream after every layer, each [B,S,H] -> drafter context [B,S,H]."""
        taps = torch.cat([states[i] for i in self.config["target_layer_ids"]], -1).to(self.dtype)
        return rms_norm(linear(taps, self.fc.weight), self.hidden_norm.weight, self.config["rms_norm_eps"], self.dtype)

    def forward(self, context: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor, head: Tensor) -> Tensor:
        """Draft one block at each anchor.

        context [B,S,H]; ids [B,S] tokens; anchors [B or 1, N] positions of the anchor tokens; embedding and head are
        the target's [V,H] -> logits [B,N,7,V] of the seven positions after each anchor.
        """
        batch, length = ids.shape
        count = anchors.shape[1]
        offsets = torch.arange(self.block, device=ids.device)
        blocks = ids.new_full((batch, count, self.block), self.config["mask_token_id"])
        blocks[:, :, 0] = ids.gather(1, anchors.expand(batch, -1))
        x = F.embedding(blocks.flatten(1), embedding).float()
        block_positions = (anchors[..., None] + offsets).flatten(1)
        context_positions = torch.arange(length, device=ids.device)
        positions = torch.cat((context_positions.expand(len(anchors), -1), block_positions), 1)
        angle = positions.float()[:, None, :, None] * self.inv_freq
        rope = (angle.cos() * self.amplitude, angle.sin() * self.amplitude)
        starts = anchors.repeat_interleave(self.block, 1)[:, :, None]
        owner = torch.arange(count, device=ids.device).repeat_interleave(self.block)
        same_block = (owner[:, None] == owner).expand(len(anchors), -1, -1)
        mask = torch.cat((context_positions < starts, same_block), -1)[:, None]
        for layer in self.layers:
            x = layer(x, context, rope, mask)
        x = x.unflatten(1, (count, self.block))[:, :, 1:]
        return linear(rms_norm(x, self.norm.weight, self.config["rms_norm_eps"], self.dtype), head)
