"""Config files: every family and spelling is read, everything unsupported is refused with its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.config import check_draft_matches, load_draft_config, load_model_config
from builder.errors import BuildError, CheckpointError
from tests.checkpoints import quantization_config, tiny_config, tiny_draft_config, write_config

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "kimi-tokenizer"
FAMILIES = ("kimi_k25", "kimi_k2", "deepseek_v3")
# From the published config.json of Kimi-K2.6's text model.
K26: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
} | {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"intermediate_size": 18432, "vocab_size": 163840},
}
# Check values worked out by hand from the formula of YaRN: dimension 64, theta 5e4, factor 64, betas 32/1.
K26_INV_FREQ = {0: 1.0, 8: 6.687403e-2, 9: 4.377666e-2, 12: 1.161916e-2, 15: 2.670204e-3} | {
    **{18: 4.086461e-4, 19: 1.583750e-4, 20: 1.807023e-5, 31: 4.382206e-7}
}


def refused(directory: Path, config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        write_config(directory, config)
    assert isinstance(caught.value, BuildError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ["rope_scaling", "rope_parameters"])
def test_families_and_rope_spellings(tmp_path: Path, family: str, rope: str) -> None:
    config = write_config(tmp_path, tiny_config(family, rope, **K26))
    assert (config.model_type, config.tensor_prefix) == (
        family,
        "language_model." if family == "kimi_k25" else "",
    )
    for key, value in K26.items():
        assert getattr(config, key) == value
    assert config.rms_norm_eps == 1e-5
    assert config.routed_scaling_factor == 2.827
    assert config.expert_group_size == 32
    assert config.softmax_scale == pytest.approx(0.14467962580, rel=1e-9)
    assert [config.is_moe_layer(index) for index in (0, 1, 60)] == [False, True, True]


def test_yarn_frequencies_of_k26(tmp_path: Path) -> None:
    frequencies = write_config(tmp_path, tiny_config(**K26)).rope.inv_freq()
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (32,)
    for index, value in K26_INV_FREQ.items():
        assert frequencies[index] == pytest.approx(value, rel=3e-7)


def test_k2_0711_has_a_step_between_frequencies(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0}
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    config = write_config(tmp_path, tiny_config("kimi_k2", **K26, rope_scaling=yarn, rms_norm_eps=1e-6))
    plain = 50000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(config.rope.inv_freq()[:20], plain[:20], rtol=1e-6)
    np.testing.assert_allclose(config.rope.inv_freq()[20:], plain[20:] / 32, rtol=1e-6)
    assert config.softmax_scale == pytest.approx(0.1308608, rel=1e-6)
    assert config.rms_norm_eps == 1e-6


def test_plain_rope(tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_config(rope_scaling=None))
    assert config.rope.factor == 1.0
    np.testing.assert_allclose(config.rope.inv_freq(), 50000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-6)
    assert config.softmax_scale == pytest.approx(48**-0.5)


@pytest.mark.skipif(not REAL.exists(), reason="the published Kimi-K2.6 config.json is not at hand")
def test_published_config() -> None:
    config = load_model_config(REAL)
    for key, value in K26.items():
        assert getattr(config, key) == value
    assert config.eos_token_ids == (163585, 163586)
    assert (config.bos_token_id, config.pad_token_id) == (163584, 163839)
    assert config.softmax_scale == pytest.approx(0.14467962580, rel=1e-9)


def test_quantization_config_at_the_top_level(tmp_path: Path) -> None:
    config = tiny_config()
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    assert write_config(tmp_path, config).expert_group_size == 32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", ["[EOS]", "<|im_end|>"])
def test_stop_ids_are_both_of_kimi(tmp_path: Path, family: str, named: str) -> None:
    # the configs of K2 .. K2.5 name 163585, that of K2.6 163586; the model emits both
    ids = {"[EOS]": 513, "<|im_end|>": 514}
    config = write_config(tmp_path, tiny_config(family, eos_token_id=ids[named]))
    assert config.eos_token_ids == (513, 514)


def test_stop_ids_take_lists_and_generation_config(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config("deepseek_v3", eos_token_id=[5, 6]))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_model_config(tmp_path).eos_token_ids == (5, 6, 7)


def test_some_stop_id_is_required(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config("deepseek_v3", eos_token_id=None))
    (tmp_path / "generation_config.json").unlink()
    assert load_model_config(tmp_path).eos_token_ids == (513, 514)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="eos_token_id is missing: the engine would never stop"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2"])
def test_every_size_is_required(tmp_path: Path, family: str) -> None:
    keys = [*K26, "rms_norm_eps", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"]
    keys += ["n_shared_experts", "first_k_dense_replace", "max_position_embeddings", "rope_theta"]
    for key in keys:
        config = tiny_config(family)
        del config.get("text_config", config)[key]
        write_without_reading(tmp_path, config)
        prefix = "text_config." if family == "kimi_k25" else ""
        with pytest.raises(CheckpointError, match=rf"config.json: {prefix}{key} is missing"):
            load_model_config(tmp_path)


def write_without_reading(directory: Path, config: dict[str, Any]) -> None:
    write_config(directory, tiny_config())
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_group": 8}, "text_config.n_group is 8: this engine supports only 1"),
        ({"topk_group": 4}, "text_config.topk_group is 4"),
        ({"topk_method": "greedy"}, 'topk_method is "greedy": this engine supports only "noaux_tc"'),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ({"attention_bias": True}, "attention_bias is true: this engine supports only false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"rope_interleave": False}, "rope_interleave is false"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1: this engine supports only 4"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"hidden_size": "128"}, "hidden_size is '128': expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True: expected a whole number"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100: expected a multiple of"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17: expected at most 16"),
        ({"eos_token_id": 768}, "eos_token_id is 768: expected at most 767"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x': expected token ids"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0: expected a number above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
        ({"model_type": "kimi_k3"}, 'text_config.model_type is "kimi_k3"'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "beta_fast is missing"),
        ({"rope_scaling": {"type": "yarn", "long_factor": [1]}}, "long_factor is unknown"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling are both given"),
        ({"rope_scaling": 3}, "rope_scaling is 3: expected an object"),
        ({"qk_rope_head_dim": 15}, "the rotary dimension is 15"),
        ({"quantization_config": None}, "quantization_config is missing: this engine needs INT4"),
    ],
)
def test_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, tiny_config(**overrides))


def test_other_amplitude_is_refused(tmp_path: Path) -> None:
    yarn = tiny_config()["text_config"]["rope_scaling"] | {"mscale_all_dim": 0.0}
    assert "multiplies cos and sin by 1.415888" in refused(tmp_path, tiny_config(rope_scaling=yarn))


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("quant_method", "fp8", "quant_method is FP8: this engine needs INT4"),
        ("quant_method", "gptq", "quant_method is 'gptq': this engine needs INT4"),
        ("format", "nvfp4-pack-quantized", 'format is "nvfp4-pack-quantized"'),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is"),
        ("config_groups", {}, "config_groups: expected one group"),
        ("weights.num_bits", 8, "num_bits is 8: this engine needs INT4"),
        ("weights.type", "float", 'type is "float"'),
        ("weights.symmetric", False, "symmetric is false"),
        ("weights.strategy", "channel", 'strategy is "channel"'),
        ("weights.group_size", 128, "group_size is 128"),
        ("weights.actorder", "weight", 'actorder is "weight"'),
        ("group.input_activations", {"num_bits": 8}, "input_activations is"),
    ],
)
def test_other_quantization_is_refused(tmp_path: Path, where: str, value: Any, message: str) -> None:
    quantization = quantization_config()
    group = quantization["config_groups"]["group_0"]
    parts = {"weights": group["weights"], "group": group}
    part, _, key = where.rpartition(".")
    parts.get(part, quantization)[key] = value
    found = refused(tmp_path, tiny_config(quantization_config=quantization))
    assert "text_config.quantization_config." in found
    assert message in found


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama"}', '{"model_type": "kimi_k25"}'])
def test_broken_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for load in (load_model_config, load_draft_config):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(tmp_path)


def test_missing_file_or_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing: expected the directory of a Hugging"):
        load_model_config(tmp_path / "nowhere")


def load_draft(directory: Path, config: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    return load_draft_config(directory)


def test_draft_keys_nested_or_at_the_top(tmp_path: Path) -> None:
    model = write_config(tmp_path / "target", tiny_config())
    nested = tiny_draft_config(model)
    flat = {**nested, **nested.pop("dflash_config")}
    draft = load_draft(tmp_path, tiny_draft_config(model))
    assert draft == load_draft(tmp_path, flat | {"dflash_config": None})
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 766, (0, 1))
    assert draft.rope.dim == draft.head_dim == 32
    assert draft.sliding_window is None
    assert draft.rope_attention_factor is None
    assert draft.rope.default_attention_factor() == pytest.approx(1.4158883)
    check_draft_matches(model, draft)


def test_draft_rope(tmp_path: Path) -> None:
    model = write_config(tmp_path / "target", tiny_config())
    bare = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    bare["attention_factor"] = 1.25
    config = tiny_draft_config(model, rope_parameters=bare, rope_scaling=None)
    draft = load_draft(tmp_path, config)
    assert draft.rope_attention_factor == 1.25
    assert (draft.rope.theta, draft.rope.beta_fast, draft.rope.beta_slow) == (1e6, 32.0, 1.0)
    assert load_draft(tmp_path, tiny_draft_config(model, rope_scaling=None)).rope.factor == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is 30.0: this engine supports only no value",
        ),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0: this engine supports only 1.0"),
        ({"output_multiplier": 0.5}, "output_multiplier is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "supports only full_attention"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"model_type": "llama"}, 'model_type is "llama"'),
        ({"markov_rank": 256, "draft_vocab_size": 32000}, "draft_vocab_size, markov_rank: unknown to this"),
        ({"target_layer_ids": []}, "target_layer_ids is []: expected a list"),
        ({"target_layer_ids": [1, 1]}, "expected a list of different layer numbers"),
        ({"block_size": 1}, "block_size is 1: expected a whole number, 2 or more"),
        ({"num_key_value_heads": 3}, "expected a multiple of num_key_value_heads, 3"),
    ],
)
def test_draft_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    model = write_config(tmp_path / "target", tiny_config())
    with pytest.raises(CheckpointError) as caught:
        load_draft(tmp_path, tiny_draft_config(model, **overrides))
    assert message in str(caught.value)


def test_draft_key_given_twice(tmp_path: Path) -> None:
    config = tiny_draft_config(write_config(tmp_path / "target", tiny_config())) | {"mask_token_id": 3}
    with pytest.raises(CheckpointError, match=r"dflash_config.mask_token_id is 766, but mask_token_id is 3"):
        load_draft(tmp_path, config)


def test_draft_of_another_model(tmp_path: Path) -> None:
    model = write_config(tmp_path / "target", tiny_config())
    draft = load_draft(tmp_path, tiny_draft_config(model))
    check_draft_matches(model, replace(draft, num_target_layers=None))
    for change, message in (
        ({"hidden_size": 64}, "the drafter's hidden_size is 64, the target's 128"),
        ({"vocab_size": 100}, "the drafter's vocab_size is 100, the target's 768"),
        ({"num_target_layers": 61}, "the drafter's num_target_layers is 61, the target's 3"),
        ({"target_layer_ids": (0, 2, 9)}, "taps target layer 2, 9: expected layers 0 to 1"),
        ({"mask_token_id": 768}, "mask_token_id is 768: expected below 768"),
    ):
        with pytest.raises(CheckpointError) as caught:
            check_draft_matches(model, replace(draft, **change))
        assert message in str(caught.value)
