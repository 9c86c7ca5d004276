"""Ten thousand steps of an engine: memory of the process and of the device at the start and at the end.

    python bench/soak.py ENGINE [--steps N] -o bench/results/soak_h200.json

Requests come and go, with and without speculation, sampled and greedy, some cancelled. The first tenth of the steps
warms up; from then on nothing may grow. Exits with 1 where the process grows by more than 8 MB or the device at all.
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

from engine_runtime.bench import commit  # noqa: E402
from engine_runtime.budget import PLAIN, Speculation  # noqa: E402
from engine_runtime.generation import GenerationRequest  # noqa: E402
from engine_runtime.runtime import Runtime  # noqa: E402
from engine_runtime.sampling import SamplingParams  # noqa: E402
from plugins.core.engine_file import read_manifest  # noqa: E402

MOST_GROWTH = 8 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def device_bytes(runtime: Runtime) -> int | None:
    """Bytes in use on the GPU; None on the CPU."""
    device = getattr(runtime._rank.executor, "device", None)
    if device is None:
        return None
    free, total = device.memory()
    return int(total - free)


def soak(runtime: Runtime, steps: int, vocab_size: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    running: list[int] = []
    marks: list[tuple[int, int | None]] = []
    tokens, start = 0, time.monotonic()
    for step in range(steps):
        if step in (steps // 10, steps - 1):
            marks.append((resident(), device_bytes(runtime)))
        while len(running) < 3:
            prompt = tuple(rng.integers(0, vocab_size // 2, int(rng.integers(1, 200))).tolist())
            params = SamplingParams(temperature=float(rng.choice([0.0, 0.8])), seed=step, max_tokens=64, stop_ids=())
            speculation = PLAIN if rng.random() < 0.3 else Speculation("tree", int(rng.choice([4, 8, 16])))
            running.append(runtime.submit(GenerationRequest(prompt, params, speculation)))
        if rng.random() < 0.01:
            runtime.cancel(running.pop(int(rng.integers(len(running)))))
        for event in runtime.step():
            tokens += len(event.output.tokens)
            if event.output.finish is not None and event.request in running:
                running.remove(event.request)
    (before, device_before), (after, device_after) = marks
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": time.monotonic() - start,
        "process_growth": after - before,
        "device_growth": None if device_after is None or device_before is None else device_after - device_before,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--commit", default=None)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    manifest = read_manifest(args.engine)
    with Runtime.open(args.engine) as runtime:
        found = soak(runtime, args.steps, manifest.model["vocab_size"])
        device = getattr(getattr(runtime._rank.executor, "device", None), "name", "CPU")
    result = {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or commit(),
        "engine": manifest.name,
        **found,
    }
    print(json.dumps(result, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return int(found["process_growth"] > MOST_GROWTH or bool(found["device_growth"]))


if __name__ == "__main__":
    sys.exit(main())
