"""Evaluate the exported K2-Nano: held-out loss, expert load, and acceptance of DFlash chains and DDTree trees.

    python evaluate.py --work ../work                # everything
    python evaluate.py --prompts 60 --no-loss        # a quick look, needs no corpus

Acceptance is measured against the target's own greedy continuation of the held-out prompts. Because accepted tokens
are exactly those, drafts may be computed for every anchor of the finished text at once; the rounds of speculative
decoding are then walked: draft at the last committed token, accept the longest path of the tree that agrees, commit
it plus the bonus token. One walk step is one verify pass of the target.
"""

from __future__ import annotations

import argparse
import heapq
import json
from pathlib import Path
from typing import Any

import chat
import numpy as np
import tokenizer
import torch
from checkpoint import load_draft, load_target
from draft_model import Draft
from model import Target
from stream import Stream
from train_target import heldout_loss

HERE = Path(__file__).resolve().parent
BUDGETS = (4, 8, 16, 32)
CHAINS = (4, 7)
STOPS = (tokenizer.BASE + 1, tokenizer.BASE + 2)  # [EOS], <|im_end|>


def ddtree(log_probs: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The `budget` most probable prefixes as rank tuples, best first.

    log_probs [L, K]: per depth, the log-probabilities of its K best tokens in falling order. The first b entries are
    the best tree with b nodes, parents before children.
    """
    depth, width = log_probs.shape
    heap, nodes = [(-float(log_probs[0, 0]), (0,))], []
    while heap and len(nodes) < budget:
        negative, ranks = heapq.heappop(heap)
        nodes.append(ranks)
        level, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < width:
            sibling = negative + float(log_probs[level, rank]) - float(log_probs[level, rank + 1])
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1)))
        if level + 1 < depth:
            heapq.heappush(heap, (negative - float(log_probs[level + 1, 0]), (*ranks, 0)))
    return nodes


def accepted(log_probs: np.ndarray, tokens: np.ndarray, truth: np.ndarray) -> dict[str, int]:
    """Accepted nodes of every scheme at one anchor. log_probs, tokens [L, K] of the draft; truth [L] greedy tokens."""
    hits = tokens == truth[:, None]
    ranks = [int(h.argmax()) if h.any() else -1 for h in hits]
    spine = next((i for i, r in enumerate(ranks) if r != 0), len(ranks))
    reach = next((i for i, r in enumerate(ranks) if r < 0), len(ranks))
    right = {tuple(ranks[: d + 1]) for d in range(reach)}
    out = {f"chain {n}": min(spine, n) for n in CHAINS}
    nodes = ddtree(log_probs, max(BUDGETS))
    for budget in BUDGETS:
        out[f"tree {budget}"] = sum(node in right for node in nodes[:budget])
    return out


def load_prompts(path: Path, most: int) -> list[tuple[str, list[int]]]:
    """(kind, token ids) of up to `most` prompts, spread evenly over the file."""
    encoding = tokenizer.load()
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    step = max(1, len(entries) // most) if most else 1
    out = []
    for entry in entries[::step]:
        if "text" in entry:
            ids = encoding.encode_ordinary(entry["text"])
        else:
            options = {
                "tools": entry.get("tools"),
                "thinking": entry["thinking"],
                "add_generation_prompt": True,
            }
            ids = encoding.encode(chat.render(entry["messages"], **options), allowed_special="all")
        out.append((entry["kind"], ids))
    return out


@torch.inference_mode()
def draft_everywhere(
    target: Target, draft: Draft, texts: torch.Tensor, anchors: torch.Tensor, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts at anchors [B,N] of texts [B,S]: log-probabilities and tokens [B,N,7,width] of the best candidates."""
    states, _ = target(texts)
    logits = draft(draft.context(states), texts, anchors, target.model.embed_tokens.weight, target.lm_head.weight)
    best = logits.float().log_softmax(-1).topk(width, -1)
    return best.values.cpu().numpy(), best.indices.cpu().numpy()


def walk(results: list[dict[str, int]], scheme: str, length: int) -> tuple[int, int, list[int]]:
    """Speculative rounds over `length` tokens after the first: (tokens, passes, accepted per pass)."""
    position, per_pass = 0, []
    while position < length:
        count = min(results[position][scheme], length - position - 1)
        per_pass.append(count)
        position += count + 1
    return length, len(per_pass), per_pass


def repeated_share(tokens: list[int], size: int = 8) -> float:
    """Share of the tokens that end an n-gram seen before in the same continuation."""
    seen, repeats = set(), 0
    for i in range(size, len(tokens) + 1):
        gram = tuple(tokens[i - size : i])
        repeats += gram in seen
        seen.add(gram)
    return repeats / max(1, len(tokens))


def acceptance(
    target: Target, draft: Draft, prompts: list[tuple[str, list[int]]], new: int, batch: int
) -> dict[str, Any]:
    """Tokens per pass by scheme and prompt kind, and acceptance by depth."""
    device, width = target.lm_head.weight.device, max(BUDGETS)
    schemes = [f"chain {n}" for n in CHAINS] + [f"tree {b}" for b in BUDGETS]
    totals: dict[tuple[str, str], np.ndarray] = {}
    depths = {s: np.zeros(draft.block) for s in schemes}
    repeats = []
    order = sorted(prompts, key=lambda p: len(p[1]))
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        lengths = torch.tensor([len(ids) for _, ids in part])
        padded = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
        for row, (_, ids) in enumerate(part):
            padded[row, : len(ids)] = torch.tensor(ids)
        texts = target.generate(padded.to(device), lengths.to(device), new + draft.block).clone()
        anchors = lengths[:, None] + torch.arange(new)
        values, tokens = draft_everywhere(target, draft, texts, anchors.to(device), width)
        for row, (kind, ids) in enumerate(part):
            text = texts[row, len(ids) :].cpu().numpy()[: new + draft.block]
            ends = np.isin(text[:new], STOPS).nonzero()[0]
            length = int(ends[0]) if len(ends) else new - 1  # tokens after the first, with the stop
            repeats.append(repeated_share(text[: length + 1].tolist()))
            results = [accepted(values[row, i], tokens[row, i], text[i + 1 : i + draft.block]) for i in range(length)]
            for scheme in schemes if length else []:
                count, passes, per_pass = walk(results, scheme, length)
                for key in ((scheme, kind), (scheme, "all")):
                    totals[key] = totals.get(key, np.zeros(2)) + (count, passes)
                for taken in per_pass:
                    depths[scheme][: taken + 1] += 1
    kinds = sorted({kind for _, kind in totals})
    table = {s: {k: round(float(np.divide(*totals[(s, k)])), 3) for k in kinds if (s, k) in totals} for s in schemes}
    reached = {s: [round(float(b / max(a, 1)), 3) for a, b in zip(d, d[1:], strict=False)] for s, d in depths.items()}
    passes = {s: int(totals[(s, "all")][1]) for s in schemes}
    return {
        "tokens_per_pass": table,
        "acceptance_by_depth": reached,
        "passes": passes,
        "tokens": int(totals[("tree 16", "all")][0]),
        "repeated_8gram_share": round(float(np.mean(repeats)), 3),
    }


def loss_report(target: Target, work: Path, batches: int) -> dict[str, Any]:
    """Held-out loss in nats per token and bits per byte, and each MoE layer's smallest and largest expert share."""
    stream = Stream(work / "carry/heldout.u16.xz", str(target.lm_head.weight.device))
    size = json.loads((work / "carry/summary.json").read_text())
    for block in target.moe_layers:
        block.load.zero_()
    nats = heldout_loss(target, stream, batches, 4, 1024)
    shares = [block.load / block.load.sum() * len(block.load) for block in target.moe_layers]
    return {
        "nats_per_token": round(nats, 4),
        "bits_per_byte": round(nats / np.log(2) * size["tokens"]["heldout"] / size["heldout_bytes"], 4),
        "expert_load_over_mean": [[round(s.min().item(), 2), round(s.max().item(), 2)] for s in shares],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parent / "work")
    parser.add_argument("--checkpoint", type=Path, default=HERE.parent / "checkpoint")
    parser.add_argument("--draft", type=Path, default=HERE.parent / "draft")
    parser.add_argument("--prompt-file", type=Path, default=HERE.parent / "heldout/prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=0, help="number of prompts, 0 for all")
    parser.add_argument("--new", type=int, default=128, help="tokens generated for a prompt at most")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--loss-batches", type=int, default=200, help="windows of 4 x 1024 tokens of the loss")
    parser.add_argument("--no-loss", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="also write the report here")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    target = load_target(args.checkpoint, dtype, args.device)
    draft = load_draft(args.draft, dtype, args.device)
    prompts = load_prompts(args.prompt_file, args.prompts)
    report = {"prompts": len(prompts), "new_tokens": args.new, "dtype": args.dtype}
    report |= acceptance(target, draft, prompts, args.new, args.batch)
    if not args.no_loss:
        report["loss"] = loss_report(target, args.work, args.loss_batches)
    text = json.dumps(report, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
