"""Write a random-weight checkpoint and drafter with the shapes of K2-Nano, for tests that need no trained weights.

    python export.py --out DIR     # DIR/checkpoint and DIR/draft, the other files copied from the trained folders

The trained weights are exported by train_target.py and train_draft.py through the same functions (checkpoint.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from checkpoint import save_draft, save_target, text_config
from draft_model import Draft
from model import Target

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    for part in ("checkpoint", "draft"):
        shutil.copytree(
            ROOT / part, args.out / part, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True
        )
    target = Target(text_config(ROOT / "checkpoint"), torch.float32)
    for block in target.moe_layers:
        block.gate.e_score_correction_bias.normal_(0, 0.02)
    save_target(target, args.out / "checkpoint")
    save_draft(Draft(json.loads((ROOT / "draft/config.json").read_text()), torch.float32), args.out / "draft")


if __name__ == "__main__":
    main()
