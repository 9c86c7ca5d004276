"""Latent attention of one tensor-parallel rank of eight (8 heads) on one GPU beside its ceilings and its peers.

    python bench/mla.py [--peer SCRIPT FOLDER] [--commit ID] -o bench/results/mla_h200.json

Ceilings, measured in the same run: reading memory, and a loop of mma.sync alone. A row's ceiling is the larger of its
KV bytes over the one and its FLOP over the other. Times are CUDA graph replays over several layers' pools, more than
the L2 holds; they include the splits' combination and W_UV. SCRIPT times vLLM's Triton kernel and FlashMLA (argument:
the folder with both) and prints its table; it is run as it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.moe import ceilings, timed  # noqa: E402
from plugins.core.plugin import Launch  # noqa: E402
from tests.plugins.gpu.device import Operator, kernel_of  # noqa: E402
from tests.plugins.gpu.test_mla import ROPE  # noqa: E402

HEADS, PAGE, LATENT, WIDTH, VALUE, NOPE, Q_RANK = 8, 64, 512, 576, 128, 128, 1536
SCALE = 0.1446796
TOKENS = (1, 4, 8, 16, 32)
MOST_ROWS = 128  # of a verify pass, over all requests
CASES = [(1, 0), (1, 1024), (1, 4096), (8, 4096), (1, 32_768), (1, 131_072), (1, 200_000)]
PREFILL = [(4096, 0), (4096, 32_768), (1024, 32_768), (512, 131_072), (256, 131_072)]
ROTATED_BYTES = 400_000_000


def mma_rate() -> float:
    """TFLOP/s of mma.sync m16n8k16 in bfloat16 with float32 sums, from registers alone."""
    rounds, blocks, threads = 4096, 4 * 132, 256
    launch = Launch("core/device/mma_rate.cu", "mma_rate", (("ROUNDS", rounds),), (blocks, 1, 1), (threads, 1, 1))
    out = torch.empty(blocks * threads, device="cuda")
    kernel = kernel_of(launch)
    us = timed([lambda: kernel.start((out.data_ptr(),), torch.cuda.current_stream().cuda_stream)], 5)
    return rounds * 8 * 4096 * blocks * threads // 32 / us / 1e6


def attention(tokens: int, requests: int, context: int, layer: int, pool: torch.Tensor) -> Operator:
    """One verify pass: `tokens` rows of each request, a chain, after `context` positions."""
    rows, pages = tokens * requests, -(-(context + tokens) // PAGE)
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages) + 1
    mask = torch.zeros(rows, 4, dtype=torch.int64)
    for row in range(rows):
        mask[row, 0] = (1 << (row % tokens + 1)) - 1
    inputs = [
        torch.randn(rows, HEADS, WIDTH, device="cuda").bfloat16(),
        torch.randn(HEADS, NOPE, LATENT, device="cuda").bfloat16(),
        torch.randn(HEADS, VALUE, LATENT, device="cuda").bfloat16(),
        torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(tokens),
        torch.arange(requests, device="cuda", dtype=torch.int32) * tokens,
        torch.full((requests,), tokens, device="cuda", dtype=torch.int32),
        torch.full((requests,), context, device="cuda", dtype=torch.int32),
        table,
        pool,
        mask.cuda().to(torch.uint32),
    ]
    attrs = {"layer": layer, "num_heads": HEADS, "softmax_scale": SCALE, "page_size": PAGE, "form": "absorbed"}
    return Operator("mla_attention", attrs, inputs)


def rows(read: float, mma: float) -> list[dict[str, Any]]:
    """read in TB/s, mma in TFLOP/s."""
    table = []
    for requests, context in CASES:
        slots = (requests * -(-(context + max(TOKENS)) // PAGE) + 1) * PAGE
        layers = max(1, min(8, ROTATED_BYTES // (slots * WIDTH * 2)))
        pool = torch.randn(layers, slots, WIDTH, device="cuda").bfloat16()
        for tokens in TOKENS:
            if tokens * requests > MOST_ROWS:
                continue
            calls = [attention(tokens, requests, context, layer, pool).start for layer in range(layers)]
            nbytes = requests * (context + tokens) * WIDTH * 2
            flops = 2 * requests * tokens * HEADS * (context + tokens / 2) * (WIDTH + LATENT)
            ceiling = max(nbytes / read, flops / mma) / 1e6
            us = timed(calls)
            table.append(
                {
                    "T": tokens,
                    "requests": requests,
                    "context": context,
                    "kv_dtype": "bfloat16",
                    "bytes": nbytes,
                    "flops": round(flops),
                    "us": us,
                    "ceiling_us": ceiling,
                }
            )
            print(
                f"T {tokens:3d} x {requests} context {context:7d} {us:8.1f} us, ceiling {ceiling:7.1f}, "
                f"over it {us - ceiling:7.1f}, {us / max(ceiling, 1e-3):5.2f} x",
                flush=True,
            )
    return table


def prepare_rows(read: float) -> list[dict[str, Any]]:
    table = []
    for tokens in TOKENS:
        calls = []
        for layer in range(8):
            inputs = [
                torch.randn(tokens, Q_RANK + WIDTH, device="cuda").bfloat16(),
                torch.randn(Q_RANK, device="cuda").bfloat16(),
                torch.randn(LATENT, device="cuda").bfloat16(),
                torch.randn(HEADS * 192, Q_RANK, device="cuda").bfloat16(),
                torch.randn(HEADS, NOPE, LATENT, device="cuda").bfloat16(),
                torch.arange(tokens, device="cuda", dtype=torch.int32),
                torch.arange(tokens, device="cuda", dtype=torch.int32) + 64,
                torch.zeros(8, 256, WIDTH, device="cuda").bfloat16(),
            ]
            attrs = {"layer": layer, "num_heads": HEADS, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": 64, "eps": 1e-6}
            calls.append(Operator("mla_prepare", {**attrs, "form": "absorbed", **ROPE}, inputs).start)
        nbytes = 2 * (HEADS * 192 * Q_RANK + HEADS * NOPE * LATENT)
        us = timed(calls)
        table.append({"T": tokens, "bytes": nbytes, "us": us, "bytes_us": nbytes / read / 1e6})
        print(f"prepare T {tokens:3d} {us:6.1f} us, its bytes {nbytes / read / 1e6:4.1f}", flush=True)
    return table


def prefill_rows(mma: float) -> list[dict[str, Any]]:
    """Chunks of one request, keys and values built from the latents included, beside torch's attention kernels on keys
    and values that are there already. Those see every position where there is a context: 2048 more of 36,864 a row.
    """
    backends = {"efficient_us": SDPBackend.EFFICIENT_ATTENTION, "cudnn_us": SDPBackend.CUDNN_ATTENTION}
    table = []
    for tokens, context in PREFILL:
        seen = context + tokens
        pages = -(-seen // PAGE)
        pool = torch.randn(1, (pages + 1) * PAGE, WIDTH, device="cuda").bfloat16()
        zero = torch.zeros(1, device="cuda", dtype=torch.int32)
        inputs = [
            torch.randn(tokens, HEADS, NOPE + 64, device="cuda").bfloat16(),
            (torch.randn(HEADS, NOPE, LATENT, device="cuda") * LATENT**-0.5).bfloat16(),
            (torch.randn(HEADS, VALUE, LATENT, device="cuda") * LATENT**-0.5).bfloat16(),
            torch.zeros(tokens, device="cuda", dtype=torch.int32),
            zero,
            zero + tokens,
            zero + context,
            torch.randperm(pages, device="cuda").int()[None] + 1,
            pool,
        ]
        attrs = {"layer": 0, "num_heads": HEADS, "softmax_scale": SCALE, "page_size": PAGE, "form": "expanded"}
        operator = Operator("mla_attention", attrs, inputs)
        pairs = tokens * (context + (tokens + 1) / 2)
        flops = 2 * HEADS * (pairs * (NOPE + 64 + VALUE) + seen * LATENT * (NOPE + VALUE))
        row: dict[str, Any] = {"T": tokens, "context": context, "flops": round(flops), "us": timed([operator.start], 5)}
        row["ceiling_us"] = flops / mma / 1e6
        q, k = (torch.randn(1, HEADS, n, NOPE + 64, device="cuda").bfloat16() for n in (tokens, seen))
        v = torch.randn(1, HEADS, seen, VALUE, device="cuda").bfloat16()
        for name, backend in backends.items():
            with sdpa_kernel(backend):
                call = partial(scaled_dot_product_attention, q, k, v, is_causal=context == 0, scale=SCALE)
                row[name] = timed([call], 5)
        table.append(row)
        print("prefill", {key: round(value, 1) for key, value in row.items()}, flush=True)
    return table


def peers(script: Path, folder: Path, table: list[dict[str, Any]]) -> None:
    """Put the peers' times beside ours."""
    text = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=True).stdout
    print(text)
    for context, tokens, triton, flash in re.findall(r"^\s*(\d+)\s+(\d+)\s+\S+\s+\S+\s+(\S+)\s+(\S+)\s*$", text, re.M):
        for row in table:
            if (row["requests"], row["context"], row["T"]) == (1, int(context), int(tokens)):
                row["peer_us"], row["flashmla_us"] = float(triton), float(flash)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", nargs=2, type=Path, metavar=("SCRIPT", "FOLDER"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    found = ceilings()
    torch.cuda.empty_cache()
    found["mma_TFLOPs"] = mma_rate()
    print(found, flush=True)
    table = rows(found["read_TBps"], found["mma_TFLOPs"])
    prepare = prepare_rows(found["read_TBps"])
    prefill = prefill_rows(found["mma_TFLOPs"])
    if args.peer:
        peers(*args.peer, table)
    result = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        **found,
        "rows": table,
        "prepare": prepare,
        "prefill": prefill,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
