"""Routed experts and the matrices around them on one GPU: our kernels, vLLM's Marlin path, and the memory's ceilings.

One tensor-parallel rank of eight of a Kimi K2.6 layer: 384 experts, top-8, hidden 7168, 256 columns of every expert,
random weights, uniform routing. Times are CUDA graph replays over several layers' weights, more than the L2 holds.

    python bench/moe.py [--peer SCRIPT LIBRARIES] [--commit ID] -o bench/results/moe_h200.json

SCRIPT times vLLM's kernels (argument: the folder of vLLM's shared library) and prints its table; it is run as it is,
and once more with other numbers of tokens for the prefill rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.plugins.gpu.device import Operator  # noqa: E402
from tests.plugins.gpu.moe_data import random_tiles  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTER = 384, 8, 7168, 256
EXPERT_BYTES = 3 * HIDDEN * INTER * 9 // 16  # 4 bits a weight and a bfloat16 for 32 of them
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_TOKENS = (256, 1000, 4096)
LAYERS = 3
MATRICES = {
    "qkv_a": (7168, 2112),
    "q_b": (1536, 1536),
    "o": (1024, 7168),
    "router": (7168, 384),
    "shared gate_up": (7168, 512),
    "shared down": (256, 7168),
    "lm_head": (7168, 20480),
}
ROUTE = {"top_k": TOP_K, "routed_scaling_factor": 2.827, "norm_topk_prob": True}


def timed(calls: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """Microseconds a call: the median of replays of a graph that holds every call twice."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in [*calls, *calls]:
                call()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times) * 1000 / (2 * len(calls))


def ceilings() -> dict[str, float]:
    """TB/s of reading 8 GB (a sum) and of copying them (bytes read and written)."""
    x = torch.empty(2**31, dtype=torch.float32, device="cuda").normal_()
    y = torch.empty_like(x)
    return {
        "read_TBps": x.nbytes / timed([lambda: x.sum()], 7) / 1e6,
        "copy_TBps": 2 * x.nbytes / timed([lambda: y.copy_(x)], 7) / 1e6,
    }


@dataclass
class ExpertPath:
    """Router and both stages of the experts, one after the other on the same tokens."""

    route: Operator
    gate_up: Operator
    down: Operator

    @staticmethod
    def of(tokens: int, weights: tuple[torch.Tensor, torch.Tensor]) -> ExpertPath:
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        router = (torch.randn(EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5).bfloat16()
        bias = torch.zeros(EXPERTS, device="cuda")
        rows = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        route = Operator("moe_route", ROUTE, [x, router, bias, rows])
        factors, offsets, routes, _ = route.outputs
        gate_up = Operator("int4_marlin_gemm", {"stage": "gate_up", "top_k": TOP_K}, [x, weights[0], offsets, routes])
        inputs = [gate_up.outputs[0], weights[1], offsets, routes, factors]
        down = Operator("int4_marlin_gemm", {"stage": "down", "top_k": TOP_K}, inputs)
        path = ExpertPath(route, gate_up, down)
        path.start()
        return path

    def start(self) -> None:
        for operator in (self.route, self.gate_up, self.down):
            operator.start()

    def experts(self) -> int:
        """Distinct experts of its tokens."""
        return int((self.route.outputs[1].diff() > 0).sum())


def moe_row(tokens: int, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Times of the whole path and of its three parts; every call has tokens, router and routes of its own."""
    count = 12 if tokens <= 8 else 6
    paths = [ExpertPath.of(tokens, layers[i % len(layers)]) for i in range(count)]
    experts = statistics.mean(path.experts() for path in paths)
    us = timed([path.start for path in paths])
    return {
        "T": tokens,
        "experts": experts,
        "bytes": round(experts * EXPERT_BYTES),
        "us": us,
        "TBps": experts * EXPERT_BYTES / us / 1e6,
        "route_us": timed([path.route.start for path in paths]),
        "gate_up_us": timed([path.gate_up.start for path in paths]),
        "down_us": timed([path.down.start for path in paths]),
    }


def dense_rows() -> list[dict[str, Any]]:
    """Every matrix of a layer at several numbers of tokens, beside cuBLAS."""
    rows = []
    for name, (columns, outputs) in MATRICES.items():
        count = max(2, int(1.5e8 / (columns * outputs * 2)))
        weights = [torch.randn(outputs, columns, device="cuda").bfloat16() for _ in range(count)]
        for tokens in (1, 8, 32, 64, 128):
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            attrs = {"activation": "none", "out_dtype": "activation"}
            operators = [Operator("dense_gemm", attrs, [x, weight]) for weight in weights]
            y = torch.empty(tokens, outputs, device="cuda").bfloat16()
            blas = [lambda w=w, x=x, y=y: torch.mm(x, w.t(), out=y) for w in weights]
            us, blas_us = timed([operator.start for operator in operators], 9), timed(blas, 9)
            rows.append({"matrix": name, "K": columns, "N": outputs, "M": tokens, "us": us, "cublas_us": blas_us})
    return rows


def peer_times(script: Path, libraries: Path, tokens: Sequence[int]) -> dict[int, float]:
    """Microseconds of vLLM's path by number of tokens, from the table that `script` prints."""
    source, replaced = re.subn(r"for T in \([\d, ]+\):", f"for T in {tuple(tokens)}:", script.read_text())
    if replaced != 1:
        raise ValueError(f"{script}: expected one loop over numbers of tokens, found {replaced}")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / script.name
        copy.write_text(source.split('print("bf16 GEMM')[0])
        done = subprocess.run([sys.executable, copy, libraries], capture_output=True, text=True, check=True)
    table = [line.split() for line in done.stdout.splitlines() if re.fullmatch(r"\s*\d+(\s+[\d.]+){4}\s*", line)]
    return {int(row[0]): float(row[3]) for row in table}


METRICS = {
    "gpu__time_duration.sum": "ns",
    "smsp__inst_executed.sum": "instructions",
    "dram__bytes_read.sum": "dram_bytes",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_slots_pct",
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": "tensor_pct",
    "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active": "alu_pct",
}


def counters(tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Hardware counters of the experts' kernels, one call each under ncu."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "-k", "regex:gate_up|down|combine", "--metrics", ",".join(METRICS)]
    command += [sys.executable, __file__, "--profiled", ",".join(map(str, tokens))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    header, _, *records = csv.reader(lines)
    rows = []
    for record in records:
        values = dict(zip(header, record, strict=True))
        row: dict[str, Any] = {"kernel": values["Kernel Name"].split("(")[0]}
        for metric, name in METRICS.items():
            row[name] = float(values[metric].replace(",", ""))
        rows.append(row)
    per_call = len(rows) // len(tokens)
    return [{"T": tokens[min(i // per_call, len(tokens) - 1)], **row} for i, row in enumerate(rows)]


def profiled(tokens: Sequence[int]) -> None:
    """What `counters` looks at."""
    generator = torch.Generator("cuda").manual_seed(0)
    layer = random_layer(generator)
    paths = [ExpertPath.of(count, layer) for count in tokens]
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for path in paths:
        path.start()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def random_layer(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed weights of both stages."""
    gate_up = random_tiles(EXPERTS, 2 * INTER // 32, HIDDEN // 32, generator)
    return gate_up, random_tiles(EXPERTS, HIDDEN // 32, INTER // 32, generator)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the experts' kernels beside vLLM's and the memory's ceilings.")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument("--peer", nargs=2, type=Path, metavar=("SCRIPT", "LIBRARIES"), help="vLLM's timing script")
    parser.add_argument("--commit", default="unknown", help="what is measured, for the record")
    parser.add_argument("--counters", action="store_true", help="hardware counters too (ncu)")
    parser.add_argument("--profiled", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profiled:
        profiled([int(count) for count in args.profiled.split(",")])
        return
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": args.commit,
        **ceilings(),
    }
    peer = peer_times(*args.peer, (*TOKENS, *PREFILL_TOKENS)) if args.peer else {}
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [random_layer(generator) for _ in range(LAYERS)]
    result["rows"] = [{**moe_row(count, layers), "peer_us": peer.get(count)} for count in TOKENS]
    result["prefill"] = [{**moe_row(count, layers), "peer_us": peer.get(count)} for count in PREFILL_TOKENS]
    del layers
    result["dense"] = dense_rows()
    if args.counters:
        result["counters"] = counters((1, 32, 64))
    for row in result["rows"] + result["prefill"] + result["dense"] + result.get("counters", []):
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
