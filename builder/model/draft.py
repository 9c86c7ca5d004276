"""The DFlash drafter: a block of mask tokens attends to the target's hidden states (arXiv 2602.06036).

Context rows enter through `Context` (once per committed token, as keys and values of every layer), the block of
`block_size` rows (anchor, then masks) through `Draft`; both use the target's embedding and output head.
"""

from __future__ import annotations

import torch
from torch import nn

from builder.config import DraftConfig
from builder.model.ops import call
from builder.model.state import State, rope_attrs
from builder.model.target import DenseMlp, norm
from builder.model.weights import matrix


class Attention(nn.Module):
    """Block self-attention over context and block: x [B bs, H] -> [B bs, H], summed over ranks by the caller."""

    def __init__(self, config: DraftConfig, layer: int, amplitude: float):
        super().__init__()
        prefix = f"draft:layers.{layer}.self_attn"
        hidden, dim = config.hidden_size, config.head_dim
        query, key = (config.num_attention_heads * dim, hidden), (config.num_key_value_heads * dim, hidden)
        names = [f"{prefix}.{name}_proj.weight" for name in ("q", "k", "v")]
        self.config, self.layer = config, layer
        self.rope = rope_attrs(config.rope, amplitude)
        self.qkv = matrix(*names, shapes=[query, key, key], shard="rows")
        # k and v once more, without q: context rows have no query. 2.5 % more bytes kept, none more read a pass.
        self.kv = matrix(*names[1:], shapes=[key, key], shard="rows")
        self.q_norm = norm(f"{prefix}.q_norm", dim)
        self.k_norm = norm(f"{prefix}.k_norm", dim)
        self.o = matrix(f"{prefix}.o_proj.weight", shapes=[(hidden, query[0])], shard="cols")

    def append(self, context: torch.Tensor, state: State) -> None:
        """Keys and values of context rows [A, H] into the draft KV pool."""
        kv = call("dense_gemm", context, self.kv, activation="none", out_dtype="activation")
        call(
            "draft_kv_append",
            *(kv, self.k_norm),
            *state.get("append_positions", "append_slots", "draft_kv"),
            layer=self.layer,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            eps=self.config.rms_norm_eps,
            **self.rope,
        )

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        config = self.config
        qkv = call("dense_gemm", x, self.qkv, activation="none", out_dtype="activation")
        out = call(
            "draft_attention",
            *(qkv, self.q_norm, self.k_norm),
            *state.get("draft_requests", "context_len", "draft_start", "block_table", "draft_kv"),
            layer=self.layer,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            block_size=config.block_size,
            sliding_window=config.sliding_window or 0,
            page_size=state.limits.page_size,
            eps=config.rms_norm_eps,
            **self.rope,
        )
        return call("dense_gemm", out, self.o, activation="none", out_dtype="activation")


class Layer(nn.Module):
    """h = x + Attention(norm(x)); y = h + MLP(norm(h)): [B bs, H] -> [B bs, H]."""

    def __init__(self, config: DraftConfig, index: int, amplitude: float):
        super().__init__()
        prefix = f"draft:layers.{index}"
        self.eps = config.rms_norm_eps
        self.input_norm = norm(f"{prefix}.input_layernorm", config.hidden_size)
        self.attention = Attention(config, index, amplitude)
        self.post_norm = norm(f"{prefix}.post_attention_layernorm", config.hidden_size)
        self.mlp = DenseMlp(f"{prefix}.mlp", config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        normed = call("rms_norm", x, self.input_norm, eps=self.eps)
        x = x + call("all_reduce", self.attention(normed, state), eps=0.0, tp_world=1)
        normed = call("rms_norm", x, self.post_norm, eps=self.eps)
        return x + call("all_reduce", self.mlp(normed, state), eps=0.0, tp_world=1)


class Draft(nn.Module):
    """The drafter's own weights; `amplitude` is the YaRN factor on cos and sin (docs/model-options.md)."""

    def __init__(self, config: DraftConfig, amplitude: float):
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = matrix("draft:fc.weight", shapes=[(config.hidden_size, taps * config.hidden_size)], shard="rows")
        self.hidden_norm = norm("draft:hidden_norm", config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i, amplitude) for i in range(config.num_hidden_layers))
        self.norm = norm("draft:norm", config.hidden_size)

    def append(self, state: State) -> None:
        """Turn the taps of the rows listed in `append_rows` into context keys and values of every layer."""
        taps = state.get(*(f"taps.{i}" for i in range(len(self.config.target_layer_ids))))
        rows = call("gather_rows", *state.get("append_rows"), *taps)
        # fc is split by output rows: a rank reads 1/tp of its bytes, and the gather moves A x H values
        part = call("dense_gemm", rows, self.fc, activation="none", out_dtype="activation")
        context = call("all_gather", part, tp_world=1)
        context = call("rms_norm", context, self.hidden_norm, eps=self.config.rms_norm_eps)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention.append(context, state)

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """Embedded block rows [B bs, H] -> normalised hidden states [B bs, H]."""
        for layer in self.layers:
            x = layer(x, state)
        return call("rms_norm", x, self.norm, eps=self.config.rms_norm_eps)
