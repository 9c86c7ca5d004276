"""Whole passes of one tensor-parallel rank of eight of Kimi K2.6 on one GPU, with synthetic weights of the real layout.

    python bench/full_pass.py build RANK.engine [--arch sm_90a]        needs no GPU
    python bench/full_pass.py run RANK.engine [--commit ID] -o bench/results/pass_h200.json

The other ranks do not exist: sums over ranks are this rank's part, and the figures leave out what the links between
GPUs take. Token rows are random ids of this rank's part of the vocabulary (others would be zeros, and share their
experts). Rooflines are the bytes of every step (builder/roofline.py), with the experts that the pass really routed to,
and of one request's KV, over the read rate of the same run. bench/pass_model.py turns the result into a model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from builder.roofline import SM90, step_cost  # noqa: E402
from engine_runtime.executor.collectives import StandIn  # noqa: E402
from engine_runtime.executor.cuda import CudaExecutor  # noqa: E402
from engine_runtime.executor.device import Device  # noqa: E402
from engine_runtime.executor.weights import SplatWeights  # noqa: E402
from engine_runtime.step_costs import fill  # noqa: E402
from plugins.core.container import decode_header, map_file  # noqa: E402
from plugins.core.plan import Phase, Plan, Step  # noqa: E402
from plugins.core.state import Limits  # noqa: E402

TP, LAYERS = 8, 61
KV_BYTES = 1152  # of a position and layer
CONTEXTS = (4096, 32_768, 131_072)
PREFILL = (0, 32_768)  # contexts of the prefill passes
PROFILED = (1, 2, 8, 32, 128)  # rows of the verify passes that are also timed step by step


def build(path: Path, arch: str) -> None:
    """The engine file of rank 0 alone."""
    from builder.build import SPLAT
    from builder.graph import from_onnx
    from builder.kernels import compile_images
    from builder.options import BuildOptions
    from builder.pipeline import export_passes, plan_rank
    from builder.writer import Staging
    from tests.full_size import k26_config, k26_draft_config

    config, draft = k26_config(), k26_draft_config()
    options = BuildOptions(tp=TP, arch=arch, splat=True, max_requests=4, kv_tokens=262_144)
    passes, recipes = export_passes(config, draft, options, progress=print)
    graphs = [(one.name, one.bucket, from_onnx(one.model)) for one in passes]
    plan = plan_rank(graphs, recipes, config, draft, options, 0)
    images = compile_images([plan], True, print)
    with Staging(path.parent / f"{path.name}.parts") as staging:
        staging.add_engines([plan], SPLAT, images)
        (staging.directory / "rank0.engine").replace(path)


def verify_row(executor: CudaExecutor, limits: Limits, rows: int, context: int, read: float) -> dict[str, Any]:
    """One bucket at one context; `read` in TB/s."""
    phase = f"verify[{rows}]"
    set_up(executor, limits, rows, context)
    experts = float(np.mean(routed_experts(executor, phase)))
    set_up(executor, limits, rows, context)
    ms = 1e3 * timed(executor, phase)
    costs = cost_by_plugin(executor.plan.phases[phase], context, experts)
    roofline = sum(cost["nbytes"] for cost in costs.values()) / read / 1e9
    row = {
        "T": rows,
        "context": context,
        "experts": experts,
        "ms": ms,
        "roofline_ms": roofline,
        "launches_per_layer": executor.launches(phase) / LAYERS,
        "costs": costs,
    }
    if rows in PROFILED:
        set_up(executor, limits, rows, context)
        row["by_plugin"] = by_plugin(executor, phase)
    print(
        f"T {rows:4d} context {context:7d} experts {experts:5.1f} {ms:7.3f} ms, roofline {roofline:7.3f}, "
        f"{ms / roofline:5.2f} x",
        flush=True,
    )
    return row


def load(path: Path) -> tuple[Plan, dict[str, bytes]]:
    data = map_file(path)
    container = decode_header(data)
    plan = Plan.from_json(json.loads(container.metadata["plan"]))
    return plan, {name: data[entry.start : entry.end] for name, entry in container.tensors.items()}


def set_up(executor: CudaExecutor, limits: Limits, rows: int, context: int) -> None:
    """One request of `rows` rows after `context` tokens, with tokens that this rank embeds."""
    fill(executor, limits, rows, context)
    held = executor.plan.buffers["logits"].shape[1] // TP
    executor.write("tokens", np.random.default_rng(rows).integers(0, held, rows), slice(0, rows))


def set_up_prefill(executor: CudaExecutor, limits: Limits, rows: int, context: int) -> None:
    """A chunk of `rows` tokens of the first request after `context`."""
    set_up(executor, limits, 1, context)
    address = context + np.arange(rows)
    table = executor.read("block_table", 0).copy()
    whole = slice(0, rows)
    held = executor.plan.buffers["logits"].shape[1] // TP
    executor.write("tokens", np.random.default_rng(rows).integers(0, held, rows), whole)
    executor.write("positions", address, whole)
    executor.write("row_request", 0, whole)
    executor.write(
        "row_slot", table[address // limits.page_size] * limits.page_size + address % limits.page_size, whole
    )
    executor.write("request_rows", 0)
    executor.write("request_rows", rows, 0)
    executor.write("last_row", rows - 1)
    executor.write("last_position", context + rows - 1)
    executor.write("last_request", 0)


def routed_experts(executor: CudaExecutor, phase: str) -> list[int]:
    """Distinct experts that each layer of a pass routes to."""
    counts = []
    for bound in executor.start_steps(phase):
        executor.start_step(bound)
        if bound.step.plugin == "moe_route":
            chosen = executor.operand(bound.step.outputs[3])
            counts.append(len(np.unique(chosen[chosen >= 0])))
    executor.end_steps(phase)
    return counts


def cost_by_plugin(phase: Phase, context: int, experts: float) -> dict[str, dict[str, float]]:
    """Bytes and FLOP of a pass of one request by plugin (names as in `by_plugin`), `experts` distinct ones a layer;
    `uniform_nbytes`: with as many as uniform routing takes.
    """
    table: dict[str, dict[str, float]] = {}
    for step in phase.steps:
        cost = step_cost(step, 0, SM90)
        nbytes = uniform_nbytes = float(cost.nbytes)
        if step.plugin == "int4_marlin_gemm":
            weight, routes = step.inputs[1].spec, step.inputs[3].spec
            assert weight is not None and routes is not None
            count = weight.shape[0]
            uniform = count * (1 - (1 - step.attrs["top_k"] / count) ** (routes.numel / step.attrs["top_k"]))
            nbytes += weight.nbytes / count * (experts - uniform)
        if step.plugin == "mla_attention":
            nbytes += context * KV_BYTES
            uniform_nbytes = nbytes
        row = table.setdefault(name_of(step), {"steps": 0, "nbytes": 0.0, "uniform_nbytes": 0.0, "flops": 0.0})
        row["steps"] += 1
        row["nbytes"] += nbytes
        row["uniform_nbytes"] += uniform_nbytes
        row["flops"] += cost.flops
    return table


def timed(executor: CudaExecutor, phase: str, repeats: int = 7) -> float:
    """Seconds of a pass on the device: the median of passes that follow each other."""
    device = executor.device
    stamps = [device.event(timing=True) for _ in range(repeats + 1)]
    executor.run(phase)
    device.record(stamps[0])
    for stamp in stamps[1:]:
        executor.run(phase)
        device.record(stamp)
    executor.synchronize()
    return float(np.median([device.seconds(*both) for both in zip(stamps, stamps[1:], strict=False)]))


def by_plugin(executor: CudaExecutor, phase: str) -> dict[str, dict[str, float]]:
    """Milliseconds and steps by plugin, and stage or form where it has one."""
    table: dict[str, dict[str, float]] = {}
    steps = executor.plan.phases[phase].steps
    for step, (_, _, seconds) in zip(steps, executor.profile(phase), strict=True):
        row = table.setdefault(name_of(step), {"steps": 0, "ms": 0.0})
        row["steps"] += 1
        row["ms"] += 1e3 * seconds
    return table


def name_of(step: Step) -> str:
    """A plugin, with its stage or form, or with the shape of its matrix."""
    kind = step.attrs.get("stage") or step.attrs.get("form")
    if kind is None and step.plugin == "dense_gemm" and step.inputs[1].spec is not None:
        kind = "x".join(map(str, step.inputs[1].spec.shape))
    return step.plugin if kind is None else f"{step.plugin} {kind}"


def steps(executor: CudaExecutor, limits: Limits, nodes: int, context: int, count: int = 30) -> dict[str, float]:
    """Whole speculative steps of one request: draft, tree, verify, accept, append. Wall time against device time."""
    plan, rows = executor.plan, nodes + 1
    bucket = next(b for b in plan.buckets("verify") if b >= rows)
    append = next(b for b in plan.buckets("append") if b >= limits.path_length)
    phases = ("draft[1]", f"verify[{bucket}]", f"append[{append}]")
    set_up(executor, limits, rows, context)
    executor.write("active", 0)
    executor.write("active", 1, 0)
    executor.write("tree_budget", nodes)
    executor.write("draft_requests", 0)
    walls = []
    for _ in range(count):
        start = time.perf_counter()
        executor.run(phases[0])
        executor.read("num_rows")
        executor.run(phases[1])
        executor.read("num_emitted")
        executor.run(phases[2])
        walls.append(time.perf_counter() - start)
    executor.synchronize()
    busy = {}
    for phase in phases:
        set_up(executor, limits, rows, context)
        busy[phase] = timed(executor, phase)
    wall = float(np.median(walls[5:]))
    return {
        "nodes": nodes,
        "context": context,
        "wall_ms": 1e3 * wall,
        **{f"{phase.split('[')[0]}_ms": 1e3 * seconds for phase, seconds in busy.items()},
        "idle_fraction": 1 - sum(busy.values()) / wall,
    }


def run(path: Path, commit: str) -> dict[str, Any]:
    import torch

    from bench.mla import mma_rate
    from bench.moe import ceilings

    found, rate = ceilings(), mma_rate()
    torch.cuda.empty_cache()
    plan, cubins = load(path)
    start = time.perf_counter()
    executor = CudaExecutor(plan, cubins, SplatWeights(plan.weights), Device(), StandIn(TP))
    executor.synchronize()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        **found,
        "mma_TFLOPs": rate,
        "load_s": time.perf_counter() - start,
        "memory_GB": (lambda free, total: (total - free) / 1e9)(*executor.device.memory()),
        "collectives": "left out: sums over ranks are this rank's part",
        "rows": [],
        "prefill": [],
    }
    limits = Limits(**plan.settings["limits"])
    for context in CONTEXTS:
        for rows in plan.buckets("verify"):
            result["rows"].append(verify_row(executor, limits, rows, context, found["read_TBps"]))
    for context in PREFILL:
        for rows in plan.buckets("prefill"):
            set_up_prefill(executor, limits, rows, context)
            seconds = timed(executor, f"prefill[{rows}]", 2)
            result["prefill"].append({"T": rows, "context": context, "ms": 1e3 * seconds, "tokens_s": rows / seconds})
            print(f"prefill {rows:5d} context {context:7d} {1e3 * seconds:8.1f} ms {rows / seconds:8.0f} tokens/s")
    result["by_plugin"] = {
        f"verify[{row['T']}]": row["by_plugin"]
        for row in result["rows"]
        if "by_plugin" in row and row["context"] == CONTEXTS[0]
    }
    set_up(executor, limits, 4, CONTEXTS[0])
    result["by_plugin"]["draft[1]"] = by_plugin(executor, "draft[1]")
    result["steps"] = [steps(executor, limits, nodes, CONTEXTS[0]) for nodes in (7, 31, 63)]
    for name, table in result["by_plugin"].items():
        print(name)
        for plugin, row in sorted(table.items(), key=lambda item: -item[1]["ms"]):
            each = f"{1e3 * row['ms'] / row['steps']:8.2f} us each"
            print(f"  {plugin:32s} {row['steps']:4.0f} steps {row['ms']:8.3f} ms {each}")
    for step in result["steps"]:
        print({name: round(value, 3) for name, value in step.items()})
    executor.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write the engine file of one rank")
    building.add_argument("file", type=Path)
    building.add_argument("--arch", default="sm_90a")
    running = commands.add_parser("run", help="time its passes on this GPU")
    running.add_argument("file", type=Path)
    running.add_argument("--commit", default="unknown")
    running.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "build":
        build(args.file, args.arch)
        return
    args.output.write_text(json.dumps(run(args.file, args.commit), indent=1) + "\n")


if __name__ == "__main__":
    main()
