"""A model of the time of a verify pass, from `full_pass.py`'s result, and what it says of 8x RTX PRO 6000.

    python bench/pass_model.py bench/results/pass_h200.json

Every kind of step takes a + bytes / r + FLOP / f; a, r and f are fitted (non-negative least squares, relative errors)
to the passes that were timed step by step. The stamps between steps cost time of their own: one constant a step,
fitted so that the sums are the passes' times. All other passes are predicted, and compared with what was measured:
"held_out".

The SM120 table is computed, not measured: the same a; r and f in the proportion of the read rates and of the mma
rates of both chips; experts routed uniformly; and published times of all-reduces over PCIe 5 on 8 GPUs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

Row = dict[str, Any]
HIDDEN, ALL_REDUCES = 7168, 123  # two a layer, and the embedding's
SM120_READ, SM120_MMA = 1.74, 417.0  # TB/s of read-heavy kernels, TFLOP/s of mma.sync in bfloat16; both published
# bytes -> us on 8 GPUs, published measurements (rtx6kpro): NCCL, and one-shot kernels over peer memory
NCCL = ((1024, 24.0), (65_536, 24.0), (262_144, 28.0), (524_288, 59.0), (1_570_000, 123.0), (6_300_000, 294.0))
ONE_SHOT = ((1024, 7.5), (8192, 9.2), (14_336, 11.8), (32_768, 16.5), (65_536, 25.9), (262_144, 73.6), (459_000, 147.0))


def features(cost: Row, key: str = "nbytes") -> list[float]:
    """Steps, MB and GFLOP of a kind in one pass."""
    return [cost["steps"], cost[key] / 1e6, cost["flops"] / 1e9]


def fit(rows: list[Row]) -> tuple[dict[str, list[float]], float]:
    """(kind -> ms a step, a MB and a GFLOP; ms of a stamp) from the rows with `by_plugin`."""
    profiled = [row for row in rows if "by_plugin" in row]
    steps = np.array([sum(kind["steps"] for kind in row["by_plugin"].values()) for row in profiled])
    sums = np.array([sum(kind["ms"] for kind in row["by_plugin"].values()) for row in profiled])
    totals = np.array([row["ms"] for row in profiled])
    stamp = float(np.average((sums - totals) / steps, weights=1 / totals))
    kinds = {}
    for name in profiled[0]["by_plugin"]:
        cells = [row["by_plugin"][name] for row in profiled]
        measured = np.array([max(cell["ms"] - stamp * cell["steps"], 1e-6) for cell in cells])
        table = np.array([features(row["costs"][name]) for row in profiled])
        scale = 1 / np.maximum(measured, 0.01 * totals)  # a kind below 1 % of its pass need not fit well
        weights = np.maximum(table.max(axis=0), 1e-12)
        solution, _ = nnls(table / weights * scale[:, None], measured * scale)
        kinds[name] = list(solution / weights)
    return kinds, stamp


def predict(kinds: dict[str, list[float]], row: Row, key: str = "nbytes", read: float = 1.0, mma: float = 1.0) -> float:
    """ms of a pass; read, mma: rates in units of those of the fit."""
    rates = np.array([1.0, 1 / read, 1 / mma])
    return float(sum(np.dot(kinds[name], features(cost, key) * rates) for name, cost in row["costs"].items()))


def all_reduce(table: tuple[tuple[int, float], ...], nbytes: int) -> float:
    """us, between the published points on straight lines, beyond the last one at its rate."""
    sizes, times = zip(*table, strict=True)
    if nbytes > sizes[-1]:
        return times[-1] * nbytes / sizes[-1]
    return float(np.interp(nbytes, sizes, times))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("result", type=Path)
    path = parser.parse_args().result
    result = json.loads(path.read_text())
    kinds, stamp = fit(result["rows"])
    print(f"stamp {1e3 * stamp:.2f} us")
    for name, (step, byte, flop) in kinds.items():
        rate = f"{1e-3 / byte / result['read_TBps']:5.2f} of the read rate" if byte else "    no bytes"
        print(f"  {name:34s} {1e3 * step:6.2f} us a step, {rate}{f', {1 / flop:6.0f} TFLOP/s' if flop else ''}")
    result["model"], result["sm120_computed"] = [], []
    for row in result["rows"]:
        predicted, held_out = predict(kinds, row), "by_plugin" not in row
        facts = {"T": row["T"], "context": row["context"]}
        result["model"].append({**facts, "predicted_ms": predicted, "measured_ms": row["ms"], "held_out": held_out})
        rates = SM120_READ / result["read_TBps"], SM120_MMA / result["mma_TFLOPs"]
        own = predict(kinds, row, "uniform_nbytes", *rates)
        nccl, one_shot = (
            own + ALL_REDUCES * all_reduce(table, row["T"] * HIDDEN * 2) / 1e3 for table in (NCCL, ONE_SHOT)
        )
        result["sm120_computed"].append({**facts, "gpu_ms": own, "nccl_ms": nccl, "one_shot_ms": one_shot})
        print(
            f"T {row['T']:4d} context {row['context']:7d} predicted {predicted:7.3f} measured {row['ms']:7.3f} "
            f"{100 * (predicted / row['ms'] - 1):+5.1f} % {'held out' if held_out else '        '}  SM120, computed: "
            f"{own:7.2f} ms alone, {nccl:7.2f} with NCCL, {one_shot:7.2f} with one-shot sums"
        )
    worst = max(abs(m["predicted_ms"] / m["measured_ms"] - 1) for m in result["model"] if m["held_out"])
    print(f"largest error of a pass that was not fitted: {100 * worst:.1f} %")
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
