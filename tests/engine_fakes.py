"""A made-up plan with a packer of its own, so that the engine format is tested without any real operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from builder.writer import Staging, layout_versions
from plugins.core import packing
from plugins.core.engine_file import Manifest
from plugins.core.packing import Packer, WeightRecipe, split
from plugins.core.plan import Arg, Phase, Plan, Step, Weight
from plugins.core.spec import DTYPES, TensorSpec

FINGERPRINT = "fake-checkpoint"
ROWS = {"embed": (64, 96), "norm": (96, 1), "experts": (4096, 24), "empty": (0, 8), "head": (48, 100)}
DTYPE = {"norm": "float32", "experts": "uint8", "empty": "int32"}  # the others are bfloat16


class RowPacker(Packer):
    """Rows of one source, cut for the rank, in reverse order (so that packing is not a mere copy)."""

    layout_version = 3
    chunk_rows = 100

    def spec(self, recipe: WeightRecipe, tp: int) -> TensorSpec:
        rows, columns = recipe.shapes[0]
        return TensorSpec((rows // tp, columns), recipe.attrs["dtype"])

    def pack(self, recipe: WeightRecipe, read: Callable[[str], np.ndarray], tp: int, rank: int) -> Iterator[np.ndarray]:
        rows = split(read(recipe.sources[0]), 0, tp, rank)[::-1]
        for start in range(0, len(rows), self.chunk_rows):
            yield np.ascontiguousarray(rows[start : start + self.chunk_rows])


def register(packer: Packer | None = None) -> None:
    """For a subprocess; tests in this process use monkeypatch.setitem on the same table."""
    packing._PACKERS["fake_rows"] = packer or RowPacker()


def source(name: str) -> np.ndarray:
    """The made-up checkpoint: random bits that depend on the name only."""
    shape, dtype = ROWS[name], DTYPES[DTYPE.get(name, "bfloat16")][1]
    size = (*shape, dtype().itemsize)
    bits = np.random.default_rng(sorted(ROWS).index(name)).integers(0, 256, size=size, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def make_plan(tp: int = 2, rank: int = 0, arch: str = "cpu", buckets: tuple[int, ...] = (1, 4)) -> Plan:
    weights = {}
    for name, shape in ROWS.items():
        recipe = WeightRecipe("fake_rows", (name,), (shape,), {"dtype": DTYPE.get(name, "bfloat16")})
        weights[name] = Weight(recipe.spec(tp), recipe)
    spec = TensorSpec((4, 96), "float32")
    x, y = Arg("arena", "x", 0, spec), Arg("arena", "y", 2048, spec)
    steps = (Step("norm", "rms_norm", "reference", {"eps": 1e-5}, (x, Arg("weight", "norm")), (y,)),)
    phases = {phase.key: phase for phase in (Phase("verify", bucket, steps) for bucket in buckets)}
    buffers = {"tokens": TensorSpec((4,), "int32")}
    return Plan(tp, rank, arch, "float32", 4096, buffers, weights, phases, {"note": "made up"})


def make_manifest(tp: int = 2, arch: str = "cpu", weights: str = "packed", fingerprint: str = FINGERPRINT) -> Manifest:
    return Manifest(
        name="fake",
        model={"hidden_size": 96, "nested": {"b": 1, "a": [1.5, None]}},
        checkpoint_fingerprint=fingerprint,
        tp=tp,
        arch=arch,
        activation_dtype="float32",
        kv_dtype="float32",
        weights=weights,
        layout_versions=layout_versions([make_plan(tp)]),
        limits={"max_rows": 4},
        toolchain={"numpy": "2"},
    )


def build(
    target: Path,
    tp: int = 2,
    arch: str = "cpu",
    splat: bool = False,
    buckets: tuple[int, ...] = (1, 4),
    fingerprint: str = FINGERPRINT,
) -> list[int]:
    """Build the made-up engine; returns the ranks whose weights were packed."""
    plans = [make_plan(tp, rank, arch, buckets) for rank in range(tp)]
    with Staging(target) as staging:
        packed = [] if splat else staging.add_weights(plans, fingerprint, source)
        staging.add_engines(plans, fingerprint, {"kernel.b": b"\x7fELF" * 9, "kernel.a": b"x"})
        staging.add_file("chat_template.jinja", b"{{ messages }}\n")
        staging.publish(make_manifest(tp, arch, "splat" if splat else "packed", fingerprint))
    return packed
