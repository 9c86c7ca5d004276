"""Builds that are killed with SIGKILL at a chosen system call, or after a chosen time, and resumed.

Runs as `python -m tests.builder.kill_build DIRECTORY SCENARIO POINTS SEED`, prints a JSON object, exits with
1 on the first violation. A process of its own: it forks a child for every build, so it must have no threads
when it does so.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from builder import pack_stream
from plugins.core.engine_file import EngineError, staging_path, verify_artifact
from tests import engine_fakes as fakes

CALLS = (
    *("pwrite", "write", "preadv", "ftruncate", "fdatasync", "fsync"),
    *("rename", "unlink", "rmdir", "link", "mkdir"),
)

# what the artifact that is replaced was built with: "reuse" differs in the buckets only and keeps the weights
OLD: dict[str, dict[str, Any] | None] = {
    "fresh": None,
    "reuse": {"buckets": (1, 2)},
    "replace": {"fingerprint": "another-checkpoint"},
}


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Exit status of a forked child that does `work`: 0, 1 for an exception, -9 for a kill."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def build(target: Path, **options: Any) -> None:
    fakes.build(target, **options)


def build_counted(target: Path, kill_at: int, torn: bool, log: Path | None = None) -> None:
    """Build, and die before (or, if `torn`, in the middle of) system call number `kill_at`."""
    counter = itertools.count()

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            number = next(counter)
            if number == kill_at:
                if torn and name in ("pwrite", "write"):
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])  # type: ignore[index,arg-type]
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    fakes.build(target)
    if log is not None:
        log.write_text(str(next(counter)))


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def state(directory: Path, old: dict[str, bytes] | None, new: dict[str, bytes]) -> str:
    """Which artifact `directory` is; raises if it is there and is neither, or does not load."""
    try:
        verify_artifact(directory)
    except EngineError:
        if directory.exists():
            raise
        return "absent"
    found = content(directory)
    if found not in (old, new):
        raise RuntimeError(f"{directory}: an artifact that nobody built: {sorted(found)}")
    return "new" if found == new else "old"


def main() -> None:
    base, scenario, points, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    options: dict[str, Any] | None = OLD[scenario]
    # a SIGKILL loses nothing that the kernel has, so waiting for the disk would only take time
    for name in ("fsync", "fdatasync", "posix_fadvise"):
        setattr(os, name, lambda *arguments: None)
    fakes.register()
    pack_stream.COMMIT_BYTES = 16 << 10  # several journal entries a file
    rng = random.Random(seed)
    new_dir, old_dir, target = base / "new" / "x", base / "old" / "x", base / "run" / "x"

    def prepare() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        if options is not None:
            shutil.copytree(old_dir, target)

    if in_child(lambda: build(new_dir)):
        raise SystemExit(1)
    if options is not None and in_child(lambda: build(old_dir, **options)):
        raise SystemExit(1)
    new, old = content(new_dir), content(old_dir) if options is not None else None
    prepare()
    log, began = base / "log", time.monotonic()
    if in_child(lambda: build_counted(target, -1, False, log)):
        raise SystemExit(1)
    duration, calls = time.monotonic() - began, int(log.read_text())

    tail = range(max(0, calls - 25), calls)  # the publication, call by call
    chosen = [*tail, *(rng.randrange(calls) for _ in range(max(0, points - len(tail))))]
    seen: dict[str, int] = {}

    def check() -> None:
        (base / "state").write_text(state(target, old, new))
        with suppress(EngineError):
            state(staging_path(target), None, new)  # what loads there is complete

    def must_be_new() -> None:
        if state(target, old, new) != "new" or os.listdir(target.parent) != [target.name]:
            raise RuntimeError(f"resumed build left {os.listdir(target.parent)}")

    for index, point in enumerate(chosen):
        prepare()
        if index % 5 == 4 and point not in tail:
            killed = in_child(lambda: build(target), rng.random() * duration)
        else:
            killed = in_child(partial(build_counted, target, point, index % 2 == 1))
        failed = [killed not in (0, -9), in_child(check)]
        again = rng.random() < 0.3  # killed a second time while it resumes
        if again:
            in_child(lambda: build_counted(target, rng.randrange(calls), True))
        failed += [in_child(lambda: build(target)), in_child(must_be_new)]
        if any(failed):
            raise SystemExit(f"scenario {scenario}, call {point} of {calls}: {failed}")
        found = (base / "state").read_text()
        seen[found] = seen.get(found, 0) + 1
    print(json.dumps({"calls": calls, "killed": len(chosen), "states": seen}))


if __name__ == "__main__":
    main()
