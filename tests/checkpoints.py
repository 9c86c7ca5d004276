"""Random tiny checkpoints in the format of Kimi K2.6 and its DFlash drafter, and the oracle for them.

The experts are quantized and packed by compressed-tensors' own code, and dequantized by it for the oracle,
which is transformers' `DeepseekV3ForCausalLM` in float32: neither shares a line with the engine.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from builder.config import ModelConfig, load_model_config

REAL_HEAD_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Overrides of `make_tiny_checkpoint` for which the GPU kernels are made."""

NUM_SPECIAL = 256
SPECIAL_SLOTS = {  # names of Kimi's special tokens, by slot behind the base ranks
    **{0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>"},
    **{6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>"},
    **{11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>"},
    **{14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>"},
    **{18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"},
    **{22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]"},
}
NOT_SPECIAL = {11, 12, 13, 14, 15, 22, 23}  # slots with special: false in Kimi's tokenizer_config.json

MERGE_TEXT = (
    "The engine reads the checkpoint, builds a plan and then writes the weights. A drafter proposes a tree "
    "of tokens; the target verifies all of them in one pass and keeps the longest path that it would have "
    "taken. When the answer is short, there is little to gain; when the text is easy, most of the tree is "
    "right. def main(argument): return [value for value in argument if value is not None] # 1234567890 { } "
    "Nothing is computed twice, and no memory is allocated after the start; every kernel was chosen and "
    "compiled before. Users ask questions about files, code and mathematics, and expect quick, readable "
    "replies. "
)

SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
)
K26_IGNORE = [
    *("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"),
    *("re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*"),
]


def quantization_config() -> dict[str, Any]:
    """As published with K2.6."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    weights |= {"dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None}
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": K26_IGNORE,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def tiny_config(family: str = "kimi_k25", rope: str = "rope_scaling", **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model. `overrides` are keys of the text config.

    family: "kimi_k25" (nested), "kimi_k2" or "deepseek_v3".
    rope: spelling, "rope_scaling" or "rope_parameters".
    """
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn["original_max_position_embeddings"] = 4096
    text: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3" if family == "deepseek_v3" else "kimi_k2",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "intermediate_size": 256,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 768,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": quantization_config(),
        **overrides,
    }
    base = text["vocab_size"] - NUM_SPECIAL
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    ids = {"bos_token_id": base, "eos_token_id": base + 2, "pad_token_id": base + 255}
    text = {**ids, **text}
    if rope == "rope_scaling":
        text = {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **yarn}, **text}
    else:
        text = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **yarn}, **text}
    if family != "kimi_k25":
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        **{key: text[key] for key in ids},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "media_placeholder_token_id": base + 21,
        "text_config": text,
        "vision_config": {"patch_size": 14, "vt_hidden_size": 16, "text_hidden_size": text["hidden_size"]},
    }


def write_config(directory: Path, config: dict[str, Any]) -> ModelConfig:
    """Everything of a tiny checkpoint but its weights: config, generation config and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    text = config.get("text_config", config)
    base = text["vocab_size"] - NUM_SPECIAL
    added = {
        str(base + slot): {"content": name, "special": slot not in NOT_SPECIAL}
        | dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        for slot, name in SPECIAL_SLOTS.items()
    }
    tokenizer = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
    }
    tokenizer |= {"unk_token": "[UNK]", "tokenizer_class": "TikTokenTokenizer"}
    ranks = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(_merges(base)))
    (directory / "tiktoken.model").write_text(ranks)
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": base + 2}))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return load_model_config(directory)


@cache
def _merges(count: int) -> list[bytes]:
    """`count` tokens of a byte-level BPE: the 256 bytes, frequent pairs of `MERGE_TEXT`, then others."""
    tokens = [bytes((value,)) for value in range(256)]
    words = [[bytes((value,)) for value in word.encode()] for word in re.findall(r" ?\S+", MERGE_TEXT)]
    while len(tokens) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        left, right = pairs.most_common(1)[0][0]
        tokens.append(left + right)
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if word[i - 1 : i + 1] == [left, right]:
                    word[i - 1 : i + 1] = [left + right]
    known = set(tokens)
    others = (bytes(letters) for size in (2, 3) for letters in product(range(256), repeat=size))
    return tokens + list(islice((token for token in others if token not in known), count - len(tokens)))


class _Random:
    """Weights that keep activations near size 1, so that logits are of order 1 to 3."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=self.generator)
        return (values * gain / columns**0.5).bfloat16()

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self.generator)).bfloat16()

    def mlp(self, prefix: str, hidden: int, inter: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}gate_proj.weight": self.matrix(inter, hidden),
            f"{prefix}up_proj.weight": self.matrix(inter, hidden),
            f"{prefix}down_proj.weight": self.matrix(hidden, inter),
        }

    def experts(self, prefix: str, config: ModelConfig, shape_dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All routed experts of a layer, quantized and packed by compressed-tensors."""
        count, hidden, inter = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        tensors: dict[str, torch.Tensor] = {}
        for name, rows, columns in (
            *(("gate_proj", inter, hidden), ("up_proj", inter, hidden)),
            ("down_proj", hidden, inter),
        ):
            # rows are independent, so one call packs all experts
            weight = self.matrix(count * rows, columns)
            groups = weight.unflatten(1, (-1, 32))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
            packed = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
            for expert in range(count):
                part, at = slice(expert * rows, (expert + 1) * rows), f"{prefix}experts.{expert}.{name}."
                tensors[f"{at}weight_packed"] = packed["weight_packed"][part].clone()
                tensors[f"{at}weight_scale"] = scale[part].clone()
                tensors[f"{at}weight_shape"] = torch.tensor([rows, columns], dtype=shape_dtype)
        return tensors

    def layer(self, index: int, config: ModelConfig, shape_dtype: torch.dtype) -> dict[str, torch.Tensor]:
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        layer = f"model.layers.{index}."
        at = f"{layer}self_attn."
        tensors = {
            f"{layer}input_layernorm.weight": self.norm(hidden),
            f"{layer}post_attention_layernorm.weight": self.norm(hidden),
            f"{at}q_a_proj.weight": self.matrix(config.q_lora_rank, hidden),
            f"{at}q_a_layernorm.weight": self.norm(config.q_lora_rank),
            f"{at}q_b_proj.weight": self.matrix(heads * (nope + rope), config.q_lora_rank),
            f"{at}kv_a_proj_with_mqa.weight": self.matrix(rank + rope, hidden),
            f"{at}kv_a_layernorm.weight": self.norm(rank),
            f"{at}kv_b_proj.weight": self.matrix(heads * (nope + value), rank),
            f"{at}o_proj.weight": self.matrix(hidden, heads * value),
        }
        at = f"{layer}mlp."
        if not config.is_moe_layer(index):
            return tensors | self.mlp(at, hidden, config.intermediate_size)
        bias = 0.1 * torch.randn(config.n_routed_experts, generator=self.generator)
        tensors[f"{at}gate.weight"] = self.matrix(config.n_routed_experts, hidden)
        tensors[f"{at}gate.e_score_correction_bias"] = bias
        if config.n_shared_experts:
            inter = config.moe_intermediate_size * config.n_shared_experts
            tensors |= self.mlp(f"{at}shared_experts.", hidden, inter)
        return tensors | self.experts(at, config, shape_dtype)


def make_tiny_checkpoint(
    directory: Path,
    seed: int = 0,
    family: str = "kimi_k25",
    rope: str = "rope_scaling",
    shape_dtype: torch.dtype = torch.int32,
    **overrides: Any,
) -> ModelConfig:
    """Write a random checkpoint (a shard a layer, index, tokenizer) into `directory`.

    `family`, `rope` and `overrides` as in `tiny_config`; real head dims with `**REAL_HEAD_DIMS`.
    shape_dtype: of `weight_shape`, int32 as published or int64 as compressed-tensors writes it.
    vocab_size is at least 512: 256 bytes and 256 special slots; what is above becomes merges.
    """
    config = write_config(directory, tiny_config(family, rope, **overrides))
    random = _Random(seed)
    shards = [random.layer(index, config, shape_dtype) for index in range(config.num_hidden_layers)]
    shards.append(
        {
            "model.embed_tokens.weight": random.matrix(config.vocab_size, config.hidden_size, config.hidden_size**0.5),
            "model.norm.weight": random.norm(config.hidden_size),
            "lm_head.weight": random.matrix(config.vocab_size, config.hidden_size, 1.5),
        }
    )
    shards = [{config.tensor_prefix + name: tensor for name, tensor in shard.items()} for shard in shards]
    if family == "kimi_k25":
        shards[-1]["vision_tower.patch_embed.proj.weight"] = random.matrix(16, 3)
        shards[-1]["mm_projector.pre_norm.weight"] = random.norm(16)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):06}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return config


def tiny_draft_config(model: ModelConfig, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny DFlash drafter for `model`, method keys nested as in public drafters."""
    dflash = {
        "mask_token_id": model.vocab_size - 2,
        "target_layer_ids": sorted({0, model.num_hidden_layers - 2}),
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": model.hidden_size,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "block_size": 8,
        "num_target_layers": model.num_hidden_layers,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
        | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    dflash |= {key: overrides.pop(key) for key in dflash.keys() & overrides.keys()}
    config |= {"dflash_config": dflash, **overrides}
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    return config


def make_tiny_draft(directory: Path, model: ModelConfig, seed: int = 1, **overrides: Any) -> dict[str, Any]:
    """Write a random DFlash drafter (one model.safetensors) for `model`; returns its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_draft_config(model, **overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    random, hidden, dim = _Random(seed), config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {
        "fc.weight": random.matrix(hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden),
        "hidden_norm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."
        tensors |= random.mlp(f"{layer}mlp.", hidden, config["intermediate_size"])
        tensors |= {
            f"{layer}input_layernorm.weight": random.norm(hidden),
            f"{layer}post_attention_layernorm.weight": random.norm(hidden),
            f"{layer}self_attn.q_proj.weight": random.matrix(query, hidden),
            f"{layer}self_attn.k_proj.weight": random.matrix(key, hidden),
            f"{layer}self_attn.v_proj.weight": random.matrix(key, hidden),
            f"{layer}self_attn.o_proj.weight": random.matrix(hidden, query),
            f"{layer}self_attn.q_norm.weight": random.norm(dim),
            f"{layer}self_attn.k_norm.weight": random.norm(dim),
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return config


def oracle_weights(directory: Path) -> dict[str, torch.Tensor]:
    """State dict of `DeepseekV3ForCausalLM`, dtypes as stored; experts dequantized by compressed-tensors."""
    config = load_model_config(directory)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not name.startswith(("vision_tower.", "mm_projector.")):
                    tensors[name.removeprefix(config.tensor_prefix)] = file.get_tensor(name)

    def dequantized(module: str) -> torch.Tensor:
        parts = {part: tensors.pop(f"{module}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")}
        return PackedQuantizationCompressor.decompress(parts, SCHEME)["weight"]

    for index in filter(config.is_moe_layer, range(config.num_hidden_layers)):
        at = f"model.layers.{index}.mlp.experts."
        numbers = range(config.n_routed_experts)
        gate, up, down = (
            torch.stack([dequantized(f"{at}{number}.{name}_proj") for number in numbers])
            for name in ("gate", "up", "down")
        )
        tensors[f"{at}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{at}down_proj"] = down
    return tensors


def oracle_model(directory: Path) -> DeepseekV3ForCausalLM:
    """The checkpoint as transformers' DeepSeek-V3 in float32, with plain loops for attention and experts.

    Its q_a_layernorm and kv_a_layernorm have eps 1e-6 whatever rms_norm_eps says, as in Moonshot's own code.
    """
    config = json.loads((directory / "config.json").read_bytes())
    text = config.get("text_config", config)
    left_out = ("quantization_config", "model_type", "architectures", "dtype")
    kept = {key: value for key, value in text.items() if key not in left_out}
    model = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**kept), attn_implementation="eager").float()
    model.set_experts_implementation("eager")
    # strict: a tensor without a place, or a place without a tensor, is an error
    model.load_state_dict({name: tensor.float() for name, tensor in oracle_weights(directory).items()}, strict=True)
    return model.eval()


def oracle_hidden_states(model: DeepseekV3ForCausalLM, tokens: Sequence[int]) -> list[torch.Tensor]:
    """float32 [T, hidden] residual stream after every layer, before the final norm (the drafter's taps)."""
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: states.append(output[0]))
        for layer in model.model.layers
    ]
    oracle_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return states


@torch.no_grad()
def oracle_logits(model: DeepseekV3ForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [T, vocab] logits of one sequence."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
