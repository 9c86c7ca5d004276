"""The oracle itself: its experts are what the bits say, and its constants those of the config."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from builder.checkpoint import Checkpoint
from builder.config import load_model_config
from plugins.core.spec import bf16_to_f32, f32_to_bf16
from tests.checkpoints import make_tiny_checkpoint, oracle_hidden_states, oracle_logits, oracle_model

TOKENS = range(3, 35)


@pytest.fixture(scope="module", params=["kimi_k25", "deepseek_v3"])
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("oracle") / "checkpoint"
    rope = "rope_scaling" if request.param == "kimi_k25" else "rope_parameters"
    make_tiny_checkpoint(path, family=request.param, rope=rope)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> DeepseekV3ForCausalLM:
    return oracle_model(directory)


def unpacked(checkpoint: Checkpoint, module: str) -> np.ndarray:
    """float32 [out, in]: nibble k % 8 of word k // 8, less 8, times the scale, rounded to bfloat16."""
    words = checkpoint.array(f"{module}.weight_packed").astype(np.int64) & 0xFFFFFFFF
    scales = bf16_to_f32(checkpoint.array(f"{module}.weight_scale"))
    rows, columns = checkpoint.array(f"{module}.weight_shape")
    weight = np.empty((rows, columns), np.float32)
    for k in range(columns):
        weight[:, k] = ((words[:, k // 8] >> (4 * (k % 8))) % 16 - 8) * scales[:, k // 32]
    return bf16_to_f32(f32_to_bf16(weight))


@pytest.mark.parametrize("expert", [0, 15])
def test_experts_are_what_the_bits_say(directory: Path, model: DeepseekV3ForCausalLM, expert: int) -> None:
    checkpoint, prefix = Checkpoint.open(directory), load_model_config(directory).tensor_prefix
    module = f"{prefix}model.layers.2.mlp.experts.{expert}"
    experts = model.model.layers[2].mlp.experts
    gate_up = [unpacked(checkpoint, f"{module}.{name}_proj") for name in ("gate", "up")]
    np.testing.assert_array_equal(experts.gate_up_proj[expert].detach().numpy(), np.concatenate(gate_up))
    down = unpacked(checkpoint, f"{module}.down_proj")
    np.testing.assert_array_equal(experts.down_proj[expert].detach().numpy(), down)
    assert np.unique(down).size > 100


def test_constants_agree_with_the_config(directory: Path, model: DeepseekV3ForCausalLM) -> None:
    config = load_model_config(directory)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(config.softmax_scale, rel=1e-12)
    assert model.model.rotary_emb.attention_scaling == config.rope.amplitude() == 1.0
    frequencies = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(config.rope.inv_freq(), frequencies, rtol=2e-7)
    assert model.model.norm.variance_epsilon == 1e-5
    assert model.model.layers[0].self_attn.kv_a_layernorm.variance_epsilon == 1e-6


def test_logits_and_hidden_states(model: DeepseekV3ForCausalLM) -> None:
    logits = oracle_logits(model, TOKENS)
    assert logits.dtype == torch.float32
    assert 1 < logits.std() < 3
    states = oracle_hidden_states(model, TOKENS)
    assert [tuple(state.shape) for state in states] == [(len(TOKENS), 128)] * 3
    torch.testing.assert_close(model.lm_head(model.model.norm(states[-1])), logits)
