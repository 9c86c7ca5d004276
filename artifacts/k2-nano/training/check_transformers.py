"""Compare the exported checkpoint with the DeepSeek-V3 implementation of transformers, both in float32 on the CPU.

    python check_transformers.py

The state dict of DeepseekV3ForCausalLM is built from the checkpoint files: experts dequantised in bf16 and stacked
(gate rows above up rows), everything widened to float32. Exits with an error when the logits of a held-out prompt
differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from checkpoint import PREFIX, expert_weight, load_target, read_tensors, text_config
from evaluate import load_prompts
from model import Target
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4


def reference(folder: Path) -> DeepseekV3ForCausalLM:
    """The float32 transformers model with the checkpoint's dequantised weights."""
    settings = {k: v for k, v in text_config(folder).items() if k not in ("quantization_config", "model_type", "dtype")}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings, attn_implementation="eager")).float().eval()
    model.set_experts_implementation("eager")
    tensors = read_tensors(folder)
    experts = range(settings["n_routed_experts"])

    def value(name: str) -> Tensor:
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("mlp.experts"):
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
            names = [[f"{PREFIX}{stem}.{e}.{part}.weight" for part in parts] for e in experts]
            return torch.stack([torch.cat([expert_weight(tensors, n) for n in row]) for row in names]).float()
        return tensors[PREFIX + name].float()

    model.load_state_dict({name: value(name) for name in model.state_dict()})
    return model


def compare(ours: Target, theirs: DeepseekV3ForCausalLM, ids: list[int]) -> dict[str, float]:
    """Largest logit difference, largest logit, and the share of equal argmax over the prompt `ids`."""
    batch = torch.tensor([ids])
    with torch.inference_mode():
        a = ours.logits(ours(batch)[0][-1])[0]
        b = theirs(batch).logits[0]
    same = (a.argmax(-1) == b.argmax(-1)).float().mean()
    return {"difference": (a - b).abs().max().item(), "largest": b.abs().max().item(), "argmax_equal": same.item()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoint")
    args = parser.parse_args()
    prompts = load_prompts(ROOT / "heldout/prompts.jsonl", 6)
    ours, theirs = load_target(args.checkpoint, torch.float32, "cpu"), reference(args.checkpoint)
    results = [compare(ours, theirs, ids) | {"kind": kind, "tokens": len(ids)} for kind, ids in prompts]
    print("\n".join(json.dumps(r) for r in results))
    if max(r["difference"] for r in results) > TOLERANCE:
        raise SystemExit(f"logits differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
