"""Read and write the K2.6-format checkpoint and the DFlash drafter folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from draft_model import Draft
from model import Target, dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "language_model."
SHARDS = 3
STACKED = ("gate", "up", "down")


def pack(codes: Tensor) -> Tensor:
    """int8 codes [out, in] in [-8, 7] -> int32 [out, in/8]; column k sits in bits 4*(k%8) of word k//8, offset by 8."""
    nibbles = (codes.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """int32 [out, in/8] -> int8 codes [out, in]."""
    return (((words.unsqueeze(-1) >> (4 * torch.arange(8))) & 0xF) - 8).flatten(-2).to(torch.int8)


def checkpoint_tensors(model: Target) -> dict[str, Tensor]:
    """All tensors of the checkpoint by their full names, on the CPU, in layer order."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("mlp.experts"):
            for expert, weight in enumerate(value):
                codes, scale = quantize(weight)
                full = f"{PREFIX}{stem}.{expert}.{leaf}_proj.weight"
                out[f"{full}_packed"], out[f"{full}_scale"] = pack(codes), scale
                out[f"{full}_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
        else:
            out[PREFIX + name] = value.float() if name.endswith("e_score_correction_bias") else value.bfloat16()
    return out


def save_target(model: Target, folder: Path) -> None:
    """Write the shards and their index (config and tokenizer files are not touched)."""
    tensors = checkpoint_tensors(model)
    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    size = 0
    for name, tensor in tensors.items():
        shards[min(size * SHARDS // total, SHARDS - 1)][name] = tensor.contiguous()
        size += tensor.nbytes
    weight_map = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def text_config(folder: Path) -> dict[str, Any]:
    """The text_config of a checkpoint."""
    return json.loads((folder / "config.json").read_text())["text_config"]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor that the index of a checkpoint names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / file)
    return tensors


def expert_weight(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Dequantised bfloat16 weight of the packed tensor family `name` (…_proj.weight)."""
    codes = unpack(tensors[f"{name}_packed"])
    if list(codes.shape) != tensors[f"{name}_shape"].tolist():
        raise ValueError(f"{name}: weight_shape is {tensors[f'{name}_shape'].tolist()}, packed is {list(codes.shape)}")
    return dequantize(codes, tensors[f"{name}_scale"])


def load_target(folder: Path, dtype: torch.dtype, device: str, config: dict[str, Any] | None = None) -> Target:
    """The exported model, dequantised, with frozen parameters held and computed in `dtype` (router and norms in
    float32); weights come from `folder`, the configuration too unless given."""
    model = Target(config or text_config(folder), dtype)
    tensors = read_tensors(folder)
    state = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("mlp.experts"):
            names = [f"{PREFIX}{stem}.{e}.{leaf}_proj.weight" for e in range(len(value))]
            state[name] = torch.stack([expert_weight(tensors, n) for n in names]).float()
        else:
            state[name] = tensors[PREFIX + name].float()
    model.load_state_dict(state)
    return frozen(model, dtype, device)


def frozen(model: torch.nn.Module, dtype: torch.dtype, device: str) -> Any:
    """Move to the device, hold matrices in `dtype`, and stop gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1 and not name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def save_draft(model: Draft, folder: Path) -> None:
    """Write model.safetensors of the drafter in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_draft(folder: Path, dtype: torch.dtype, device: str) -> Draft:
    """The exported drafter with frozen parameters."""
    model = Draft(json.loads((folder / "config.json").read_text()), dtype)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return frozen(model, dtype, device)
