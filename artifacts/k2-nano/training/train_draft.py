"""Train the DFlash drafter of K2-Nano on the frozen, exported target.

    python train_draft.py --work ../work --checkpoint ../checkpoint --draft ../draft --steps 5000

First the target continues real prefixes greedily (its own text is what acceptance is measured on); then blocks at
random anchors are learnt with cross-entropy, the weight falling with the depth in the block. A share of the steps uses
corpus text instead. Target states are computed on the fly.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import load_draft, load_target, save_draft
from draft_model import Draft
from model import Target
from optim import learning_rate, make_optimizers
from stream import Clock, Stream
from torch import Tensor

HERE = Path(__file__).resolve().parent
LOG_EVERY = 100  # steps
CLOCK_EVERY = 10
LENGTH = 512  # tokens of a training sequence
PREFIXES = (64, 128, 224, 352)  # tokens of real text before the target's own
DEPTH_DECAY = 5.0  # weight of depth d is exp(-(d - 1) / DEPTH_DECAY)
CORPUS_SHARE = 0.1  # share of the steps on corpus text


def rollouts(target: Target, stream: Stream, args: argparse.Namespace, generator: torch.Generator) -> dict[int, Tensor]:
    """Prefix length -> sequences [n, prefix + new] (int16-safe ids): real prefixes and the target's greedy text."""
    pools: dict[int, list[Tensor]] = {prefix: [] for prefix in PREFIXES}
    clock = Clock(args.rollout_batches, args.rollout_seconds)
    done = 0
    while clock.progress(done) < 1 or done < len(PREFIXES):
        prefix = PREFIXES[done % len(PREFIXES)]
        prompts = stream.sample(args.rollout_batch, prefix, generator)
        lengths = torch.full((args.rollout_batch,), prefix, device=prompts.device)
        pools[prefix].append(target.generate(prompts, lengths, args.new).int().clone())
        if prompts.is_cuda:
            torch.cuda.synchronize()
        done += 1
    print(
        f"rollouts: {done} batches of {args.rollout_batch} x {args.new} in {clock.elapsed():.0f} s",
        flush=True,
    )
    return {prefix: torch.cat(parts) for prefix, parts in pools.items()}


def block_loss(
    draft: Draft, context: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Depth-weighted cross-entropy of the blocks at `anchors` [1,N], and the hit rate of the argmax per depth [7]."""
    logits = draft(context, ids, anchors, embedding, head).float()  # [B,N,7,V]
    depth = logits.shape[2]
    labels = ids[:, anchors[0, :, None] + torch.arange(1, depth + 1, device=ids.device)]
    losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    weights = torch.exp(-torch.arange(depth, device=ids.device) / DEPTH_DECAY)
    hits = (logits.detach().argmax(-1) == labels).float().mean((0, 1))
    return (losses.mean((0, 1)) * weights).sum() / weights.sum(), hits


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parent / "work")
    parser.add_argument("--checkpoint", type=Path, default=HERE.parent / "checkpoint")
    parser.add_argument("--shards", type=Path, help="folder of the target's shards; default: the checkpoint folder")
    parser.add_argument("--draft", type=Path, default=HERE.parent / "draft", help="folder of the drafter's config.json")
    parser.add_argument("--resume", action="store_true", help="start from the weights in the --draft folder")
    parser.add_argument("--out", type=Path, help="folder of model.safetensors; default: the draft folder")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, help="train for this long instead of a number of steps")
    parser.add_argument("--rollout-batches", type=int)
    parser.add_argument("--rollout-seconds", type=float)
    parser.add_argument("--rollout-batch", type=int, default=8192, help="sequences generated together")
    parser.add_argument("--new", type=int, default=160, help="tokens generated a sequence")
    parser.add_argument("--batch", type=int, default=128, help="sequences a step")
    parser.add_argument("--anchors", type=int, default=64, help="blocks a sequence")
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(args.device).manual_seed(2)
    config = json.loads((args.checkpoint / "config.json").read_text())["text_config"]
    target = load_target(args.shards or args.checkpoint, torch.bfloat16, args.device, config=config)
    stream = Stream(args.work / "carry/train.u16.xz", args.device)
    pools = rollouts(target, stream, args, generator)
    if args.resume:
        draft = load_draft(args.draft, torch.bfloat16, args.device).float().requires_grad_(True).train()
    else:
        draft = Draft(json.loads((args.draft / "config.json").read_text()), torch.bfloat16).to(args.device)
    optimizers = make_optimizers(draft, args.muon_lr, args.adam_lr)
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    loss_of = block_loss
    if not args.no_compile:
        loss_of = torch.compile(block_loss, dynamic=False)
        for layer in target.model.layers:
            layer.compile(dynamic=False)

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        """Token ids [batch, LENGTH] and anchors [1, N] of a step."""
        if math.floor(step * CORPUS_SHARE) != math.floor((step - 1) * CORPUS_SHARE):
            first, last, ids = 0, LENGTH - draft.block, stream.sample(args.batch, LENGTH, generator)
        else:
            prefix = PREFIXES[step % len(PREFIXES)]
            pool = pools[prefix]
            rows = torch.randint(len(pool), (args.batch,), device=pool.device, generator=generator)
            first, last, ids = prefix - 1, pool.shape[1] - draft.block, F.pad(pool[rows].long(), (0, LENGTH))
        picks = torch.randperm(last - first + 1, device=ids.device, generator=generator)[: args.anchors]
        return ids[:, :LENGTH].contiguous(), (first + picks)[None]

    clock, step, progress, log = Clock(args.steps, args.seconds), 0, 0.0, []
    while progress < 1:
        rate = learning_rate(progress)
        for optimizer, peak in zip(optimizers, (args.muon_lr, args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        step += 1
        ids, anchors = batch_of(step)
        with torch.no_grad():
            states, _ = target(ids)
        loss, hits = loss_of(draft, draft.context(states), ids, anchors, embedding, head)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            entry = {
                "step": step,
                "loss": round(loss.item(), 4),
                "hits": [round(h, 3) for h in hits.tolist()],
            }
            log.append(entry)
            print(entry, f"{clock.elapsed():.0f} s", flush=True)
        if step % CLOCK_EVERY == 0:
            loss.item()  # waits for the device, so that the clock tells the truth
            progress = clock.progress(step)
    report = {
        "steps": step,
        "seconds": round(clock.elapsed(), 1),
        "blocks": step * args.batch * args.anchors,
        "rollout_tokens": sum(p.shape[0] for p in pools.values()) * args.new,
    }
    out = args.out or args.draft
    save_draft(draft, out)
    (args.work / "draft_log.json").write_text(json.dumps({"report": report, "log": log}, indent=1) + "\n")
    print(report, flush=True)


if __name__ == "__main__":
    main()
