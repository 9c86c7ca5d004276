"""Streaming packed weights to disk: one pass over the checkpoint, bounded memory, resumable, re-read as it
goes.

A weights file is written front to back. Whenever `COMMIT_BYTES` have been added, they are forced to disk,
dropped from the page cache and read again; only if the digest of what was read equals that of what was packed
is the position entered in the journal beside the file. A killed build continues at its last journal entry,
whose digest it checks.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from builder.errors import BuildError
from plugins.core.container import Container, encode_header, parse_json
from plugins.core.engine_file import (
    SCHEMA_VERSION,
    WEIGHTS_FORMAT,
    FileRecord,
    Progress,
    layout_key,
    weights_name,
)
from plugins.core.packing import get_packer
from plugins.core.plan import Plan
from plugins.core.plugin import PluginError

COMMIT_BYTES = 256 << 20
READ_BLOCK = 8 << 20
QUEUE_CHUNKS = 6  # packed chunks that wait to be written: bounds memory to a few times a chunk
KEEP_SOURCES = 16  # checkpoint tensors that a packer may still be using when it asks for the next one

Reader = Callable[[str], np.ndarray]


def layout_versions(plans: Sequence[Plan]) -> dict[str, int]:
    """Layout version of every packer that `plans` name, for the manifest and the key of the weights."""
    names = {weight.recipe.packer for plan in plans for weight in plan.weights.values()}
    return {name: get_packer(name).layout_version for name in sorted(names)}


def weights_header(plan: Plan, fingerprint: str) -> tuple[bytes, Container]:
    """Header and layout of `plan`'s weights file. Two files with equal headers have equal content."""
    metadata = {
        "format": WEIGHTS_FORMAT,
        "schema": str(SCHEMA_VERSION),
        "fingerprint": fingerprint,
        "tp": str(plan.tp),
        "rank": str(plan.rank),
        "layout": layout_key(plan, layout_versions([plan])),
    }
    try:
        return encode_header(metadata, {name: weight.spec for name, weight in plan.weights.items()})
    except ValueError as error:
        raise BuildError(f"{weights_name(plan.rank)}: {error}") from None


def pack_weights(
    plans: Sequence[Plan],
    fingerprint: str,
    directory: Path,
    read: Reader,
    *,
    done: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, FileRecord]:
    """Pack the weights of all `plans` (one a rank, same weight names) into `directory/rankR.weights`.

    Ranks go side by side, weight by weight, so that the checkpoint is read from disk once. `read(name)` gives
    a memory-mapped view of a checkpoint tensor; `done(name)` says that its pages may be dropped from memory
    for now (the view stays valid). Arrays that a packer yields must not be written to afterwards. Files that
    an earlier call left complete or in part are completed. `progress` is given (bytes packed, bytes in all,
    weight). Raises `BuildError` (also when the disk is full), leaving what is needed to resume.
    """
    if not plans:
        return {}
    names = list(plans[0].weights)
    for plan in plans:
        if list(plan.weights) != names:
            raise BuildError(f"rank {plan.rank}: expected the weights of rank {plans[0].rank} in the same order")
    files: list[_WeightsFile] = []
    try:
        try:
            for plan in plans:
                files.append(_WeightsFile(plan, fingerprint, directory))
            _check_space(files, directory)
            _stream(files, names, _Sources(read, done), progress)
            return {file.path.name: file.record() for file in files}
        except OSError as error:
            where = error.filename or directory
            raise BuildError(f"{where}: {error.strerror or error}: put it right and build again to resume") from error
    finally:
        for file in files:
            file.close()


def _check_space(files: Sequence[_WeightsFile], directory: Path) -> None:
    needed = sum(file.container.size - file.committed for file in files)
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise BuildError(
            f"{directory}: the packed weights need {needed} bytes more, {free} are free: "
            "make room or choose another -o (what is there already is kept for the next build)"
        )


def _stream(files: Sequence[_WeightsFile], names: Sequence[str], sources: _Sources, progress: Progress | None) -> None:
    total = sum(file.container.size for file in files)
    packed = sum(file.committed for file in files)
    committer = _Worker(_WeightsFile.commit, limit=1)

    def write(file: _WeightsFile, offset: int, chunk: memoryview) -> None:
        file.append(offset, chunk)
        if file.uncommitted >= COMMIT_BYTES:
            committer.put(file, *file.cut())

    writer = _Worker(write, limit=QUEUE_CHUNKS)
    try:
        for name in names:
            for file in files:
                for offset, chunk in file.rest_of(name, sources):
                    writer.put(file, offset, chunk)
                    packed += len(chunk)
                    if progress is not None:
                        progress(packed, total, name)
            sources.drop()
        writer.finish()
        for file in files:
            file.append(file.container.size, memoryview(b""))
            committer.put(file, *file.cut())
        committer.finish()
    finally:
        writer.stop()
        committer.stop()
    if progress is not None:
        progress(total, total, "")


class _Sources:
    """`read`, with pages dropped behind the stream."""

    def __init__(self, read: Reader, done: Callable[[str], None] | None) -> None:
        self._read = read
        self._done = done
        self._recent: deque[str] = deque()

    def __call__(self, name: str) -> np.ndarray:
        self._recent.append(name)
        self.drop(KEEP_SOURCES)
        return self._read(name)

    def drop(self, keep: int = 0) -> None:
        while len(self._recent) > keep:
            name = self._recent.popleft()
            if self._done is not None:
                self._done(name)


class _Worker:
    """A thread that calls `work(*item)` for what `put` hands it, at most `limit` items behind."""

    def __init__(self, work: Callable[..., None], limit: int) -> None:
        self._work = work
        self._queue: queue.Queue[tuple[Any, ...] | None] = queue.Queue(limit)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pack-weights", daemon=True)
        self._thread.start()

    def put(self, *item: Any) -> None:
        """Hand over one item; raises what `work` raised for an earlier one."""
        if self._error is not None:
            raise self._error
        self._queue.put(item)

    def finish(self) -> None:
        """Wait until all is done; raises what `work` raised."""
        self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None:  # after an error the queue is only emptied, so that `put` never blocks
                try:
                    self._work(*item)
                except BaseException as error:  # raised in the other thread by `put` or `finish`
                    self._error = error


class _WeightsFile:
    """One weights file that grows front to back.

    Three threads take part: `rest_of` packs, `append` and `cut` write, `commit` waits for the disk.
    """

    def __init__(self, plan: Plan, fingerprint: str, directory: Path) -> None:
        self.plan = plan
        self.path = directory / weights_name(plan.rank)
        self.header, self.container = weights_header(plan, fingerprint)
        # a kept file shares its inode with the present artifact, which must not change
        if self.path.exists() and self.path.stat().st_nlink > 1:
            self.path.unlink()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._journal = -1
        self._packed = blake3()  # of what was packed
        self._on_disk = blake3(max_threads=blake3.AUTO)  # of what was read back
        self._buffer = memoryview(bytearray(READ_BLOCK))
        self.committed = 0  # bytes that are on disk, read back and in the journal
        self._digest = ""  # of the committed bytes
        try:
            self._journal = os.open(journal_path(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._resume()
        except BaseException:
            self.close()
            raise
        self._resumed = self._end = self._cut = self.committed

    def rest_of(self, name: str, sources: Reader) -> Iterator[tuple[int, memoryview]]:
        """The bytes of weight `name` that an earlier build did not commit, each chunk with its file offset."""
        entry = self.container.tensors[name]
        recipe = self.plan.weights[name].recipe
        where = f"weight {name}, rank {self.plan.rank}"
        first = self._resumed
        offset = entry.start
        if first >= entry.end:
            return
        try:
            for array in get_packer(recipe.packer).pack(recipe, sources, self.plan.tp, self.plan.rank):
                chunk = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                if offset + len(chunk) > entry.end:
                    break
                if offset + len(chunk) > first:
                    yield max(offset, first), chunk[max(0, first - offset) :]
                offset += len(chunk)
            else:
                if offset == entry.end:
                    return
        except PluginError as error:
            raise BuildError(f"{where}: {error}") from error
        raise BuildError(
            f"{where}: packer {recipe.packer} does not yield the {entry.spec.nbytes} bytes of {entry.spec}"
        )

    def append(self, offset: int, chunk: memoryview) -> None:
        """Add `chunk` at `offset`, with zeros between the file's end and there; the first call adds the
        header.
        """
        if not self._end:
            self._write(memoryview(self.header))
        self._write(memoryview(bytes(offset - self._end)))
        self._write(chunk)

    @property
    def uncommitted(self) -> int:
        """Bytes that were appended since the last `cut`."""
        return self._end - self._cut

    def cut(self) -> tuple[int, str]:
        """Position and digest of what was appended so far: the arguments of the next `commit`."""
        self._cut = self._end
        return self._end, self._packed.hexdigest()

    def commit(self, end: int, digest: str) -> None:
        """Force the first `end` bytes to disk, read them again, and enter them in the journal."""
        if end == self.committed:
            return
        os.fdatasync(self._fd)
        self._read_back(end)
        if self._on_disk.hexdigest() != digest:
            raise BuildError(
                f"{self.path}: bytes {self.committed} to {end} read back other than they were written: "
                "check the disk, then build again"
            )
        entry = json.dumps({"bytes": end, "blake3": digest}) + "\n"
        os.write(self._journal, entry.encode())
        os.fdatasync(self._journal)
        self.committed, self._digest = end, digest

    def record(self) -> FileRecord:
        """Size and digest of the finished file."""
        return FileRecord(self.committed, self._digest)

    def close(self) -> None:
        for descriptor in (self._fd, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._journal = -1

    def _write(self, data: memoryview) -> None:
        self._packed.update(data)
        while data:
            count = os.pwrite(self._fd, data, self._end)
            self._end += count
            data = data[count:]

    def _read_back(self, end: int) -> None:
        """Take bytes `committed` to `end` into the digest of what is on disk, from the disk and not from its
        cache.
        """
        start = self.committed
        os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)
        while start < end:
            count = os.preadv(self._fd, [self._buffer[: end - start]], start)
            if not count:
                raise BuildError(f"{self.path}: ends at byte {start}, expected {end}: delete it and build again")
            self._on_disk.update(self._buffer[:count])
            start += count
        os.posix_fadvise(self._fd, self.committed, end - self.committed, os.POSIX_FADV_DONTNEED)

    def _resume(self) -> None:
        """Take over what an earlier build committed, cut off what it did not."""
        size = os.fstat(self._fd).st_size
        entries = _journal_entries(os.pread(self._journal, os.fstat(self._journal).st_size, 0), size)
        if os.pread(self._fd, len(self.header), 0) != self.header:
            entries = []  # of another plan or checkpoint
        kept = 0
        if entries and entries[-1].end == self.container.size:
            # complete, and read back before it was entered
            self.committed, self._digest, kept = entries[-1].end, entries[-1].digest, entries[-1].journal_end
        else:
            verified = self._on_disk.copy()
            for entry in entries:
                self._read_back(entry.end)
                if self._on_disk.hexdigest() != entry.digest:
                    break
                verified = self._on_disk.copy()
                self.committed, self._digest, kept = entry.end, entry.digest, entry.journal_end
            self._on_disk, self._packed = verified, verified.copy()
        os.ftruncate(self._fd, self.committed)
        os.ftruncate(self._journal, kept)
        os.lseek(self._journal, kept, os.SEEK_SET)


class _JournalEntry(NamedTuple):
    end: int  # bytes of the weights file that are committed
    digest: str  # BLAKE3 of those bytes
    journal_end: int  # where the entry ends in the journal


def _journal_entries(data: bytes, size: int) -> list[_JournalEntry]:
    """The entries up to the first that a kill or a crash left torn, or that lies past the file's `size`."""
    entries: list[_JournalEntry] = []
    position = last = 0
    for line in data.splitlines(keepends=True):
        position += len(line)
        try:
            value = parse_json(line)
            end, digest = value["bytes"], value["blake3"]
        except (ValueError, KeyError):
            break
        if not line.endswith(b"\n") or type(end) is not int or not isinstance(digest, str) or not last < end <= size:
            break
        entries.append(_JournalEntry(end, digest, position))
        last = end
    return entries


def journal_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.journal")
