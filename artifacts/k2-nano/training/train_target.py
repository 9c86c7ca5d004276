"""Train the K2-Nano target with INT4-aware routed experts and export it.

    python train_target.py --work ../work --checkpoint ../checkpoint --steps 5000

The configuration is read from CHECKPOINT/config.json; the shards are written beside it (or to --out). Experts are
fake-quantised with the checkpoint's own rule, so the exported integers and scales give the trained function. Expert
load is balanced by moving e_score_correction_bias (no auxiliary loss).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import load_target, save_target, text_config
from model import Target
from optim import learning_rate, make_optimizers
from stream import Clock, Stream
from torch import Tensor

HERE = Path(__file__).resolve().parent
LOG_EVERY = 100  # steps; the clock is read as often as every CLOCK_EVERY steps
CLOCK_EVERY = 10


def head_loss(model: Target, x: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of labels [B,S] under the head applied to the residual stream x [B,S,H]."""
    return F.cross_entropy(model.logits(x).flatten(0, 1).float(), labels.flatten())


def loss_of(model: Target, ids: Tensor, head: Callable[[Target, Tensor, Tensor], Tensor] = head_loss) -> Tensor:
    """Mean next-token cross-entropy (nats) of ids [B, S+1]; `head` may be a compiled head_loss."""
    states, _ = model(ids[:, :-1])
    return head(model, states[-1], ids[:, 1:])


def balance(model: Target, rate: float) -> Tensor:
    """Move each correction bias by `rate` towards equal load; returns the largest load over the mean load."""
    worst = torch.zeros(())
    for block in model.moe_layers:
        mean = block.load.mean()
        block.gate.e_score_correction_bias.add_((mean - block.load).sign(), alpha=rate)
        worst = torch.maximum(worst.to(mean), block.load.max() / mean)
        block.load.zero_()
    return worst


@torch.no_grad()
def heldout_loss(model: Target, stream: Stream, batches: int, batch: int, length: int) -> float:
    """Mean loss over windows that cover the start of the held-out stream."""
    total = 0.0
    usable = min(batches, (len(stream.ids) - 1) // (batch * length))
    for i in range(usable):
        begin = torch.arange(batch, device=stream.ids.device)[:, None] * length + i * batch * length
        total += loss_of(model, stream.ids[begin + torch.arange(length + 1, device=begin.device)].long()).item()
    return total / max(usable, 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parent / "work")
    parser.add_argument("--checkpoint", type=Path, default=HERE.parent / "checkpoint")
    parser.add_argument("--out", type=Path, help="folder of the shards; default: the checkpoint folder")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, help="train for this long instead of a number of steps")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--bias-rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(args.device).manual_seed(1)
    model = Target(text_config(args.checkpoint), torch.bfloat16).to(args.device)
    for block in model.moe_layers:
        block.experts.train_quantized = True
    optimizers = make_optimizers(model, args.muon_lr, args.adam_lr)
    train = Stream(args.work / "carry/train.u16.xz", args.device)
    head = head_loss
    if not args.no_compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        head = torch.compile(head_loss, dynamic=False)
    clock, step, progress, log = Clock(args.steps, args.seconds), 0, 0.0, []
    while progress < 1:
        rate = learning_rate(progress)
        for optimizer, peak in zip(optimizers, (args.muon_lr, args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        loss = loss_of(model, train.sample(args.batch, args.length + 1, generator), head)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = balance(model, args.bias_rate * rate)
        step += 1
        if step % LOG_EVERY == 0:
            log.append({"step": step, "loss": round(loss.item(), 4), "worst_load": round(float(worst), 2)})
            print(log[-1], f"{clock.elapsed():.0f} s", flush=True)
        if step % CLOCK_EVERY == 0:
            loss.item()  # waits for the device, so that the clock tells the truth
            progress = clock.progress(step)
    seconds = clock.elapsed()
    out = args.out or args.checkpoint
    save_target(model, out)
    exported = load_target(out, torch.bfloat16, args.device, config=model.config)
    held = Stream(args.work / "carry/heldout.u16.xz", args.device)
    report = {
        "steps": step,
        "seconds": round(seconds, 1),
        "tokens": step * args.batch * args.length,
        "corpus_tokens": len(train.ids),
        "heldout_loss_exported": heldout_loss(exported, held, 100, 16, args.length),
    }
    (args.work / "target_log.json").write_text(json.dumps({"report": report, "log": log}, indent=1) + "\n")
    print(report, flush=True)


if __name__ == "__main__":
    main()
