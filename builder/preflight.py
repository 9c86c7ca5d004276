"""Which tensors a checkpoint must have, and the check that it has these and no others.

Both ways: a tensor that the engine would not read stops the build unless it is known to be of no use, so no
weight is left out, or left uninitialised, in silence. INT4 modules are known by their `weight_packed`, never
by the `ignore` patterns of quantization_config, which loaders disagree about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from builder.checkpoint import ITEM_BYTES, Checkpoint, TensorInfo
from builder.config import DraftConfig, ModelConfig
from builder.config_file import INT4
from builder.errors import CheckpointError

BF16 = ("bfloat16",)
PLAIN_EXPERT = re.compile(r"\.mlp\.experts\.(\d+\.)?[a-z_]+(\.weight)?$")


class Expected(NamedTuple):
    """A tensor that must be there: the dtypes it may have (the usual one first) and its shape."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the usual dtype."""
        return prod(self.shape) * ITEM_BYTES[self.dtypes[0]]


@dataclass(frozen=True)
class Ignored:
    """Tensors that the engine does not read, and why."""

    reason: str
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class CheckpointReport:
    """What a checked checkpoint holds. router_dtype: dtype of the router weights ("" for a drafter)."""

    consumed: tuple[str, ...]
    consumed_bytes: int
    ignored: tuple[Ignored, ...]
    router_dtype: str

    def lines(self) -> list[str]:
        """For people: what is read, and what is not."""
        text = [f"{len(self.consumed):,} tensors, {self.consumed_bytes / 1e9:,.1f} GB, are read"]
        for group in self.ignored:
            text.append(f"{len(group.names):,} tensors, {group.nbytes / 1e9:,.3f} GB, are ignored: {group.reason}")
        return text


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every tensor of the text model, by checkpoint name. K2.6: 208,215 tensors, 594.2 GB."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    prefix = f"{config.tensor_prefix}model."
    found = {
        f"{prefix}embed_tokens.weight": Expected(BF16, (config.vocab_size, hidden)),
        f"{prefix}norm.weight": Expected(BF16, (hidden,)),
        f"{config.tensor_prefix}lm_head.weight": Expected(BF16, (config.vocab_size, hidden)),
    }
    attention = {
        "q_a_proj": (config.q_lora_rank, hidden),
        "q_a_layernorm": (config.q_lora_rank,),
        "q_b_proj": (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank),
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    for index in range(config.num_hidden_layers):
        layer = f"{prefix}layers.{index}."
        found[f"{layer}input_layernorm.weight"] = Expected(BF16, (hidden,))
        found[f"{layer}post_attention_layernorm.weight"] = Expected(BF16, (hidden,))
        for name, shape in attention.items():
            found[f"{layer}self_attn.{name}.weight"] = Expected(BF16, shape)
        if config.is_moe_layer(index):
            _add_moe(found, f"{layer}mlp.", config)
        else:
            _add_mlp(found, f"{layer}mlp.", hidden, config.intermediate_size)
    return found


def _add_mlp(found: dict[str, Expected], prefix: str, hidden: int, inter: int) -> None:
    for name, shape in _mlp_shapes(hidden, inter).items():
        found[f"{prefix}{name}.weight"] = Expected(BF16, shape)


def _mlp_shapes(hidden: int, inter: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}


def _add_moe(found: dict[str, Expected], prefix: str, config: ModelConfig) -> None:
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    # re-saves keep the router in float32, as transformers computes it; the bias loses its meaning in bfloat16
    found[f"{prefix}gate.weight"] = Expected(("bfloat16", "float32"), (config.n_routed_experts, hidden))
    found[f"{prefix}gate.e_score_correction_bias"] = Expected(("float32",), (config.n_routed_experts,))
    if config.n_shared_experts:
        _add_mlp(found, f"{prefix}shared_experts.", hidden, inter * config.n_shared_experts)
    parts = []
    for name, (rows, columns) in _mlp_shapes(hidden, inter).items():
        parts += [
            (f"{name}.weight_packed", Expected(("int32",), (rows, columns // 8))),
            (f"{name}.weight_scale", Expected(BF16, (rows, columns // config.expert_group_size))),
            (f"{name}.weight_shape", Expected(("int32", "int64"), (2,))),
        ]
    for expert in range(config.n_routed_experts):
        for name, expected in parts:
            found[f"{prefix}experts.{expert}.{name}"] = expected


def expected_draft_tensors(draft: DraftConfig) -> dict[str, Expected]:
    """Every tensor of a DFlash drafter. Kimi K2.6's: 69 tensors, 3,479,277,056 parameters."""
    hidden, dim = draft.hidden_size, draft.head_dim
    query, key = draft.num_attention_heads * dim, draft.num_key_value_heads * dim
    found = {
        "fc.weight": Expected(BF16, (hidden, len(draft.target_layer_ids) * hidden)),
        "hidden_norm.weight": Expected(BF16, (hidden,)),
        "norm.weight": Expected(BF16, (hidden,)),
    }
    parts = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
    }
    for index in range(draft.num_hidden_layers):
        for name, shape in parts.items():
            found[f"layers.{index}.{name}.weight"] = Expected(BF16, shape)
        _add_mlp(found, f"layers.{index}.mlp.", hidden, draft.intermediate_size)
    return found


def preflight(checkpoint: Checkpoint, config: ModelConfig) -> CheckpointReport:
    """Check every tensor of a target checkpoint; raises `CheckpointError` with all findings.

    Reads no weights, only the headers (already in memory) and the experts' `weight_shape` values.
    """
    layer_name = re.compile(re.escape(f"{config.tensor_prefix}model.layers.") + r"(\d+)\.")

    def reason(name: str) -> str | None:
        if name.startswith(("vision_tower.", "mm_projector.")):
            return "vision (this engine reads text only)"
        if name.endswith(".rotary_emb.inv_freq"):
            return "rotary frequencies (computed from config.json)"
        layer = layer_name.match(name)
        if layer and 0 <= int(layer[1]) - config.num_hidden_layers < config.num_nextn_predict_layers:
            return "multi-token prediction layers (this engine drafts with DFlash)"
        return None

    expected = expected_tensors(config)
    report = _account(checkpoint, expected, reason, f"a text model of {config.num_hidden_layers} layers")
    _check_weight_shapes(checkpoint, expected)
    return report


def preflight_draft(checkpoint: Checkpoint, draft: DraftConfig) -> CheckpointReport:
    """Check every tensor of a drafter checkpoint; raises `CheckpointError` with all findings."""

    def reason(name: str) -> str | None:
        return "rotary frequencies (computed from config.json)" if name.endswith("rotary_emb.inv_freq") else None

    return _account(checkpoint, expected_draft_tensors(draft), reason, "a DFlash drafter")


def _account(
    checkpoint: Checkpoint,
    expected: Mapping[str, Expected],
    ignored_because: Callable[[str], str | None],
    what: str,
) -> CheckpointReport:
    ignored: dict[str, list[TensorInfo]] = {}
    consumed: list[TensorInfo] = []
    unknown: list[TensorInfo] = []
    problems: list[str] = []
    for info in checkpoint.infos():
        wanted = expected.get(info.name)
        if wanted is not None:
            consumed.append(info)
            if info.dtype not in wanted.dtypes or info.shape != wanted.shape:
                problems.append(_mismatch(checkpoint, info, wanted))
        elif (reason := ignored_because(info.name)) is not None:
            ignored.setdefault(reason, []).append(info)
        else:
            unknown.append(info)
    _refuse_other_formats(checkpoint, [*consumed, *unknown], expected)
    present = {info.name for info in consumed}
    missing = [name for name in expected if name not in present]
    problems += [f"{checkpoint.directory}: tensor {name} is missing: download the checkpoint again" for name in missing]
    problems += [
        f"{checkpoint.directory / info.file}: tensor {info.name} ({info.dtype} {list(info.shape)}) has no "
        f"place in {what}: expected only tensors that config.json accounts for"
        for info in unknown
    ]
    routers = {info.dtype for info in consumed if info.name.endswith(".mlp.gate.weight")}
    if len(routers) > 1:
        problems.append(
            f"{checkpoint.directory}: router weights are {' and '.join(sorted(routers))}: expected one dtype"
        )
    if problems:
        raise CheckpointError(*problems)
    return CheckpointReport(
        consumed=tuple(info.name for info in consumed),
        consumed_bytes=sum(info.nbytes for info in consumed),
        ignored=tuple(
            Ignored(reason, tuple(info.name for info in infos), sum(info.nbytes for info in infos))
            for reason, infos in ignored.items()
        ),
        router_dtype=next(iter(routers), ""),
    )


def _mismatch(checkpoint: Checkpoint, info: TensorInfo, wanted: Expected) -> str:
    return (
        f"{checkpoint.directory / info.file}: tensor {info.name} is {info.dtype} {list(info.shape)}: "
        f"expected {' or '.join(wanted.dtypes)} {list(wanted.shape)} by config.json; use one revision"
    )


def _refuse_other_formats(checkpoint: Checkpoint, infos: list[TensorInfo], expected: Mapping[str, Expected]) -> None:
    """One sentence for a checkpoint in another weight format, instead of one for each of its tensors."""
    for info in infos:
        if info.dtype.startswith("float8") or info.name.endswith(".weight_scale_inv"):
            fault = f"belongs to an FP8 checkpoint: this engine needs experts with {INT4}"
        elif info.name in expected:
            continue
        elif PLAIN_EXPERT.search(info.name):
            fault = f"is an expert in {info.dtype}: this engine needs experts with {INT4}"
        elif info.name.endswith(".weight_packed"):
            fault = "is quantized: this engine supports quantized weights only in routed experts"
        else:
            continue
        raise CheckpointError(f"{checkpoint.directory / info.file}: tensor {info.name} {fault}")


def _check_weight_shapes(checkpoint: Checkpoint, expected: Mapping[str, Expected]) -> None:
    """`weight_shape` must hold (out, in) of the packed tensor beside it."""
    suffix = ".weight_shape"
    names = [name for name in expected if name.endswith(suffix)]
    problems = []
    for name, value in checkpoint.read_many(names).items():
        rows, words = expected[f"{name.removesuffix(suffix)}.weight_packed"].shape
        if value.tolist() != [rows, words * 8]:
            problems.append(
                f"{checkpoint.directory / checkpoint.info(name).file}: tensor {name} holds {value.tolist()}: "
                f"expected {[rows, words * 8]}, the shape of the weight packed beside it"
            )
    if problems:
        raise CheckpointError(*problems)
