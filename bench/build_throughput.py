"""Build throughput: packing one full-size MoE layer of Kimi K2.6 against a plain copy of the same bytes.

    python bench/build_throughput.py [--experts 384] [--tp 1] [--scratch DIR] [--output FILE]

Makes a synthetic checkpoint with the real shapes and names of one layer's experts (10 GB for 384), then
copies it and packs it, each in a process of its own that finds it out of the page cache. The copy forces
data to disk as often as the builder does. Packing also hashes, and reads back all it wrote. Peak memory is
ru_maxrss of the packing process, which counts the mapped pages of the checkpoint.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from builder.checkpoint import Checkpoint  # noqa: E402
from builder.pack_stream import COMMIT_BYTES, pack_weights  # noqa: E402
from plugins.core.packing import WeightRecipe  # noqa: E402
from plugins.core.plan import Plan, Weight  # noqa: E402

HIDDEN, INTER, GROUP = 7168, 2048, 32  # of Kimi K2.6
NAME = "language_model.model.layers.1.mlp.experts.{}.{}_proj.{}"
COPY_BLOCK = 16 << 20


def expert_tensors(expert: int) -> Iterator[tuple[str, str, tuple[int, int], int]]:
    """(name, safetensors dtype, shape, bytes) of one routed expert, in checkpoint order."""
    for matrix, (rows, columns) in {
        "down": (HIDDEN, INTER),
        "gate": (INTER, HIDDEN),
        "up": (INTER, HIDDEN),
    }.items():
        yield NAME.format(expert, matrix, "weight_packed"), "I32", (rows, columns // 8), rows * columns // 2
        yield (
            NAME.format(expert, matrix, "weight_scale"),
            "BF16",
            (rows, columns // GROUP),
            rows * columns // GROUP * 2,
        )


def make_checkpoint(directory: Path, experts: int) -> int:
    """Write the checkpoint with random bytes; returns its size."""
    header, end = {}, 0
    for expert in range(experts):
        for name, dtype, shape, size in expert_tensors(expert):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            block = noise[: min(left, len(noise))]
            file.write(block.data)
            left -= len(block)
            noise += 1  # so that no two blocks are equal
            if left % (512 << 20) < len(noise):
                file.flush()
                os.fsync(file.fileno())
        file.flush()
        os.fsync(file.fileno())
    return end


def plans(experts: int, tp: int) -> list[Plan]:
    weights = {}
    for stage, matrices in (("gate_up", ("gate", "up")), ("down", ("down",))):
        table = {name: shape for e in range(experts) for name, _, shape, _ in expert_tensors(e)}
        sources = tuple(
            NAME.format(expert, matrix, part)
            for expert in range(experts)
            for matrix in matrices
            for part in ("weight_packed", "weight_scale")
        )
        recipe = WeightRecipe("int4_marlin_gemm", sources, tuple(table[name] for name in sources), {"stage": stage})
        weights[f"layers.1.experts.{stage}"] = Weight(recipe.spec(tp), recipe)
    return [Plan(tp, rank, "cpu", "float32", 0, {}, weights, {}) for rank in range(tp)]


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pack(checkpoint: Path, output: Path, experts: int, tp: int) -> None:
    opened = Checkpoint.open(checkpoint)
    pack_weights(plans(experts, tp), "bench", output, opened.array, done=opened.drop_pages)


def copy(checkpoint: Path, output: Path) -> None:
    """Read and write in large blocks, forcing to disk and dropping from the cache every `COMMIT_BYTES`."""
    buffer = memoryview(bytearray(COPY_BLOCK))
    with (
        (checkpoint / "model.safetensors").open("rb", 0) as source,
        (output / "copy").open("wb", 0) as target,
    ):
        done = synced = 0
        while count := source.readinto(buffer):
            target.write(buffer[:count])
            done += count
            if done - synced >= COMMIT_BYTES:
                os.fdatasync(target.fileno())
                os.posix_fadvise(target.fileno(), synced, done - synced, os.POSIX_FADV_DONTNEED)
                synced = done
        os.fdatasync(target.fileno())


def measure(what: str, checkpoint: Path, scratch: Path, experts: int, tp: int) -> dict[str, float]:
    """Seconds and peak resident bytes of `what`, in a child process, with a cold checkpoint."""
    output = scratch / what
    output.mkdir()
    drop_cache(checkpoint / "model.safetensors")
    command = [sys.executable, __file__, "--child", what, str(checkpoint), str(output)]
    done = subprocess.run([*command, f"--experts={experts}", f"--tp={tp}"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    shutil.rmtree(output)
    return json.loads(done.stdout)


def child(what: str, checkpoint: Path, output: Path, experts: int, tp: int) -> None:
    start = time.perf_counter()
    if what == "pack":
        pack(checkpoint, output, experts, tp)
    else:
        copy(checkpoint, output)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss << 10}))


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "uncommitted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=384, help="of the layer; 384 is 10 GB")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="where the files go; needs twice their size")
    parser.add_argument(
        "--output", type=Path, help="also write the result as JSON, e.g. bench/results/build_throughput.json"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, checkpoint, output = options.child
        child(what, Path(checkpoint), Path(output), options.experts, options.tp)
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        (scratch / "checkpoint").mkdir()
        size = make_checkpoint(scratch / "checkpoint", options.experts)
        results = [
            (what, measure(what, scratch / "checkpoint", scratch, options.experts, options.tp))
            for what in ("copy", "pack", "copy")  # copied before and after, since other load comes and goes
        ]
    copies = [found["seconds"] for what, found in results if what == "copy"]
    packed = next(found for what, found in results if what == "pack")
    copy_seconds = sum(copies) / len(copies)
    report = {
        "bytes": size,
        "experts": options.experts,
        "tp": options.tp,
        "copy_seconds": [round(seconds, 2) for seconds in copies],
        "pack_seconds": round(packed["seconds"], 2),
        "pack_cpu_seconds": round(packed["cpu"], 2),
        "copy_mb_per_s": round(size / copy_seconds / 1e6),
        "pack_mb_per_s": round(size / packed["seconds"] / 1e6),
        "pack_over_copy": round(copy_seconds / packed["seconds"], 3),
        "pack_peak_rss_mb": round(packed["peak"] / 1e6),
        "device": device(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
