"""Persistent buffers as inputs of the traced passes, and the attributes that operators with RoPE carry."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from builder.config import DraftConfig, ModelConfig, RopeConfig
from builder.model.ops import empty
from plugins.core.spec import TensorSpec
from plugins.core.state import Limits, request_buffers, result_buffers, row_buffers, vocabulary_buffers

# Buffers whose second copy per rank holds only that rank's heads: name -> axis that is divided by tp.
SHARDED_BUFFERS = {"draft_kv": 3}


def rope_attrs(rope: RopeConfig, amplitude: float) -> dict[str, Any]:
    """Attributes of `plugins.core.rope` for one rotary configuration; `amplitude` multiplies cos and sin."""
    return {
        "rope_theta": rope.theta,
        "rope_factor": rope.factor,
        "rope_original_max": rope.original_max_position_embeddings,
        "rope_beta_fast": rope.beta_fast,
        "rope_beta_slow": rope.beta_slow,
        "rope_amplitude": amplitude,
    }


def engine_buffers(
    config: ModelConfig,
    draft: DraftConfig | None,
    limits: Limits,
    activation_dtype: str,
    kv_dtype: str,
    tp: int,
) -> dict[str, TensorSpec]:
    """Every persistent buffer of one rank. KV latents are replicated on every rank, draft KV heads are split."""
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    buffers = {
        **row_buffers(limits),
        **request_buffers(limits),
        **vocabulary_buffers(limits, config.vocab_size),
        **result_buffers(limits, config.vocab_size),
    }
    buffers["kv_pool"] = TensorSpec((config.num_hidden_layers, limits.kv_slots, latent), kv_dtype)
    if draft is not None:
        heads = draft.num_key_value_heads // tp
        buffers["draft_kv"] = TensorSpec(
            (draft.num_hidden_layers, 2, limits.kv_slots, heads, draft.head_dim), activation_dtype
        )
        for index in range(len(draft.target_layer_ids)):
            buffers[f"taps.{index}"] = TensorSpec((limits.pass_rows, config.hidden_size), activation_dtype)
    return buffers


class State(nn.Module):
    """The buffers that one pass may use. Row-wise ones are cut to the rows of the pass where `rows` says so."""

    def __init__(self, buffers: dict[str, TensorSpec], limits: Limits, rows: dict[str, int]):
        super().__init__()
        self.limits, self.rows = limits, rows
        for name, spec in buffers.items():
            shape = (rows[name], *spec.shape[1:]) if name in rows else spec.shape
            # torch does not allow a dot in a buffer's name; `builder.export` puts it back
            self.register_buffer(name.replace(".", "_"), empty(TensorSpec(shape, spec.dtype)))

    def get(self, *names: str) -> list[torch.Tensor]:
        """Buffers by name, in order."""
        return [self.get_buffer(name.replace(".", "_")) for name in names]
