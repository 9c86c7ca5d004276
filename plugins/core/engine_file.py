"""The engine on disk: file names, the manifest, checks. Shared by builder and runtime; imports no torch.

An artifact directory holds `engine.json` (the `Manifest`), and per rank `rankR.engine` (the plan, cubins) and
`rankR.weights` (packed weights; absent in a "splat" engine), both containers in
the format of `plugins/core/container.py`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from plugins.core.container import digest, map_file, parse_json
from plugins.core.plan import Plan

SCHEMA_VERSION = 1
MAX_MANIFEST = 16 << 20

MANIFEST_NAME = "engine.json"
ENGINE_FORMAT = "k2-engine"
WEIGHTS_FORMAT = "k2-weights"
TENSORRT = "tensorrt:"  # begins the names of TensorRT plans among the images of rankR.engine; the phase follows
RANK_FILE = re.compile(r"rank(0|[1-9]\d*)\.(engine|weights)")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int, int, str], None]  # (bytes done, bytes in all, what is being worked on)


class EngineError(Exception):
    """An engine that cannot be loaded; one sentence: what, where, expected, found, the command to rebuild."""


def engine_name(rank: int) -> str:
    return f"rank{rank}.engine"


def weights_name(rank: int) -> str:
    return f"rank{rank}.weights"


def rebuild_command(directory: str | Path, tp: int | None = None, arch: str | None = None) -> str:
    """The command that makes the engine in `directory` anew, as errors quote it."""
    options = "" if tp is None else f" --tp {tp}"
    options += "" if arch is None else f" --arch {arch}"
    return f"python build.py CHECKPOINT -o {directory}{options}"


def plan_json(plan: Plan) -> str:
    """The plan as it is stored: compact, and in the plan's own order, since the order of weights is the
    upload order.
    """
    return json.dumps(plan.to_json(), separators=(",", ":"), allow_nan=False)


def layout_key(plan: Plan, layout_versions: Mapping[str, int]) -> str:
    """Digest of everything beside the checkpoint that determines the bytes of `plan`'s packed weights on its
    rank.

    `layout_versions`: version of each packer that the plan names. Equal keys (with equal checkpoint, tp and
    rank) mean equal weight files, whatever else changed in the plan.
    """
    table = [
        [name, weight.spec.to_json(), weight.recipe.to_json(), layout_versions[weight.recipe.packer]]
        for name, weight in plan.weights.items()
    ]
    return blake3(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and BLAKE3 digest (hex) of one file of the artifact."""

    bytes: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    """engine.json: what an artifact is and which bytes it consists of.

    name: of the model. model: its configuration as far as the runtime needs it (JSON).
    checkpoint_fingerprint: digest of the checkpoint's headers, as the builder defines it. weights: "packed",
    or "splat" (synthetic, no file). layout_versions: packer -> `Packer.layout_version`. limits, settings:
    JSON tables of the builder. toolchain, plugin_versions: names to versions. files: every file beside
    engine.json; filled in when the artifact is published.
    """

    name: str
    model: dict[str, Any]
    checkpoint_fingerprint: str
    tp: int
    arch: str
    activation_dtype: str
    kv_dtype: str
    weights: str
    layout_versions: dict[str, int]
    limits: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    toolchain: dict[str, str] = field(default_factory=dict)
    plugin_versions: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def with_files(self, files: Mapping[str, FileRecord]) -> Manifest:
        return replace(self, files=dict(sorted(files.items())))

    def to_bytes(self) -> bytes:
        """The one text of this manifest: schema version first, tables sorted, a digest of all that last."""
        value = asdict(self)
        value = {"schema_version": value.pop("schema_version"), **value}
        # a round trip sorts every nested table while the order of the fields stays
        value = {key: json.loads(json.dumps(item, sort_keys=True, allow_nan=False)) for key, item in value.items()}
        value["manifest_blake3"] = blake3(json.dumps(value).encode()).hexdigest()
        return (json.dumps(value, indent=1) + "\n").encode()

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Inverse of `to_bytes`; raises ValueError for any text that `to_bytes` would not have written."""
        value = parse_json(data)
        found = value.pop("schema_version", None)
        if found != SCHEMA_VERSION or type(found) is not int:
            raise ValueError(f"schema version: expected {SCHEMA_VERSION}, found {str(found)[:40]}")
        value.pop("manifest_blake3", None)
        kinds = {"str": str, "int": int}
        names = {f.name: kinds.get(str(f.type), dict) for f in fields(Manifest) if f.name != "schema_version"}
        if set(value) != set(names):
            odd = sorted(set(value) ^ set(names))
            raise ValueError(f"fields missing or unknown: {', '.join(map(repr, odd))[:200]}")
        for name, kind in names.items():
            if type(value[name]) is not kind:
                raise ValueError(f"{name}: expected {kind.__name__}, found {type(value[name]).__name__}")
        value["files"] = {name: _file_record(name, record) for name, record in value["files"].items()}
        manifest = Manifest(**value)
        manifest._check()
        if manifest.to_bytes() != data:
            raise ValueError("its own digest does not match: the file was changed after the build")
        return manifest

    def rank_files(self) -> set[str]:
        """Names of the rank files that this engine consists of."""
        names = {engine_name(rank) for rank in range(self.tp)}
        return names | {weights_name(rank) for rank in range(self.tp) if self.weights == "packed"}

    def _check(self) -> None:
        if not 1 <= self.tp <= 1024:
            raise ValueError(f"tp: expected 1 to 1024, found {self.tp}")
        if self.weights not in ("packed", "splat"):
            raise ValueError(f"weights: expected 'packed' or 'splat', found {self.weights[:40]!r}")
        if any(type(version) is not int for version in self.layout_versions.values()):
            raise ValueError("layout_versions: expected integers")
        listed = {name for name in self.files if RANK_FILE.fullmatch(name)}
        if listed != self.rank_files():
            odd = sorted(listed ^ self.rank_files())
            raise ValueError(
                f"files: {', '.join(odd)[:200]} missing or too many for tp {self.tp}, {self.weights} weights"
            )


def _file_record(name: str, value: Any) -> FileRecord:
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise ValueError(f"files: {name[:80]!r} is not a plain file name")
    if not isinstance(value, dict) or set(value) != {"bytes", "blake3"}:
        raise ValueError(f"files: {name}: expected bytes and blake3")
    size, found = value["bytes"], value["blake3"]
    if type(size) is not int or size < 0 or not isinstance(found, str) or not _DIGEST.fullmatch(found):
        raise ValueError(f"files: {name}: expected a size and a digest of 64 hexadecimal digits")
    return FileRecord(size, found)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of the artifact in `directory`; raises `EngineError`. Looks at no other file."""
    path = Path(directory) / MANIFEST_NAME
    again = rebuild_command(directory)
    try:
        if path.stat().st_size > MAX_MANIFEST:
            raise ValueError(f"larger than {MAX_MANIFEST} bytes")
        return Manifest.from_bytes(path.read_bytes())
    except FileNotFoundError:
        hint = "its build did not finish, run" if staging_path(directory).is_dir() else "build one with"
        raise EngineError(f"{directory}: no engine here (expected {MANIFEST_NAME}): {hint} `{again}`") from None
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path}: not a usable manifest: {error}: rebuild with `{again}`") from None


def check_files(directory: str | Path, manifest: Manifest) -> None:
    """Raise `EngineError` unless every file of `manifest` is there in its size, and no other rank file is."""
    base = Path(directory)
    again = rebuild_command(directory, manifest.tp, manifest.arch)
    try:
        for name, record in manifest.files.items():
            size = (base / name).stat().st_size if (base / name).is_file() else None
            if size is None:
                raise EngineError(f"{base / name}: missing, {MANIFEST_NAME} lists it: rebuild with `{again}`")
            if size != record.bytes:
                raise EngineError(f"{base / name}: expected {record.bytes} bytes, found {size}: rebuild with `{again}`")
        strays = sorted(e for e in os.listdir(base) if RANK_FILE.fullmatch(e) and e not in manifest.files)
    except OSError as error:
        raise EngineError(f"{base}: cannot be read: {error.strerror}") from error
    if strays:
        raise EngineError(
            f"{base}: {', '.join(strays)} do not belong to this engine (tp {manifest.tp}, {manifest.weights} "
            f"weights): rank files of several builds are mixed, rebuild with `{again}`"
        )


def check_digest(
    path: Path,
    record: FileRecord,
    data: mmap.mmap | bytes,
    again: str,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Raise `EngineError` unless `data`, the content of `path`, has the digest of `record`."""
    found = digest(data, progress)
    if found != record.blake3:
        # packed weights with the right key would be kept by the next build, hence the rm
        raise EngineError(
            f"{path}: damaged: expected BLAKE3 {record.blake3}, found {found}: rebuild with `rm {path}; {again}`"
        )


def verify_artifact(directory: str | Path, progress: Progress | None = None) -> Manifest:
    """Re-read every byte of the artifact against its digests; raises one `EngineError` that names all damaged
    files.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    total = sum(record.bytes for record in manifest.files.values())
    done = 0
    errors: list[str] = []
    for name, record in manifest.files.items():
        path = Path(directory) / name

        def advance(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total, name)

        again = rebuild_command(directory, manifest.tp, manifest.arch)
        try:
            data: mmap.mmap | bytes = map_file(path) if record.bytes else b""
            check_digest(path, record, data, again, advance)
        except (OSError, ValueError) as error:
            errors.append(f"{path}: cannot be read: {error}")
        except EngineError as error:
            errors.append(str(error))
    if errors:
        raise EngineError("; ".join(errors))
    return manifest


def staging_path(directory: str | Path) -> Path:
    """Where the builder makes an artifact before it is renamed to `directory`."""
    path = Path(os.path.abspath(directory))
    return path.parent / f".{path.name}.building"


def plain_names(names: Iterable[str]) -> bool:
    return all(_PLAIN_NAME.fullmatch(name) for name in names)
