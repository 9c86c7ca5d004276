"""The K2 text model: MLA attention, one dense layer, MoE layers (docs/operators.md has the axes and operators).

Math as in DeepSeek-V3 (arXiv 2412.19437) and the Kimi K2 checkpoints; formulas are in the plugins' references.
"""

from __future__ import annotations

import torch
from torch import nn

from builder.config import ModelConfig
from builder.model.ops import call
from builder.model.state import State, rope_attrs
from builder.model.weights import gate_up, matrix, weight
from plugins.core.packing import WeightRecipe


def norm(name: str, size: int) -> nn.Parameter:
    """RMSNorm weight [size]."""
    return matrix(f"{name}.weight", shapes=[(size,)])


class Attention(nn.Module):
    """x [T, H] (normalised) -> [T, H], summed over ranks. `form` is the MLA form: "absorbed" or "expanded"."""

    def __init__(self, config: ModelConfig, prefix: str, layer: int, mla_norm_eps: float):
        super().__init__()
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.config, self.layer, self.eps = config, layer, mla_norm_eps
        self.qkv_a = matrix(
            f"{prefix}.q_a_proj.weight",
            f"{prefix}.kv_a_proj_with_mqa.weight",
            shapes=[(config.q_lora_rank, config.hidden_size), (rank + rope, config.hidden_size)],
        )
        self.q_a_norm = norm(f"{prefix}.q_a_layernorm", config.q_lora_rank)
        self.kv_a_norm = norm(f"{prefix}.kv_a_layernorm", rank)
        self.q_b = matrix(
            f"{prefix}.q_b_proj.weight", shapes=[(heads * (nope + rope), config.q_lora_rank)], shard="rows"
        )
        kv_b = (f"{prefix}.kv_b_proj.weight",), ((heads * (nope + value), rank),)
        dims = {"num_heads": heads, "qk_nope_head_dim": nope, "v_head_dim": value}
        self.w_uk = weight(WeightRecipe("mla_attention", *kv_b, {"part": "uk", **dims}))
        self.w_uv = weight(WeightRecipe("mla_attention", *kv_b, {"part": "uv", **dims}))
        self.o = matrix(f"{prefix}.o_proj.weight", shapes=[(config.hidden_size, heads * value)], shard="cols")

    def forward(self, x: torch.Tensor, state: State, form: str, masked: bool) -> torch.Tensor:
        config = self.config
        qkv_a = call("dense_gemm", x, self.qkv_a, activation="none", out_dtype="activation")
        q = call(
            "mla_prepare",
            *(qkv_a, self.q_a_norm, self.kv_a_norm, self.q_b, self.w_uk),
            *state.get("positions", "row_slot", "kv_pool"),
            layer=self.layer,
            num_heads=config.num_attention_heads,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            eps=self.eps,
            form=form,
            **rope_attrs(config.rope, config.rope.amplitude()),
        )
        out = call(
            "mla_attention",
            *(q, self.w_uk, self.w_uv),
            *state.get("row_request", "first_row", "request_rows", "context_len", "block_table", "kv_pool"),
            *(state.get("mask") if masked else (None,)),
            layer=self.layer,
            num_heads=config.num_attention_heads,
            softmax_scale=config.softmax_scale,
            page_size=state.limits.page_size,
            form=form,
        )
        return call("dense_gemm", out, self.o, activation="none", out_dtype="activation")


class DenseMlp(nn.Module):
    """SwiGLU: x [T, H] -> [T, H], a partial sum over ranks."""

    def __init__(self, prefix: str, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up = gate_up(prefix, hidden_size, intermediate_size)
        self.down = matrix(f"{prefix}.down_proj.weight", shapes=[(hidden_size, intermediate_size)], shard="cols")

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        act = call("dense_gemm", x, self.gate_up, activation="silu_mul", out_dtype="activation")
        return call("dense_gemm", act, self.down, activation="none", out_dtype="activation")


class Moe(nn.Module):
    """Routed INT4 experts plus the shared expert: x [T, H] -> [T, H], a partial sum over ranks."""

    def __init__(self, config: ModelConfig, prefix: str, router_dtype: str):
        super().__init__()
        self.config = config
        experts, hidden, inter = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.router = matrix(f"{prefix}.gate.weight", shapes=[(experts, hidden)], dtype=router_dtype)
        self.bias = matrix(f"{prefix}.gate.e_score_correction_bias", shapes=[(experts,)], dtype="float32")
        self.gate_up = self._experts(prefix, "gate_up", ("gate_proj", "up_proj"), (inter, hidden))
        self.down = self._experts(prefix, "down", ("down_proj",), (hidden, inter))
        self.shared: DenseMlp | None = None
        if config.n_shared_experts:
            self.shared = DenseMlp(f"{prefix}.shared_experts", hidden, inter * config.n_shared_experts)

    def _experts(self, prefix: str, stage: str, names: tuple[str, ...], shape: tuple[int, int]) -> nn.Parameter:
        rows, cols = shape
        patterns: list[str] = []
        shapes: list[tuple[int, int]] = []
        for name in names:
            patterns += [
                f"{prefix}.experts.{{}}.{name}.weight_packed",
                f"{prefix}.experts.{{}}.{name}.weight_scale",
            ]
            shapes += [(rows, cols // 8), (rows, cols // self.config.expert_group_size)]
        count = self.config.n_routed_experts
        return weight(
            WeightRecipe.repeated("int4_marlin_gemm", tuple(patterns), tuple(shapes), count, {"stage": stage})
        )

    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        config = self.config
        top_k = config.num_experts_per_tok
        weights, offsets, routes, _ = call(
            "moe_route",
            *(x, self.router, self.bias, *state.get("row_request")),
            top_k=top_k,
            routed_scaling_factor=config.routed_scaling_factor,
            norm_topk_prob=config.norm_topk_prob,
        )
        shared = self.shared(x, state) if self.shared is not None else None
        act = call("int4_marlin_gemm", x, self.gate_up, offsets, routes, stage="gate_up", top_k=top_k)
        return call("int4_marlin_gemm", act, self.down, offsets, routes, weights, shared, stage="down", top_k=top_k)


class Layer(nn.Module):
    """h = x + Attention(norm(x)); y = h + MLP(norm(h)): [T, H] -> [T, H]."""

    def __init__(self, config: ModelConfig, index: int, mla_norm_eps: float, router_dtype: str):
        super().__init__()
        prefix = f"{config.tensor_prefix}model.layers.{index}"
        self.eps = config.rms_norm_eps
        self.input_norm = norm(f"{prefix}.input_layernorm", config.hidden_size)
        self.attention = Attention(config, f"{prefix}.self_attn", index, mla_norm_eps)
        self.post_norm = norm(f"{prefix}.post_attention_layernorm", config.hidden_size)
        self.mlp: DenseMlp | Moe
        if config.is_moe_layer(index):
            self.mlp = Moe(config, f"{prefix}.mlp", router_dtype)
        else:
            self.mlp = DenseMlp(f"{prefix}.mlp", config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, state: State, form: str, masked: bool) -> torch.Tensor:
        normed = call("rms_norm", x, self.input_norm, eps=self.eps)
        attended = self.attention(normed, state, form, masked)
        x = x + call("all_reduce", attended, eps=0.0, tp_world=1)
        normed = call("rms_norm", x, self.post_norm, eps=self.eps)
        out = self.mlp(normed, state)
        return x + call("all_reduce", out, eps=0.0, tp_world=1)


class Vocabulary(nn.Module):
    """Embedding and output head, both split over the vocabulary; the drafter uses the same two matrices."""

    def __init__(self, config: ModelConfig, activation_dtype: str):
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.activation_dtype = activation_dtype
        prefix = config.tensor_prefix
        self.embedding = matrix(f"{prefix}model.embed_tokens.weight", shapes=[shape], shard="rows")
        self.head = matrix(f"{prefix}lm_head.weight", shapes=[shape], shard="rows")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """ids i32 [T] -> [T, H]."""
        rows = call("embed", tokens, self.embedding, tp_rank=0, out_dtype=self.activation_dtype)
        return call("all_reduce", rows, eps=0.0, tp_world=1)

    def rank_logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> this rank's float32 logits [T, V]."""
        return call("dense_gemm", x, self.head, activation="none", out_dtype="float32")


class Target(nn.Module):
    """All layers: tokens -> final hidden states, with the residual stream after chosen layers as taps."""

    def __init__(
        self,
        config: ModelConfig,
        tap_layers: tuple[int, ...],
        mla_norm_eps: float,
        router_dtype: str,
        activation_dtype: str,
    ):
        super().__init__()
        self.config, self.tap_layers = config, tap_layers
        self.vocabulary = Vocabulary(config, activation_dtype)
        self.layers = nn.ModuleList(
            Layer(config, index, mla_norm_eps, router_dtype) for index in range(config.num_hidden_layers)
        )
        self.norm = norm(f"{config.tensor_prefix}model.norm", config.hidden_size)

    def forward(self, state: State, form: str, masked: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.vocabulary.embed(*state.get("tokens"))
        taps = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, state, form, masked)
            if index in self.tap_layers:
                taps[index] = x
        normed = call("rms_norm", x, self.norm, eps=self.config.rms_norm_eps)
        return normed, [taps[index] for index in self.tap_layers]
