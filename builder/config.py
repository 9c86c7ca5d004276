"""config.json of the target and of the DFlash drafter, as frozen dataclasses.

Every number comes from the file: a missing key is an error, never a default of a model family. What the
engine does not compute is refused here, with the key's name, before anything is read or built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builder.config_file import INT4, Section, int4_group_size, load_json
from builder.errors import CheckpointError, some
from plugins.core import rope as yarn

FAMILIES = ("kimi_k25", "kimi_k2", "deepseek_v3")
TEXT_FAMILIES = ("kimi_k2", "deepseek_v3")  # of kimi_k25's text_config
STOP_TOKENS = ("<|im_end|>", "[EOS]")  # a Kimi turn ends with the first; base prompts with the second
# Of YaRN keys that a drafter leaves out (arXiv 2309.00071; the same in transformers and DeepSeek-V3's code).
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "truncate", *YARN_DEFAULTS),
}
# Keys of a drafter that are read or checked below.
DRAFT_KEYS = """
    model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps max_position_embeddings vocab_size block_size mask_token_id target_layer_ids
    num_target_layers dflash_config rope_theta rope_scaling rope_parameters hidden_act attention_bias mlp_bias
    layer_types use_sliding_window final_logit_softcapping input_embedding_scale output_multiplier
"""
# Keys without a part in the drafter's math: it has no embedding and no head, and nothing is sampled from it.
# sliding_window is inert as long as no layer is a sliding one, which is checked.
INERT_KEYS = """
    architectures auto_map dtype torch_dtype transformers_version _name_or_path use_cache attention_dropout
    initializer_range tie_word_embeddings bos_token_id eos_token_id pad_token_id max_window_layers
    sliding_window pretraining_tp id2label label2id chunk_size_feed_forward is_encoder_decoder is_decoder
    add_cross_attention problem_type
    output_attentions output_hidden_states return_dict cross_attention_hidden_size
"""


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's amplitude 0.1 mscale ln(factor) + 1 (arXiv 2309.00071; DeepSeek-V3's `yarn_get_mscale`)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over `dim` channels. Plain RoPE is factor 1; it leaves the YaRN fields unused."""

    dim: int
    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None  # explicit factor on cos and sin

    def inv_freq(self) -> np.ndarray:
        """float32 [dim / 2] angular frequencies, radians a position."""
        original = self.original_max_position_embeddings
        return yarn.inv_freq(self.dim, self.theta, self.factor, original, self.beta_fast, self.beta_slow)

    def amplitude(self) -> float:
        """Factor on cos and sin by the rule of DeepSeek-V3's reference code; 1.0 for every Kimi release."""
        if self.attention_factor is not None:
            return self.attention_factor
        return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)

    def default_attention_factor(self) -> float:
        """0.1 ln(factor) + 1: the factor on cos and sin of YaRN without mscale keys."""
        return _mscale(self.factor, 1.0)


@dataclass(frozen=True)
class ModelConfig:
    """The text model. Names and meanings are those of the Hugging Face config (math: arXiv 2412.19437).

    tensor_prefix: "language_model." or "", before every tensor name.
    expert_group_size: columns per INT4 scale.
    eos_token_ids: of config.json, generation_config.json, and the tokenizer's `<|im_end|>` and `[EOS]`.
    num_nextn_predict_layers: MTP layers in the checkpoint; the engine does not use them.
    """

    model_type: str
    tensor_prefix: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    intermediate_size: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_nextn_predict_layers: int
    expert_group_size: int
    rope: RopeConfig

    @property
    def softmax_scale(self) -> float:
        """d^-0.5 m^2 with d = qk_nope_head_dim + qk_rope_head_dim, m = 0.1 mscale_all_dim ln(factor) + 1.

        Source: DeepSeek-V3's reference code; 0.1446796 for K2.6.
        """
        m = _mscale(self.rope.factor, self.rope.mscale_all_dim)
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * m * m)

    def is_moe_layer(self, index: int) -> bool:
        """Whether 0-based layer `index` has routed experts (the first layers have a dense MLP)."""
        return index >= self.first_k_dense_replace


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter (arXiv 2602.06036): Qwen3-like layers over a block of masks and taps of the target.

    block_size: rows of a block, the anchor included.
    target_layer_ids: 0-based layers whose output is tapped, in the order of `fc`'s columns.
    sliding_window: None as loaded (sliding layers are refused); a caller may set one with `replace`.
    rope_attention_factor: the factor on cos and sin that the file names, else None.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int
    rope: RopeConfig
    sliding_window: int | None
    rope_attention_factor: float | None


def load_model_config(directory: Path) -> ModelConfig:
    """config.json (with generation_config.json and tokenizer_config.json) of a target checkpoint."""
    top = load_json(directory / "config.json", "expected the directory of a Hugging Face checkpoint")
    model_type = top.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(f"{top.where('model_type')} is {model_type!r}: expected one of {', '.join(FAMILIES)}")
    text, prefix = top, ""
    if model_type == "kimi_k25":
        nested = top.section("text_config")
        if nested is None:
            raise CheckpointError(f"{top.where('text_config')} is missing: a kimi_k25 model keeps its sizes there")
        text, prefix = nested, "language_model."
        text.refuse_unless("model_type", *TEXT_FAMILIES)
    _refuse_unsupported(top, text)

    config = ModelConfig(
        model_type=model_type,
        tensor_prefix=prefix,
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=text.integer("num_hidden_layers"),
        num_attention_heads=text.integer("num_attention_heads"),
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        n_routed_experts=text.integer("n_routed_experts"),
        num_experts_per_tok=text.integer("num_experts_per_tok"),
        n_shared_experts=text.integer("n_shared_experts", least=0),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        intermediate_size=text.integer("intermediate_size"),
        first_k_dense_replace=text.integer("first_k_dense_replace", least=0),
        n_group=text.integer("n_group"),
        topk_group=text.integer("topk_group"),
        norm_topk_prob=text.boolean("norm_topk_prob"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        vocab_size=text.integer("vocab_size"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        bos_token_id=text.integer("bos_token_id", least=0),
        eos_token_ids=_eos_token_ids(directory, top, text),
        pad_token_id=text.optional_integer("pad_token_id"),
        num_nextn_predict_layers=text.optional_integer("num_nextn_predict_layers") or 0,
        expert_group_size=_expert_group_size(top, text),
        rope=_rope(text, text.integer("qk_rope_head_dim"), defaults={}),
    )
    _check_sizes(config, text)
    return config


def _refuse_unsupported(top: Section, text: Section) -> None:
    text.refuse_unless("topk_method", "noaux_tc")
    text.refuse_unless("scoring_func", "sigmoid")
    text.refuse_unless("n_group", 1)
    text.refuse_unless("topk_group", 1)
    text.refuse_unless("moe_layer_freq", 1)
    text.refuse_unless("hidden_act", "silu")
    text.refuse_unless("attention_bias", False)
    text.refuse_unless("rope_interleave", True)
    text.refuse_unless("num_key_value_heads", text.integer("num_attention_heads"))
    for section in (top, text):
        section.refuse_unless("tie_word_embeddings", False)


def _check_sizes(config: ModelConfig, text: Section) -> None:
    for key in ("hidden_size", "moe_intermediate_size"):
        if text.integer(key) % config.expert_group_size:
            raise CheckpointError(
                f"{text.where(key)} is {text.integer(key)}: expected a multiple of the quantization group "
                f"size, {config.expert_group_size}"
            )
    for key, found, most in (
        ("num_experts_per_tok", config.num_experts_per_tok, config.n_routed_experts),
        ("first_k_dense_replace", config.first_k_dense_replace, config.num_hidden_layers),
        ("eos_token_id", max(config.eos_token_ids), config.vocab_size - 1),
        ("bos_token_id", config.bos_token_id, config.vocab_size - 1),
        ("pad_token_id", config.pad_token_id or 0, config.vocab_size - 1),
    ):
        if found > most:
            raise CheckpointError(f"{text.where(key)} is {found}: expected at most {most}")
    if abs(config.rope.amplitude() - 1.0) > 1e-6:
        raise CheckpointError(
            f"{text.where('rope_scaling')} multiplies cos and sin by {config.rope.amplitude():.6f}: this "
            "engine supports only 1 (mscale equal to mscale_all_dim), as in every Kimi release"
        )


def _rope(section: Section, dim: int, defaults: Mapping[str, float]) -> RopeConfig:
    """RoPE in either spelling: rope_scaling{type} and rope_theta, or rope_parameters{rope_type, rope_theta}.

    `defaults`: values of YaRN keys that may be absent; other absent keys are an error.
    """
    spellings = [part for key in ("rope_parameters", "rope_scaling") if (part := section.section(key))]
    if len(spellings) == 2:
        raise CheckpointError(f"{section.where('rope_parameters')} and rope_scaling are both given: expected one")
    part = spellings[0] if spellings else Section(section.path, {}, f"{section.prefix}rope_parameters.")
    if unknown := sorted(part.values.keys() - ROPE_KEYS):
        raise CheckpointError(f"{part.where(unknown[0])} is unknown: this engine does not know how to apply it")
    kind = part.get("rope_type") or part.get("type") or "default"
    if kind not in ("yarn", "default"):
        raise CheckpointError(f"{part.where('rope_type')} is {kind!r}: this engine supports only yarn or default")
    if dim % 2:
        raise CheckpointError(f"{section.path}: the rotary dimension is {dim}: expected an even number")
    theta = (part if part.get("rope_theta") is not None else section).positive("rope_theta")
    if kind == "default":
        length = section.integer("max_position_embeddings")
        return RopeConfig(dim, theta, 1.0, length, **YARN_DEFAULTS, attention_factor=None)
    part.refuse_unless("truncate", True)
    given = {key: part.number(key) for key in YARN_DEFAULTS if key not in defaults or part.get(key) is not None}
    return RopeConfig(
        dim,
        theta,
        part.positive("factor"),
        part.integer("original_max_position_embeddings"),
        **{**defaults, **given},
        attention_factor=None if part.get("attention_factor") is None else part.positive("attention_factor"),
    )


def _expert_group_size(top: Section, text: Section) -> int:
    """Group size of the INT4 experts. The tensors tell which modules are INT4, not the `ignore` list."""
    found = [part for section in (text, top) if (part := section.section("quantization_config"))]
    if not found:
        raise CheckpointError(f"{text.where('quantization_config')} is missing: this engine needs {INT4}")
    return [int4_group_size(part) for part in found][0]


def _eos_token_ids(directory: Path, top: Section, text: Section) -> tuple[int, ...]:
    """All ids that end a sequence, ascending.

    Kimi's config names one of two, by release; the tokenizer's names give both.
    """
    sections = [top, text]
    if (directory / "generation_config.json").exists():
        sections.append(load_json(directory / "generation_config.json", ""))
    ids: set[int] = set()
    for section in sections:
        value = section.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in values):
            raise CheckpointError(f"{section.where('eos_token_id')} is {value!r}: expected token ids")
        ids.update(values)
    tokenizer = directory / "tokenizer_config.json"
    if tokenizer.exists():  # a real build insists on it; synthetic weights need config.json alone
        names = load_json(tokenizer, "the ids of <|im_end|> and [EOS] come from it; copy it from the checkpoint")
        added = names.section("added_tokens_decoder")
        for number, entry in added.values.items() if added else ():
            if isinstance(entry, dict) and entry.get("content") in STOP_TOKENS and number.isdecimal():
                ids.add(int(number))
    if not ids:
        raise CheckpointError(f"{text.where('eos_token_id')} is missing: the engine would never stop")
    return tuple(sorted(ids))


def _refuse_unsupported_draft(own: Section) -> None:
    if unknown := sorted(own.values.keys() - {*DRAFT_KEYS.split(), *INERT_KEYS.split()}):
        raise CheckpointError(
            f"{own.where(some(unknown))}: unknown to this engine, so it cannot tell whether the drafter "
            "would be computed rightly; remove what does not change the math"
        )
    own.refuse_unless("model_type", "qwen3")
    own.refuse_unless("hidden_act", "silu")
    own.refuse_unless("attention_bias", False)
    own.refuse_unless("mlp_bias", False)
    own.refuse_unless("use_sliding_window", False)
    own.refuse_unless("final_logit_softcapping")
    own.refuse_unless("input_embedding_scale", 1.0)
    own.refuse_unless("output_multiplier", 1.0)
    layer_types = own.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise CheckpointError(f"{own.where('layer_types')} is {layer_types}: this engine supports only full_attention")


def load_draft_config(directory: Path) -> DraftConfig:
    """config.json of a DFlash drafter; the method's own keys may be at the top or in `dflash_config`.

    Keys that this engine does not know are refused: they may change the math.
    """
    top = load_json(directory / "config.json", "expected the directory of a DFlash drafter")
    nested = top.section("dflash_config") or Section(top.path, {})
    for key in sorted(nested.values.keys() & top.values.keys()):
        if nested.values[key] != top.values[key]:
            raise CheckpointError(
                f"{nested.where(key)} is {nested.values[key]!r}, but {key} is {top.values[key]!r}: expected one value"
            )
    own = Section(top.path, {**top.values, **nested.values})
    _refuse_unsupported_draft(own)
    taps = own.get("target_layer_ids")
    whole = isinstance(taps, list) and all(type(tap) is int and tap >= 0 for tap in taps)
    if not whole or not taps or len(set(taps)) != len(taps):
        raise CheckpointError(
            f"{own.where('target_layer_ids')} is {taps!r}: expected a list of different layer numbers"
        )
    rope = _rope(top, top.integer("head_dim"), defaults=YARN_DEFAULTS)
    draft = DraftConfig(
        hidden_size=top.integer("hidden_size"),
        intermediate_size=top.integer("intermediate_size"),
        num_hidden_layers=top.integer("num_hidden_layers"),
        num_attention_heads=top.integer("num_attention_heads"),
        num_key_value_heads=top.integer("num_key_value_heads"),
        head_dim=top.integer("head_dim"),
        rms_norm_eps=top.positive("rms_norm_eps"),
        max_position_embeddings=top.integer("max_position_embeddings"),
        block_size=own.integer("block_size", least=2),
        mask_token_id=own.integer("mask_token_id", least=0),
        target_layer_ids=tuple(taps),
        num_target_layers=own.optional_integer("num_target_layers"),
        vocab_size=top.integer("vocab_size"),
        rope=rope,
        sliding_window=None,
        rope_attention_factor=rope.attention_factor,
    )
    if draft.num_attention_heads % draft.num_key_value_heads:
        raise CheckpointError(
            f"{top.where('num_attention_heads')} is {draft.num_attention_heads}: expected a multiple of "
            f"num_key_value_heads, {draft.num_key_value_heads}"
        )
    return draft


def check_draft_matches(model: ModelConfig, draft: DraftConfig) -> None:
    """Raise `CheckpointError` unless `draft` was made for a model of `model`'s sizes."""
    layers = model.num_hidden_layers
    problems = [
        f"the drafter's {key} is {found}, the target's {expected}: use a drafter trained for this target"
        for key, found, expected in (
            ("hidden_size", draft.hidden_size, model.hidden_size),
            ("vocab_size", draft.vocab_size, model.vocab_size),
            ("num_target_layers", draft.num_target_layers or layers, layers),
        )
        if found != expected
    ]
    # A tap of the last layer is ambiguous: transformers shows that layer's output only after the final norm.
    last = layers - 2
    if wrong := [str(layer) for layer in draft.target_layer_ids if layer > last]:
        problems.append(f"the drafter taps target layer {some(wrong)}: expected layers 0 to {last} of this target")
    if draft.mask_token_id >= model.vocab_size:
        problems.append(f"the drafter's mask_token_id is {draft.mask_token_id}: expected below {model.vocab_size}")
    if problems:
        raise CheckpointError(*problems)
