"""Writing an engine: streaming packed weights, resuming after a kill, publishing in one rename.

Everything is made in a staging directory beside the target, `.NAME.building`. A build that is killed leaves
it behind and the next one continues in it. Only `Staging.publish` makes the target appear, complete and on
disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from blake3 import blake3

from builder.errors import BuildError
from builder.pack_stream import (
    Reader,
    journal_path,
    layout_versions,
    pack_weights,
    weights_header,
)
from plugins.core.container import encode_header
from plugins.core.engine_file import (
    ENGINE_FORMAT,
    MANIFEST_NAME,
    RANK_FILE,
    SCHEMA_VERSION,
    EngineError,
    FileRecord,
    Manifest,
    Progress,
    engine_name,
    plain_names,
    plan_json,
    read_manifest,
    staging_path,
    weights_name,
)
from plugins.core.plan import Plan
from plugins.core.spec import TensorSpec

__all__ = ["BuildError", "Staging", "layout_versions", "pack_weights"]


class Staging:
    """The making of one artifact; a context manager that holds the target's lock.

    with Staging(target) as staging:
        staging.add_weights(plans, fingerprint, read, done=..., progress=...)   # not for "splat" engines
        staging.add_engines(plans, fingerprint)
        staging.add_file("tokenizer.json", data)
        manifest = staging.publish(manifest)

    Leaving the block without `publish` keeps the staging directory, so that the next build resumes.
    """

    def __init__(self, target: str | Path) -> None:
        self.target = Path(os.path.abspath(target))
        self.directory = staging_path(self.target)
        self._old = self.target.parent / f".{self.target.name}.replaced"
        self._lock_path = self.target.parent / f".{self.target.name}.lock"
        self._files: dict[str, FileRecord] = {}
        self._lock: int | None = None

    def __enter__(self) -> Staging:
        with _disk(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire()
        try:
            with _disk(self.target):
                self._recover()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._release()

    def add_weights(
        self,
        plans: Sequence[Plan],
        fingerprint: str,
        read: Reader,
        *,
        done: Callable[[str], None] | None = None,
        progress: Progress | None = None,
    ) -> list[int]:
        """Make `rankR.weights` of every plan; returns the ranks that had to be packed (the others were kept).

        A file of the present artifact with the same key (checkpoint, layout, tp, rank) is hard-linked: the
        key has no buckets, limits or kernels. `read`, `done` and `progress` are those of `pack_weights`.
        Raises `BuildError`.
        """
        names = {weights_name(plan.rank) for plan in plans}
        with _disk(self.directory):
            for entry in os.scandir(self.directory):  # of a build with more ranks: they would only take space
                if ".weights" in entry.name and entry.name.removesuffix(".journal") not in names:
                    os.unlink(entry.path)
            missing = [plan for plan in plans if not self._reuse(plan, fingerprint)]
        self._files.update(pack_weights(missing, fingerprint, self.directory, read, done=done, progress=progress))
        return [plan.rank for plan in missing]

    def add_engines(self, plans: Sequence[Plan], fingerprint: str, cubins: Mapping[str, bytes] | None = None) -> None:
        """Write `rankR.engine` of every plan: the plan and the kernel images by name."""
        images = dict(sorted((cubins or {}).items()))
        for plan in plans:
            metadata = {
                "format": ENGINE_FORMAT,
                "schema": str(SCHEMA_VERSION),
                "fingerprint": fingerprint,
                "tp": str(plan.tp),
                "rank": str(plan.rank),
                "plan": plan_json(plan),
            }
            specs = {name: TensorSpec((len(image),), "uint8") for name, image in images.items()}
            try:
                header, container = encode_header(metadata, specs)
            except ValueError as error:
                raise BuildError(f"{engine_name(plan.rank)}: {error}") from None
            data = bytearray(container.size)
            data[: len(header)] = header
            for name, image in images.items():
                data[container.tensors[name].start : container.tensors[name].end] = image
            self._write(engine_name(plan.rank), bytes(data))

    def add_file(self, name: str, data: bytes) -> None:
        """Add a further file (tokenizer, chat template) under a plain name."""
        if not plain_names([name]) or name == MANIFEST_NAME or RANK_FILE.fullmatch(name):
            raise BuildError(f"{name!r}: expected a plain file name that the engine does not use itself")
        self._write(name, data)

    def publish(self, manifest: Manifest) -> Manifest:
        """Complete `manifest` with the files' digests, write it, and put the artifact in the target's place.

        At every instant the target is the old artifact, absent, or the new one, whole and on disk.
        """
        manifest = manifest.with_files(self._files)
        try:
            data = manifest.to_bytes()
            Manifest.from_bytes(data)
        except (ValueError, TypeError) as error:
            raise BuildError(f"{self.target}: the manifest would not load: {error}") from None
        with _disk(self.target):
            self._refuse_foreign()
            for entry in os.scandir(self.directory):
                if entry.name not in manifest.files:
                    os.unlink(entry.path)
            _fsync_directory(self.directory)
            self._write(MANIFEST_NAME, data)
            _fsync_directory(self.directory)
            if self.target.exists():
                os.rename(self.target, self._old)
            os.rename(self.directory, self.target)
            _fsync_directory(self.target.parent)
            if self._old.exists():
                shutil.rmtree(self._old)
        return manifest

    def _write(self, name: str, data: bytes) -> None:
        path = self.directory / name
        partial = self.directory / f"{name}.partial"
        with _disk(path):
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if partial.read_bytes() != data:
                raise BuildError(f"{path}: reads back other than it was written: check the disk, then build again")
            os.rename(partial, path)
        if name != MANIFEST_NAME:
            self._files[name] = FileRecord(len(data), blake3(data).hexdigest())

    def _acquire(self) -> int:
        """The lock, held until `_release` or the end of the process (its holder unlinks it, hence inodes)."""
        while True:
            with _disk(self._lock_path):
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_ino == os.stat(self._lock_path).st_ino:
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise BuildError(
                    f"{self.target}: another build of it is running: wait for it, or choose another -o"
                ) from None
            except FileNotFoundError:
                pass
            os.close(lock)

    def _release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                os.unlink(self._lock_path)
            os.close(self._lock)
            self._lock = None

    def _recover(self) -> None:
        """Bring back what a killed build left: the old artifact, and the packed weights in staging."""
        if self._old.exists():
            if self.target.exists():
                shutil.rmtree(self._old)
            else:
                os.rename(self._old, self.target)
        self._refuse_foreign()
        self.directory.mkdir(exist_ok=True)
        # the manifest first: from here on nothing in staging loads
        for name in [MANIFEST_NAME, *os.listdir(self.directory)]:
            if not name.startswith("rank") or ".weights" not in name:
                with suppress(FileNotFoundError):
                    os.unlink(self.directory / name)

    def _refuse_foreign(self) -> None:
        """Replacing a directory deletes it: refuse one that holds anything but an engine's files."""
        if not self.target.exists() and not self.target.is_symlink():
            return
        if self.target.is_symlink() or not self.target.is_dir():
            raise BuildError(f"{self.target}: expected an engine directory or nothing there: choose another -o")
        known = set(self._files) | {MANIFEST_NAME}
        with suppress(EngineError):
            known |= set(read_manifest(self.target).files)
        names = sorted(name for name in os.listdir(self.target) if not RANK_FILE.fullmatch(name) and name not in known)
        # a damaged manifest lists nothing; the files that this build adds are known only when it publishes
        damaged = known == {MANIFEST_NAME} and (self.target / MANIFEST_NAME).exists()
        if names and not damaged:
            raise BuildError(
                f"{self.target}: holds {', '.join(names[:5])}, not of an engine, which would be deleted: "
                "move it away or choose another -o"
            )

    def _reuse(self, plan: Plan, fingerprint: str) -> bool:
        """Link the present artifact's packed weights of this rank into staging if their key is the same."""
        name = weights_name(plan.rank)
        source = self.target / name
        header, container = weights_header(plan, fingerprint)
        try:
            record = read_manifest(self.target).files[name]
            with source.open("rb") as file:
                if record.bytes != container.size or os.fstat(file.fileno()).st_size != container.size:
                    return False
                if file.read(len(header)) != header:
                    return False
        except (EngineError, KeyError, OSError):
            return False
        for leftover in (journal_path(self.directory / name), self.directory / name):
            leftover.unlink(missing_ok=True)
        try:
            os.link(source, self.directory / name)
        except OSError:
            return False  # a file system without hard links: packed again, and reported as packed
        self._files[name] = record
        return True


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns an OSError inside the block into a `BuildError` that names the file, or else `path`."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise BuildError(f"{where}: cannot be written: {error.strerror or error}") from error


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
