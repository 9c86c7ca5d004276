"""The safetensors container of the engine's files, with aligned tensors, and the digest of a file.

Every tensor starts at a multiple of `ALIGNMENT` bytes of the file: U8 tensors named `_pad.N` fill the gaps,
so the container stays gapless as safetensors demands, and any safetensors tool can open it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from plugins.core.spec import DTYPES, TensorSpec

ALIGNMENT = 4096  # bytes; a page, a disk sector and what O_DIRECT asks for
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
HASH_BLOCK = 32 << 20
PAD_PREFIX = "_pad."
_SAFETENSORS_DTYPES = {name: dtype for dtype, (_, _, name) in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a container: its spec and its first byte, counted from the start of the file."""

    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.nbytes


@dataclass(frozen=True)
class Container:
    """Header of a safetensors file. `tensors` is in file order and leaves the padding out; `size` is of the
    file.
    """

    metadata: dict[str, str]
    tensors: dict[str, Entry]
    size: int


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, TensorSpec]) -> tuple[bytes, Container]:
    """Header bytes (a multiple of `ALIGNMENT`) and layout of a file that holds `tensors` in order.

    Each tensor starts at a multiple of `ALIGNMENT` and the file ends at one; the bytes between are zero.
    Raises ValueError for a header that safetensors would refuse.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    relative: dict[str, int] = {}
    end = pads = 0
    for name, spec in tensors.items():
        if name.startswith(PAD_PREFIX) or name == "__metadata__":
            raise ValueError(f"tensor name {name!r} is reserved by the engine file format")
        relative[name] = end
        header[name] = _header_entry(spec, end)
        end += spec.nbytes
        gap = -end % ALIGNMENT
        if gap:
            header[f"{PAD_PREFIX}{pads}"] = _header_entry(TensorSpec((gap,), "uint8"), end)
            pads += 1
            end += gap
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"header of {len(text)} bytes: safetensors allows {MAX_HEADER}")
    encoded = len(text).to_bytes(8, "little") + text
    entries = {name: Entry(spec, len(encoded) + relative[name]) for name, spec in tensors.items()}
    return encoded, Container(dict(metadata), entries, len(encoded) + end)


def _header_entry(spec: TensorSpec, start: int) -> dict[str, Any]:
    offsets = [start, start + spec.nbytes]
    return {"dtype": DTYPES[spec.dtype][2], "shape": list(spec.shape), "data_offsets": offsets}


def decode_header(data: mmap.mmap | bytes, limit: int = MAX_HEADER) -> Container:
    """Layout of the safetensors file `data` (all of it), checked in full; raises ValueError with what is
    wrong.

    Never reads or allocates more than the header, whose length is bounded by the file and by `limit` bytes.
    """
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(limit, size - 8):
        raise ValueError(f"header of {length} bytes in a file of {size} bytes")
    if length < 2 or data[8:9] != b"{":
        raise ValueError("the header is not a JSON object")
    header = parse_json(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not a table of strings")
    for text in (*header, *metadata, *metadata.values()):
        text.encode()  # half a surrogate pair is JSON, but no text
    entries = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    end = 8 + length
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    for name, entry in ordered:
        if entry.start != end:
            raise ValueError(f"tensor {name!r} starts at byte {entry.start}, the one before ends at {end}")
        if not name.startswith(PAD_PREFIX) and entry.start % ALIGNMENT:
            raise ValueError(f"tensor {name!r} starts at byte {entry.start}, not a multiple of {ALIGNMENT}")
        end = entry.end
    if end != size:
        raise ValueError(f"the tensors end at byte {end}, the file at {size}")
    return Container(metadata, {n: e for n, e in ordered if not n.startswith(PAD_PREFIX)}, size)


def _entry(name: str, value: Any, data_start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS_DTYPES:
        raise ValueError(f"tensor {name!r}: unknown dtype {str(dtype)[:40]!r}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: shape or data_offsets are not lists of sizes")
    spec = TensorSpec(tuple(shape), _SAFETENSORS_DTYPES[dtype])
    if offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(f"tensor {name!r}: {spec} does not span bytes {offsets[0]} to {offsets[1]}")
    return Entry(spec, data_start + offsets[0])


def _sizes(value: Any) -> bool:
    """A list of at most 16 integers from 0 to 2^48 (products stay small enough to compute at once)."""
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(item) is int and 0 <= item <= 1 << 48 for item in value)
    )


def parse_json(data: bytes) -> dict[str, Any]:
    """`data` as a JSON object; raises ValueError for anything else, duplicate keys and endless nesting
    included.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key appears twice")
        return value

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def digest(data: mmap.mmap | bytes, progress: Callable[[int], None] | None = None) -> str:
    """BLAKE3 of `data` on all cores, front to back; `progress` is given the bytes of each block that was
    read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    with memoryview(data) as view:
        for start in range(0, len(view), HASH_BLOCK):
            with view[start : start + HASH_BLOCK] as block:
                hasher.update(block)
                if progress is not None:
                    progress(len(block))
    return hasher.hexdigest()


def map_file(path: Path) -> mmap.mmap:
    """`path` mapped read-only; raises OSError, or ValueError for an empty file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
