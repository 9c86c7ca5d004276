"""Plain torch definition of the K2 text model, used to train and evaluate K2-Nano.

Parameter names equal the checkpoint's (without the `language_model.` prefix) except for the routed experts, which are
stacked: mlp.experts.{gate,up} [E, I, H] and mlp.experts.down [E, H, I]. Every token is sent through every expert and
weighted by the routing weight, zero for the experts that were not chosen; at this size that is the fast way.

Shapes: B sequences, S tokens, N = B*S, H hidden, A heads, E experts, I expert width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32  # input columns that share one scale
PREFILL_TOKENS = 131072  # prompt tokens computed together before decoding
MLA_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 codes q [..., in] (int8 in [-8, 7]) and scales [..., in/32] (bfloat16) of weight [..., in]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) * (2 / 15)).clamp_min(1e-8).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return codes.flatten(-2).to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 weight [..., in]: codes (exact in bf16) times bf16 scale, the product rounded to bf16."""
    return (codes.bfloat16().unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(-2)


def fake_quant(weight: Tensor) -> Tensor:
    """The dequantised weight in the forward pass, the identity in the backward pass."""
    return weight + (dequantize(*quantize(weight)).float() - weight).detach()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] transposed, in the dtype of x."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMS norm over the last axis: float32 statistics, cast to dtype, then times the weight."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(dtype) * weight.to(dtype)


def yarn_inv_freq(rope: dict[str, Any], theta: float, dim: int) -> Tensor:
    """YaRN frequencies [dim/2] (float32, radians per position)."""
    extra = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def turns(n: float) -> float:
        return dim * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * n)) / (2 * math.log(theta))

    low = max(math.floor(turns(rope["beta_fast"])), 0)
    high = min(math.ceil(turns(rope["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (extra / rope["factor"] * ramp + extra * (1 - ramp)).float()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotary embedding: x [..., D], cos and sin broadcastable to [..., D/2] (float32)."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Weight(nn.Module):
    """One named weight, so that the state dict carries the checkpoint's names."""

    def __init__(self, *shape: int, std: float | None = None) -> None:
        super().__init__()
        value = torch.ones(*shape) if std is None else torch.randn(*shape) * std
        self.weight = nn.Parameter(value)


class Attention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, heads, std = c["hidden_size"], c["num_attention_heads"], c["initializer_range"]
        self.heads, self.nope, self.rope = heads, c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.v_dim, self.rank = c["v_head_dim"], c["kv_lora_rank"]
        self.q_a_proj = Weight(c["q_lora_rank"], h, std=std)
        self.q_a_layernorm = Weight(c["q_lora_rank"])
        self.q_b_proj = Weight(heads * (self.nope + self.rope), c["q_lora_rank"], std=std)
        self.kv_a_proj_with_mqa = Weight(self.rank + self.rope, h, std=std)
        self.kv_a_layernorm = Weight(self.rank)
        self.kv_b_proj = Weight(heads * (self.nope + self.v_dim), self.rank, std=std)
        self.o_proj = Weight(h, heads * self.v_dim, std=std / math.sqrt(2 * c["num_hidden_layers"]))
        scaling = c["rope_scaling"]
        m = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
        self.scale = (self.nope + self.rope) ** -0.5 * m * m

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,S,H] -> q_nope [B,S,A,128], q_rope [B,S,A,64], latent [B,S,576] (512 normalised, 64 rotated)."""
        q = linear(x, self.q_a_proj.weight)
        q = linear(rms_norm(q, self.q_a_layernorm.weight, MLA_NORM_EPS, x.dtype), self.q_b_proj.weight)
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split([self.nope, self.rope], -1)
        c, k_rope = linear(x, self.kv_a_proj_with_mqa.weight).split([self.rank, self.rope], -1)
        c = rms_norm(c, self.kv_a_layernorm.weight, MLA_NORM_EPS, x.dtype)
        q_rope = rotate_pairs(q_rope, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return q_nope, q_rope, torch.cat((c, rotate_pairs(k_rope, cos, sin)), -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention over a whole sequence: x [B,S,H] -> output [B,S,H] and the latents [B,S,576]."""
        q_nope, q_rope, latent = self.project(x, cos, sin)
        c, k_rope = latent.split([self.rank, self.rope], -1)
        k_nope, v = linear(c, self.kv_b_proj.weight).unflatten(-1, (self.heads, -1)).split([self.nope, self.v_dim], -1)
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope.unsqueeze(-2).expand(-1, -1, self.heads, -1)), -1).transpose(1, 2)
        v = F.pad(v, (0, self.rope)).transpose(1, 2)  # equal head sizes admit the flash kernel
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        o = o.transpose(1, 2)[..., : self.v_dim].flatten(-2)
        return linear(o, self.o_proj.weight), latent

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, positions: Tensor, limit: int) -> Tensor:
        """One token a sequence, absorbed form. x [B,1,H]; cache [B,L,576] is written at positions [B]; keys beyond
        `limit` (host bound on positions + 1) are not read."""
        q_nope, q_rope, latent = self.project(x, cos, sin)
        cache[torch.arange(len(x), device=x.device), positions] = latent[:, 0]
        keys = cache[:, :limit]
        kv_b = self.kv_b_proj.weight.to(x.dtype).unflatten(0, (self.heads, -1))
        w_uk, w_uv = kv_b.split([self.nope, self.v_dim], 1)
        q = torch.cat((torch.einsum("bad,adr->bar", q_nope[:, 0], w_uk), q_rope[:, 0]), -1)
        scores = (q @ keys.transpose(1, 2)).float() * self.scale
        hidden = torch.arange(limit, device=x.device) > positions[:, None]
        weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1).to(x.dtype)
        o = torch.einsum("bar,adr->bad", weights @ keys[..., : self.rank], w_uv)
        return linear(o.flatten(1), self.o_proj.weight)[:, None]


class MLP(nn.Module):
    """SwiGLU of a given width."""

    def __init__(self, hidden: int, width: int, std: float, down_std: float) -> None:
        super().__init__()
        self.gate_proj = Weight(width, hidden, std=std)
        self.up_proj = Weight(width, hidden, std=std)
        self.down_proj = Weight(hidden, width, std=down_std)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return linear(F.silu(linear(x, self.gate_proj.weight)) * linear(x, self.up_proj.weight), self.down_proj.weight)


class Gate(nn.Module):
    """Sigmoid router; the correction bias takes part in the choice only."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c["n_routed_experts"], c["hidden_size"]) * c["initializer_range"])
        self.register_buffer("e_score_correction_bias", torch.zeros(c["n_routed_experts"]))
        self.top_k, self.factor = c["num_experts_per_tok"], c["routed_scaling_factor"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N,H] -> float32 routing weights [N,E], zero where not chosen, and tokens per expert [E]."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * mask
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor, mask.sum(0)


class Experts(nn.Module):
    """The routed experts, stacked."""

    def __init__(self, c: dict[str, Any], std: float, down_std: float) -> None:
        super().__init__()
        e, i, h = c["n_routed_experts"], c["moe_intermediate_size"], c["hidden_size"]
        self.gate = nn.Parameter(torch.randn(e, i, h) * std)
        self.up = nn.Parameter(torch.randn(e, i, h) * std)
        self.down = nn.Parameter(torch.randn(e, h, i) * down_std)
        self.train_quantized = False

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [N,H], weights [N,E] -> sum of weighted expert outputs [N,H]."""
        stack = (self.gate, self.up, self.down)
        gate, up, down = (fake_quant(w) for w in stack) if self.train_quantized else stack
        inner = F.silu(linear(x, gate.flatten(0, 1))) * linear(x, up.flatten(0, 1))
        inner = inner.unflatten(-1, (len(gate), -1)) * weights.to(x.dtype).unsqueeze(-1)
        return linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, c: dict[str, Any], std: float, down_std: float) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = Experts(c, std, down_std)
        self.shared_experts = MLP(c["hidden_size"], c["moe_intermediate_size"] * c["n_shared_experts"], std, down_std)
        self.register_buffer("load", torch.zeros(c["n_routed_experts"]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,H] -> [B,S,H]; adds the tokens per expert to `load`."""
        flat = x.flatten(0, -2)
        weights, load = self.gate(flat)
        self.load.add_(load.detach())
        return self.experts(flat, weights).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    """One decoder layer; the residual stream is float32."""

    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        std = c["initializer_range"]
        down_std = std / math.sqrt(2 * c["num_hidden_layers"])
        self.eps = c["rms_norm_eps"]
        self.input_layernorm = Weight(c["hidden_size"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Weight(c["hidden_size"])
        dense = index < c["first_k_dense_replace"]
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"], std, down_std) if dense else MoE(c, std, down_std)

    def feed_forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x + MLP(norm(x)), x [B,S,H] float32."""
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps, dtype)).float()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x [B,S,H] float32 -> the same after the layer, and the attention latents [B,S,576]."""
        out, latent = self.self_attn(rms_norm(x, self.input_layernorm.weight, self.eps, dtype), cos, sin)
        return self.feed_forward(x + out.float(), dtype), latent


class Target(nn.Module):
    """The text model. `dtype` is the dtype of matrix products; parameters stay in the dtype in which they are held."""

    def __init__(self, text_config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        c = text_config
        self.config, self.dtype = c, dtype
        self.model = nn.Module()
        self.model.embed_tokens = Weight(c["vocab_size"], c["hidden_size"], std=c["initializer_range"])
        self.model.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.model.norm = Weight(c["hidden_size"])
        self.lm_head = Weight(c["vocab_size"], c["hidden_size"], std=c["initializer_range"])
        inv_freq = yarn_inv_freq(c["rope_scaling"], c["rope_theta"], c["qk_rope_head_dim"])
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @property
    def moe_layers(self) -> list[MoE]:
        """The MoE blocks in layer order."""
        return [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [...]: two float32 tensors [..., 32]."""
        angle = positions.float().unsqueeze(-1) * self.inv_freq
        return angle.cos(), angle.sin()

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: x [..., H] float32 -> logits [..., V] in the compute dtype."""
        x = rms_norm(x, self.model.norm.weight, self.config["rms_norm_eps"], self.dtype)
        return linear(x, self.lm_head.weight)

    def forward(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """ids [B,S] -> the float32 residual stream [B,S,H] after every layer, and each layer's latents [B,S,576]."""
        x = F.embedding(ids, self.model.embed_tokens.weight).float()
        cos, sin = self.rope(torch.arange(ids.shape[1], device=ids.device))
        states, latents = [], []
        for layer in self.model.layers:
            x, latent = layer(x, cos, sin, self.dtype)
            states.append(x)
            latents.append(latent)
        return states, latents

    @torch.inference_mode()
    def generate(self, prompts: Tensor, lengths: Tensor, steps: int) -> Tensor:
        """Greedy continuation. prompts [B,P] right-padded, lengths [B] -> tokens [B, P+steps], each row continued
        from its own length; the rest of a shorter row stays as given."""
        batch, width = prompts.shape
        rows = torch.arange(batch, device=prompts.device)
        shape = (batch, width + steps, self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"])
        caches = [torch.zeros(shape, dtype=self.dtype, device=prompts.device) for _ in self.model.layers]
        tokens = F.pad(prompts, (0, steps))
        last = torch.zeros(batch, self.config["hidden_size"], device=prompts.device)
        for part in rows.split(max(1, PREFILL_TOKENS // width)):
            states, latents = self(prompts[part])
            last[part] = states[-1][torch.arange(len(part), device=part.device), lengths[part] - 1]
            for cache, latent in zip(caches, latents, strict=True):
                cache[part, :width] = latent
        for step in range(steps):
            chosen = self.logits(last).argmax(-1)
            positions = lengths + step
            tokens[rows, positions] = chosen
            if step + 1 == steps:
                break
            x = F.embedding(chosen, self.model.embed_tokens.weight).float()[:, None]
            cos, sin = self.rope(positions[:, None])
            for layer, cache in zip(self.model.layers, caches, strict=True):
                normed = rms_norm(x, layer.input_layernorm.weight, layer.eps, self.dtype)
                out = layer.self_attn.decode(normed, cos, sin, cache, positions, min(width + step + 1, cache.shape[1]))
                x = layer.feed_forward(x + out.float(), self.dtype)
            last = x[:, 0]
        return tokens
