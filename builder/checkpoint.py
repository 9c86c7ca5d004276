"""A directory of safetensors files, memory-mapped: headers are read and checked, nothing is loaded whole.

The headers are parsed here and not by the `safetensors` package because that one validates a file as a
whole and does not say which tensor is wrong. Format: an 8-byte little-endian header length, a JSON header,
then the tensors' bytes without gaps (huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3

from builder.config_file import load_json
from builder.errors import CheckpointError, some

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
LFS_PREFIX = b"version https://git-lfs"
READ_THREADS = 16  # scattered small reads wait for the disk, not for the processor
SAMPLE_BYTES = 16 << 20  # of a shard, for the fingerprint
SAMPLE_BLOCKS = 256

# safetensors name -> (name here, numpy storage dtype). numpy has no bfloat16 and no FP8: bits are carried.
DTYPES: dict[str, tuple[str, type[np.generic]]] = {
    "BF16": ("bfloat16", np.uint16),
    "F16": ("float16", np.float16),
    "F32": ("float32", np.float32),
    "F64": ("float64", np.float64),
    "F8_E4M3": ("float8_e4m3", np.uint8),
    "F8_E5M2": ("float8_e5m2", np.uint8),
    "BOOL": ("bool", np.bool_),
    "I8": ("int8", np.int8),
    "U8": ("uint8", np.uint8),
    "I16": ("int16", np.int16),
    "U16": ("uint16", np.uint16),
    "I32": ("int32", np.int32),
    "U32": ("uint32", np.uint32),
    "I64": ("int64", np.int64),
    "U64": ("uint64", np.uint64),
}
STORAGE = dict(DTYPES.values())
ITEM_BYTES = {name: np.dtype(storage).itemsize for name, storage in STORAGE.items()}


class TensorInfo(NamedTuple):
    """`nbytes` bytes of `file` from byte `start`. `dtype` is a name such as "bfloat16"."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Shard(NamedTuple):
    """One safetensors file as it was when the checkpoint was opened."""

    path: Path
    size: int
    header_digest: bytes  # BLAKE3
    tensors: list[TensorInfo]


class Checkpoint:
    """The tensors of a directory with `model.safetensors.index.json`, or with one `model.safetensors`.

    Build with `Checkpoint.open`. Files must not change while the checkpoint is in use: reading a mapped file
    that became shorter kills the process.
    """

    def __init__(self, directory: Path, tensors: dict[str, TensorInfo], shards: list[Shard]) -> None:
        self.directory = directory
        self.shards = shards
        self._tensors = tensors
        self._sizes = {shard.path.name: shard.size for shard in shards}
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read and check every header and the index against each other: seconds for K2.6's 64 files.

        Raises `CheckpointError` with all findings: files that are missing, cut short, empty, Git-LFS pointers
        or not safetensors; tensors with gaps or overlaps, in two files, or in only one of index and file.
        """
        index = _read_index(directory)
        names = sorted(set(index.values())) if index is not None else [SINGLE_NAME]
        shards: list[Shard] = []
        problems: list[str] = []
        for name in names:
            try:
                shards.append(_read_shard(directory / name))
            except CheckpointError as error:
                problems += error.problems
        if problems:
            raise CheckpointError(*problems)
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for info in shard.tensors:
                if info.name in tensors:
                    problems.append(
                        f"{directory}: tensor {info.name} is in both {tensors[info.name].file} and "
                        f"{info.file}: download the checkpoint again, without files of another revision"
                    )
                tensors[info.name] = info
        if index is not None:
            problems += _compare_with_index(directory / INDEX_NAME, index, tensors)
        if problems:
            raise CheckpointError(*problems)
        return cls(directory, tensors, shards)

    def names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return list(self._tensors)

    def infos(self) -> Iterable[TensorInfo]:
        """All tensors, in file order."""
        return self._tensors.values()

    def info(self, name: str) -> TensorInfo:
        """Place, dtype and shape of a tensor."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: there is no tensor {name} in this checkpoint") from None

    def array(self, name: str) -> np.ndarray:
        """Read-only view of the mapped file, no copy; bfloat16 comes as uint16 bits, FP8 as uint8 bits.

        The address is as aligned as the file has it (safetensors promises none).
        """
        info = self.info(name)
        mapped = self._map(info.file)
        dtype = np.dtype(STORAGE[info.dtype]).newbyteorder("<")
        return np.frombuffer(mapped, dtype, prod(info.shape), info.start).reshape(info.shape)

    def drop_pages(self, name: str) -> None:
        """Give back the memory of a tensor's pages; views stay valid and read from the file again.

        Reading 595 GB through a mapping counts as resident memory until this is called. Pages shared with the
        neighbouring tensors go too, which costs them one page fault.
        """
        info = self.info(name)
        if info.file in self._maps and info.nbytes:
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, start, info.start + info.nbytes - start)

    def read_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies of many small, scattered tensors.

        Read with `pread` and without read-ahead: through the mapping each would bring in 128 KB.
        """
        by_file: dict[str, list[TensorInfo]] = {}
        for name in names:
            info = self.info(name)
            by_file.setdefault(info.file, []).append(info)
        with ThreadPoolExecutor(READ_THREADS) as pool:
            return dict(pair for pairs in pool.map(self._read_from_file, by_file.values()) for pair in pairs)

    def fingerprint(self) -> str:
        """BLAKE3 hex over config.json, the index, and each shard's name, size, header and a sample of its bytes.

        It identifies a revision without reading 595 GB: shards up to `SAMPLE_BYTES` are hashed whole, larger ones
        in `SAMPLE_BLOCKS` blocks spread evenly. Any retraining or re-quantisation changes it; a few bytes of a
        large shard that were edited in place need not.
        """
        digest = blake3()
        for name in ("config.json", INDEX_NAME):
            path = self.directory / name
            _add(digest, path.read_bytes() if path.exists() else b"")
        for shard in self.shards:
            _add(digest, shard.path.name.encode())
            _add(digest, struct.pack("<Q", shard.size))
            _add(digest, shard.header_digest)
            _add(digest, _sample(shard))
        return digest.hexdigest()

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            path = self.directory / file
            with _opened(path) as stream:
                _check_unchanged(path, os.fstat(stream.fileno()).st_size, self._sizes[file])
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

    def _read_from_file(self, infos: Sequence[TensorInfo]) -> list[tuple[str, np.ndarray]]:
        path = self.directory / infos[0].file
        found = []
        with _opened(path) as stream:
            descriptor = stream.fileno()
            _check_unchanged(path, os.fstat(descriptor).st_size, self._sizes[path.name])
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for info in infos:
                data = os.pread(descriptor, info.nbytes, info.start)
                dtype = np.dtype(STORAGE[info.dtype]).newbyteorder("<")
                found.append((info.name, np.frombuffer(data, dtype).reshape(info.shape)))
        return found


def _add(digest: Any, data: bytes) -> None:
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _check_unchanged(path: Path, size: int, expected: int) -> None:
    if size != expected:
        raise CheckpointError(
            f"{path} has {size} bytes, but had {expected} when the build began: leave the "
            "checkpoint alone during a build"
        )


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name of the index; None where the checkpoint is one file without an index."""
    path = directory / INDEX_NAME
    if not path.exists():
        if (directory / SINGLE_NAME).exists():
            return None
        raise CheckpointError(
            f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}: expected a Hugging Face checkpoint"
        )
    weight_map = load_json(path, "").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty: download the index again")
    for name, file in weight_map.items():
        # a name with a separator would lead out of the directory
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise CheckpointError(f"{path}: tensor {name} is said to be in {file!r}: expected a plain file name")
    return weight_map


def _compare_with_index(path: Path, index: dict[str, str], tensors: dict[str, TensorInfo]) -> list[str]:
    problems = []
    for name, file in index.items():
        if name not in tensors:
            problems.append(f"{path}: tensor {name} should be in {file}, but is not: download that file again")
        elif tensors[name].file != file:
            problems.append(f"{path}: tensor {name} should be in {file}, but is in {tensors[name].file}")
    if extra := [name for name in tensors if name not in index]:
        problems.append(
            f"{path} does not list {some(extra)}, found in {tensors[extra[0]].file}: download the index again"
        )
    return problems


def _read_shard(path: Path) -> Shard:
    """Header of one file, checked: every byte of the file belongs to exactly one tensor."""
    with _opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(max(8, len(LFS_PREFIX)))
        if not start:
            raise CheckpointError(f"{path} is empty: download it again")
        if start.startswith(LFS_PREFIX):
            raise CheckpointError(f"{path} is a Git-LFS pointer of {size} bytes: fetch the content with `git lfs pull`")
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} is not a safetensors file: its header length reads {length}, expected 2 to "
                f"{MAX_HEADER_BYTES}; download it again"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path} ends inside its header: expected at least {8 + length} bytes, found {size}; download it again"
            )
        stream.seek(8)
        header = stream.read(length)
    tensors = sorted(_parse_header(path, header), key=lambda info: info.start)
    end = 8 + length
    for info in tensors:
        if info.start != end:
            what = "overlaps the tensor before it" if info.start < end else "leaves unused bytes before it"
            raise CheckpointError(
                f"{path}: tensor {info.name} {what}: expected it at byte {end}, found at {info.start}; "
                "download the file again"
            )
        end += info.nbytes
    if size != end:
        what = "is cut short" if size < end else "has bytes after its last tensor"
        raise CheckpointError(f"{path} {what}: expected {end} bytes, found {size}; download it again")
    return Shard(path, size, blake3(header).digest(), tensors)


def _parse_header(path: Path, header: bytes) -> Iterator[TensorInfo]:
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        items = list(entries.items())
    except (ValueError, RecursionError, AttributeError):
        raise CheckpointError(f"{path}: the header is not a JSON object: download it again") from None
    base = 8 + len(header)
    for name, entry in items:
        try:
            dtype = DTYPES[entry["dtype"]][0]
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
                raise ValueError
            nbytes = prod(shape) * ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: tensor {name} is described as {entry!r}: expected dtype (one of "
                f"{', '.join(DTYPES)}), shape and data_offsets"
            ) from None
        if end - begin != nbytes:
            raise CheckpointError(
                f"{path}: tensor {name} has data_offsets {begin} to {end}: expected {nbytes} bytes for "
                f"{dtype} {list(shape)}"
            )
        yield TensorInfo(name, path.name, dtype, shape, base + begin, nbytes)


def _sample(shard: Shard) -> bytes:
    """BLAKE3 of the shard's bytes, or of blocks spread over them (see `Checkpoint.fingerprint`)."""
    digest = blake3()
    with _opened(shard.path) as stream:
        if shard.size <= SAMPLE_BYTES:
            digest.update(stream.read())
        else:
            block = SAMPLE_BYTES // SAMPLE_BLOCKS
            for index in range(SAMPLE_BLOCKS):
                digest.update(os.pread(stream.fileno(), block, index * (shard.size - block) // (SAMPLE_BLOCKS - 1)))
    return digest.digest()
