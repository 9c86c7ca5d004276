"""Loading an engine from disk: everything is checked before anything else is allocated. Imports no torch.

The weights are memory-mapped views of `rankR.weights`; copying them to a device is the executor's job.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from plugins.core.container import Container, Entry, decode_header, map_file, parse_json
from plugins.core.engine_file import (
    ENGINE_FORMAT,
    RANK_FILE,
    SCHEMA_VERSION,
    TENSORRT,
    WEIGHTS_FORMAT,
    EngineError,
    Manifest,
    check_digest,
    check_files,
    engine_name,
    layout_key,
    read_manifest,
    rebuild_command,
    weights_name,
)
from plugins.core.packing import get_packer
from plugins.core.plan import PLAN_VERSION, Plan
from plugins.core.spec import DTYPES, TensorSpec

__all__ = ["Engine", "EngineError", "load_engine"]

Check = Callable[[str, mmap.mmap | bytes], None]  # raises EngineError unless a file's content is as it was built


@dataclass(frozen=True)
class WeightsFile:
    """`rankR.weights` with its header checked and its content still to be read.

    tensors: in file order, without gaps but for the alignment. digest: BLAKE3 (hex) that whoever reads the file
    compares, None where that is not asked for. again: the command that rebuilds it.
    """

    path: Path
    tensors: dict[str, Entry]
    size: int
    digest: str | None
    again: str


@dataclass(frozen=True)
class Engine:
    """One rank of an engine, checked.

    weights: name -> read-only view of the file in upload order, in the storage dtype of `plugins.core.spec.DTYPES`
    (bfloat16 as uint16); empty in a "splat" engine, whose weights are synthetic, and where `weights_file` is to be
    read instead. cubins: kernel image by name. tensorrt: TensorRT plan by phase, where the engine was built with
    them.
    """

    manifest: Manifest
    plan: Plan
    weights: dict[str, np.ndarray]
    weights_file: WeightsFile | None
    cubins: dict[str, bytes]
    tensorrt: dict[str, bytes]
    path: Path
    rank: int


def load_engine(
    directory: str | Path,
    rank: int,
    tp: int | None = None,
    arch: str | None = None,
    verify: Literal["digest", "size"] = "digest",
    progress: Callable[[float], None] | None = None,
    map_weights: bool = True,
) -> Engine:
    """Rank `rank` of the engine in `directory`, for `tp` ranks on `arch` (None: whatever it was built for).

    verify: "digest" reads every byte of this rank and of the small files against its BLAKE3 digest; "size"
    checks sizes, headers and keys only, which finds truncated and mixed-up files but not flipped bits. progress:
    called with the fraction of those bytes that have been read. map_weights: False leaves the weights' content to who
    uploads it, digest included, so that it is read once. Raises `EngineError`, and nothing else, for any content of
    `directory`.
    """
    base = Path(directory)
    manifest = read_manifest(base)
    again = rebuild_command(base, manifest.tp if tp is None else tp, manifest.arch if arch is None else arch)
    if arch is not None and manifest.arch != arch:
        raise EngineError(f"{base}: built for {manifest.arch}, this device is {arch}: rebuild with `{again}`")
    if tp is not None and manifest.tp != tp:
        raise EngineError(f"{base}: built for {manifest.tp} ranks, started with {tp}: rebuild with `{again}`")
    if not 0 <= rank < manifest.tp:
        raise EngineError(f"{base}: no rank {rank} in an engine of {manifest.tp} ranks (counted from 0)")
    _check_layouts(base, manifest, again)
    check_files(base, manifest)
    check = _digest_check(base, manifest, rank, again, progress) if verify == "digest" else _no_check
    for name, record in manifest.files.items():
        if not RANK_FILE.fullmatch(name) and verify == "digest":
            check(name, _map(base / name) if record.bytes else b"")
    plan, images = _load_plan(base, manifest, rank, check, again)
    weights: dict[str, np.ndarray] = {}
    weights_file = None
    if manifest.weights == "packed":
        data, container = _open_weights(base, manifest, plan, rank, check if map_weights else _no_check, again)
        if map_weights:
            weights = _views(data, container)
        else:
            name = weights_name(rank)
            digest = manifest.files[name].blake3 if verify == "digest" else None
            weights_file = WeightsFile(base / name, container.tensors, container.size, digest, again)
    cubins = {key: image for key, image in images.items() if not key.startswith(TENSORRT)}
    plans = {key.removeprefix(TENSORRT): image for key, image in images.items() if key.startswith(TENSORRT)}
    return Engine(manifest, plan, weights, weights_file, cubins, plans, base, rank)


def _digest_check(
    base: Path, manifest: Manifest, rank: int, again: str, progress: Callable[[float], None] | None
) -> Check:
    """Compares files with their digests and tells `progress` how far that is."""
    mine = {engine_name(rank), weights_name(rank)}
    total = sum(r.bytes for name, r in manifest.files.items() if name in mine or not RANK_FILE.fullmatch(name))
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done / total)

    return lambda name, data: check_digest(base / name, manifest.files[name], data, again, count)


def _no_check(name: str, data: mmap.mmap | bytes) -> None:
    pass


def _check_layouts(base: Path, manifest: Manifest, again: str) -> None:
    for name, built in manifest.layout_versions.items():
        try:
            here = get_packer(name).layout_version if name.isidentifier() else None
        except (ImportError, AttributeError):
            here = None
        if here is None:
            raise EngineError(
                f"{base}: its weights need packer {name!r}, which this runtime lacks: rebuild with `{again}`"
            )
        if here != built:
            raise EngineError(
                f"{base}: {name} weights have layout version {built}, this runtime reads {here}: rebuild with `{again}`"
            )


def _map(path: Path) -> mmap.mmap:
    try:
        return map_file(path)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read: {error}") from None


def _open(
    base: Path, manifest: Manifest, name: str, check: Check, again: str, expected: Mapping[str, str]
) -> tuple[mmap.mmap, Container]:
    """Map rank file `name` and check it: header, then the `expected` metadata, then the digest."""
    path = base / name
    data = _map(path)
    try:
        container = decode_header(data)
    except ValueError as error:
        raise EngineError(f"{path}: damaged header: {error}: rebuild with `rm {path}; {again}`") from None
    for key, value in expected.items():
        found = container.metadata.get(key)
        if found != value:
            raise EngineError(
                f"{path}: {key}: expected {value!r}, found {str(found)[:80]!r}: the file is of another build "
                f"or rank, rebuild with `rm {path}; {again}`"
            )
    check(name, data)
    return data, container


def _load_plan(base: Path, manifest: Manifest, rank: int, check: Check, again: str) -> tuple[Plan, dict[str, bytes]]:
    name = engine_name(rank)
    expected = {
        "format": ENGINE_FORMAT,
        "schema": str(SCHEMA_VERSION),
        "fingerprint": manifest.checkpoint_fingerprint,
        "tp": str(manifest.tp),
        "rank": str(rank),
    }
    data, container = _open(base, manifest, name, check, again, expected)
    where = f"{base / name}: plan"
    try:
        value = parse_json(container.metadata["plan"].encode())
        if value.get("version") != PLAN_VERSION:
            found = str(value.get("version"))[:40]
            raise EngineError(f"{where}: expected version {PLAN_VERSION}, found {found}: rebuild with `{again}`")
        plan = Plan.from_json(value)
        _check_sizes(plan)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as error:
        raise EngineError(f"{where}: malformed ({type(error).__name__}: {error}): rebuild with `{again}`") from None
    for key in ("tp", "arch", "activation_dtype"):
        if getattr(plan, key) != getattr(manifest, key):
            raise EngineError(
                f"{where}: {key}: expected {getattr(manifest, key)}, found {getattr(plan, key)}: rebuild with `{again}`"
            )
    if plan.rank != rank:
        raise EngineError(f"{where}: expected rank {rank}, found {plan.rank}: rebuild with `{again}`")
    return plan, {key: data[entry.start : entry.end] for key, entry in container.tensors.items()}


def _check_sizes(plan: Plan) -> None:
    """Raise ValueError where a size that is allocated or compared later is not a number."""
    sizes = {"arena_bytes": plan.arena_bytes, "tp": plan.tp, "rank": plan.rank}
    specs: dict[str, TensorSpec] = dict(plan.buffers)
    specs.update({name: weight.spec for name, weight in plan.weights.items()})
    sizes.update({f"{name} {spec}": size for name, spec in specs.items() for size in spec.shape})
    for name, size in sizes.items():
        if type(size) is not int or not 0 <= size <= 1 << 48:
            raise ValueError(f"{name}: {size!r} is not a size")


def _open_weights(
    base: Path, manifest: Manifest, plan: Plan, rank: int, check: Check, again: str
) -> tuple[mmap.mmap, Container]:
    name = weights_name(rank)
    try:
        layout = layout_key(plan, manifest.layout_versions)
    except (KeyError, TypeError) as error:
        raise EngineError(f"{base}: no layout version of packer {error}: rebuild with `{again}`") from None
    expected = {
        "format": WEIGHTS_FORMAT,
        "schema": str(SCHEMA_VERSION),
        "fingerprint": manifest.checkpoint_fingerprint,
        "tp": str(manifest.tp),
        "rank": str(rank),
        "layout": layout,
    }
    data, container = _open(base, manifest, name, check, again, expected)
    wanted = {key: weight.spec for key, weight in plan.weights.items()}
    if list(wanted.items()) != [(key, entry.spec) for key, entry in container.tensors.items()]:
        raise EngineError(
            f"{base / name}: its tensors are not the plan's weights: rebuild with `rm {base / name}; {again}`"
        )
    return data, container


def _views(data: mmap.mmap, container: Container) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for key, entry in container.tensors.items():
        dtype = DTYPES[entry.spec.dtype][1]
        flat = np.frombuffer(data, dtype, entry.spec.numel, entry.start) if entry.spec.numel else np.empty(0, dtype)
        weights[key] = flat.reshape(entry.spec.shape)
    return weights
