"""Writing an engine: content, resuming, atomic publication, disk errors, reuse of weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from builder import pack_stream
from builder.errors import BuildError
from builder.writer import Staging
from engine_runtime.engine import load_engine
from plugins.core import packing
from plugins.core.engine_file import EngineError, read_manifest, staging_path, verify_artifact
from plugins.core.plugin import PluginError
from tests import engine_fakes as fakes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake_packer(monkeypatch: pytest.MonkeyPatch) -> fakes.RowPacker:
    packer = fakes.RowPacker()
    monkeypatch.setitem(packing._PACKERS, "fake_rows", packer)
    return packer


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_any_safetensors_tool_opens_both_files(tmp_path: Path) -> None:
    fakes.build(tmp_path / "x")
    for rank in range(2):
        with safe_open(tmp_path / "x" / f"rank{rank}.weights", "pt") as file:
            assert file.metadata()["rank"] == str(rank)
            assert set(file.keys()) - set(fakes.ROWS) == {"_pad.0", "_pad.1", "_pad.2"}
            for name in fakes.ROWS:
                tensor = file.get_tensor(name)
                expected = np.split(fakes.source(name), 2)[rank][::-1]
                assert str(tensor.dtype) == "torch." + fakes.DTYPE.get(name, "bfloat16")
                bits = tensor.view(torch.uint8).numpy() if tensor.numel() else tensor.numpy()
                assert bits.tobytes() == expected.tobytes()
            assert not any(file.get_tensor(f"_pad.{i}").any() for i in range(3))
        with safe_open(tmp_path / "x" / f"rank{rank}.engine", "np") as file:
            assert json.loads(file.metadata()["plan"]) == fakes.make_plan(2, rank).to_json()
            assert file.get_tensor("kernel.b").tobytes() == b"\x7fELF" * 9


def test_tensors_start_at_pages_in_upload_order(tmp_path: Path) -> None:
    fakes.build(tmp_path / "x")
    data = (tmp_path / "x" / "rank1.weights").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if "_pad" not in name}
    assert list(starts) == list(fakes.ROWS) == sorted(starts, key=lambda name: starts[name])
    assert all(start % 4096 == 0 for start in starts.values()) and len(data) % 4096 == 0


def test_two_builds_are_byte_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.build(tmp_path / "a")
    monkeypatch.setattr(pack_stream, "COMMIT_BYTES", 5000)  # how often it commits leaves no trace
    fakes.build(tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]  # no lock, journal or staging stays


def test_ranks_hold_their_part_for_any_tp(tmp_path: Path) -> None:
    for tp in (1, 4):
        fakes.build(tmp_path / "x", tp=tp)
        for rank in range(tp):
            engine = load_engine(tmp_path / "x", rank, tp=tp, arch="cpu")
            assert engine.plan == fakes.make_plan(tp, rank)
            for name, array in engine.weights.items():
                np.testing.assert_array_equal(array, np.split(fakes.source(name), tp)[rank][::-1])
        assert len(content(tmp_path / "x")) == 2 * tp + 2  # nothing of the other tp is left


def test_sources_are_dropped_behind_the_stream(tmp_path: Path) -> None:
    read: list[str] = []
    dropped: list[str] = []
    plans = [fakes.make_plan(2, rank) for rank in range(2)]

    def source(name: str) -> np.ndarray:
        read.append(name)
        return fakes.source(name)

    seen: list[tuple[int, int, str]] = []
    pack_stream.pack_weights(
        plans, "f", tmp_path, source, done=dropped.append, progress=lambda *event: seen.append(event)
    )
    assert read == [name for name in fakes.ROWS for _ in range(2)] == dropped  # one pass over the checkpoint
    assert [event[0] for event in seen] == sorted(event[0] for event in seen)
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in tmp_path.glob("*.weights"))


@pytest.mark.parametrize(("scenario", "points"), [("fresh", 50), ("reuse", 25), ("replace", 35)])
def test_killed_anywhere_and_resumed_is_byte_identical(tmp_path: Path, scenario: str, points: int) -> None:
    command = [sys.executable, "-m", "tests.builder.kill_build", str(tmp_path), scenario, str(points), "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["killed"] == points
    assert set(result["states"]) == ({"absent", "new"} if scenario == "fresh" else {"absent", "old", "new"})


def test_resume_continues_at_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_packer: fakes.RowPacker
) -> None:
    monkeypatch.setattr(pack_stream, "COMMIT_BYTES", 10_000)
    full, plan = tmp_path / "full", fakes.make_plan(1, 0)
    full.mkdir()
    pack_stream.pack_weights([plan], "f", full, fakes.source)
    lines = (full / "rank0.weights.journal").read_bytes().splitlines(keepends=True)
    commits = [json.loads(line)["bytes"] for line in lines]
    assert len(commits) > 5
    expected = (full / "rank0.weights").read_bytes()
    fake_packer.chunk_rows = 37  # so that commits lie inside chunks

    written: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        written.append(offset)
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    for kept, torn in ((3, b""), (4, lines[4][:20]), (len(lines) - 1, lines[-1][:-1]), (len(lines), b"")):
        part = tmp_path / f"part{kept}"
        part.mkdir()
        (part / "rank0.weights").write_bytes(expected[: commits[kept - 1]] + b"not committed")
        (part / "rank0.weights.journal").write_bytes(b"".join(lines[:kept]) + torn)
        if kept == len(lines):
            (part / "rank0.weights").write_bytes(expected)
        written.clear()
        records = pack_stream.pack_weights([plan], "f", part, fakes.source)
        assert (part / "rank0.weights").read_bytes() == expected
        assert records["rank0.weights"].bytes == len(expected)
        assert min(written, default=commits[-1]) == commits[kept - 1]

    # committed bytes that changed since are packed again; what the journal of another checkpoint says is void
    part = tmp_path / "part3"
    damaged = bytearray(expected)
    damaged[commits[1] + 5] ^= 1
    (part / "rank0.weights").write_bytes(damaged)
    (part / "rank0.weights.journal").write_bytes(b"".join(lines[:6]))
    pack_stream.pack_weights([plan], "f", part, fakes.source)
    assert (part / "rank0.weights").read_bytes() == expected
    pack_stream.pack_weights([plan], "another checkpoint", part, fakes.source)
    assert (part / "rank0.weights").read_bytes() != expected
    assert len((part / "rank0.weights").read_bytes()) == len(expected)


def failing(real: Callable[..., Any], number: int, code: int) -> Callable[..., Any]:
    """`real`, which raises OSError(code) from call `number` on."""
    calls = iter(range(1_000_000))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    return call


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("name", ["pwrite", "fdatasync", "fsync", "preadv"])
def test_disk_full_or_broken_leaves_nothing_loadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replacing: bool
) -> None:
    target = tmp_path / "x"
    fakes.build(tmp_path / "good")
    good = content(tmp_path / "good")
    if replacing:
        fakes.build(target, fingerprint="another checkpoint")
    before = content(target) if replacing else None
    code = errno.ENOSPC if name in ("pwrite", "fdatasync") else errno.EIO
    for number in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(pack_stream, "COMMIT_BYTES", 30_000)
            patch.setattr(os, name, failing(getattr(os, name), number, code))
            try:
                fakes.build(target)
                break
            except BuildError as error:
                assert os.strerror(code) in str(error) and "\n" not in str(error)
        if name == "fsync" and target.exists() and content(target) == good:
            break  # the last call is after the renames
        assert (content(target) if target.exists() else None) == before
        try:
            verify_artifact(staging_path(target))
            assert content(staging_path(target)) == good  # it failed while publishing what is complete
        except EngineError:
            pass
        if number % 2:
            shutil.rmtree(staging_path(target))  # every other build resumes the one that failed
    assert 3 < number < 99
    fakes.build(target)
    assert content(target) == good


def test_too_little_space_is_said_before_anything_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    class Little:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Little)
    with pytest.raises(BuildError, match=r"need \d+ bytes more, 12288 are free"):
        fakes.build(tmp_path / "x")
    assert not (tmp_path / "x").exists() and real.f_bavail > 3
    assert sum(path.stat().st_size for path in staging_path(tmp_path / "x").iterdir()) == 0


def test_bytes_that_read_back_wrong_stop_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def flipped(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        if offset <= 30_000 < offset + count:
            buffers[0][30_000 - offset] ^= 4
        return count

    monkeypatch.setattr(os, "preadv", flipped)
    with pytest.raises(BuildError, match="read back other than they were written"):
        fakes.build(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_weights_are_kept_unless_their_key_changes(tmp_path: Path, fake_packer: fakes.RowPacker) -> None:
    target = tmp_path / "x"
    assert fakes.build(target) == [0, 1]
    inode = (target / "rank0.weights").stat().st_ino
    assert fakes.build(target, buckets=(1, 4, 8), arch="sm_90a") == []
    assert (target / "rank0.weights").stat().st_ino == inode
    assert load_engine(target, 1, arch="sm_90a").plan.buckets("verify") == [1, 4, 8]
    verify_artifact(target)

    (target / "rank1.weights").unlink()  # what the message about a damaged file asks for
    assert fakes.build(target) == [1]
    fake_packer.layout_version = 4
    assert fakes.build(target) == [0, 1]
    assert fakes.build(target, fingerprint="another checkpoint") == [0, 1]
    assert fakes.build(target, tp=4) == [0, 1, 2, 3]
    verify_artifact(target)


def test_a_kept_file_is_never_written_to(tmp_path: Path) -> None:
    """A build that linked the old weights is abandoned; the next one, of another checkpoint, must not touch
    them.
    """
    target = tmp_path / "x"
    fakes.build(target)
    before = content(target)
    plans = [fakes.make_plan(2, rank) for rank in range(2)]
    with Staging(target) as staging:
        assert staging.add_weights(plans, fakes.FINGERPRINT, fakes.source) == []
    with Staging(target) as staging:
        assert staging.add_weights(plans, "another checkpoint", fakes.source) == [0, 1]
    assert content(target) == before


def test_old_artifact_comes_back_after_a_kill_between_the_renames(tmp_path: Path) -> None:
    target = tmp_path / "x"
    fakes.build(target)
    before = content(target)
    target.rename(tmp_path / ".x.replaced")
    with pytest.raises(EngineError, match="no engine here"):
        load_engine(target, 0)
    with Staging(target):
        pass
    assert content(target) == before
    (tmp_path / ".x.replaced").mkdir()  # killed while it deleted the old one
    (tmp_path / ".x.replaced" / "rank1.engine").write_bytes(b"")
    with Staging(target):
        pass
    assert content(target) == before and not (tmp_path / ".x.replaced").exists()


def test_splat_engine_has_no_weights_file(tmp_path: Path) -> None:
    fakes.build(tmp_path / "x")
    fakes.build(tmp_path / "x", splat=True)
    assert sorted(content(tmp_path / "x")) == [
        "chat_template.jinja",
        "engine.json",
        "rank0.engine",
        "rank1.engine",
    ]
    engine = load_engine(tmp_path / "x", 0)
    assert engine.manifest.weights == "splat" and not engine.weights and engine.plan == fakes.make_plan()


def test_two_builds_of_one_target_do_not_interleave(tmp_path: Path) -> None:
    with Staging(tmp_path / "x"), pytest.raises(BuildError, match="another build of it is running"):
        fakes.build(tmp_path / "x")
    assert fakes.build(tmp_path / "x") == [0, 1]


def test_a_directory_that_is_not_an_engine_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(BuildError, match=r"holds thesis\.tex"):
        fakes.build(target)
    (target / "thesis.tex").rename(tmp_path / "thesis.tex")
    fakes.build(target)
    (tmp_path / "thesis.tex").rename(target / "thesis.tex")
    with pytest.raises(BuildError, match=r"holds thesis\.tex"):
        fakes.build(target)
    (target / "engine.json").write_text("damaged")
    with pytest.raises(BuildError, match=r"holds thesis\.tex"):
        fakes.build(target)
    assert (target / "thesis.tex").read_text() == "years of work"
    (target / "thesis.tex").unlink()
    assert fakes.build(target) == [0, 1]  # a damaged engine can be rebuilt in place


@pytest.mark.parametrize("rows", [-1, 1])
def test_packer_with_the_wrong_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    class Wrong(fakes.RowPacker):
        def pack(self, *args: Any) -> Iterator[np.ndarray]:
            for array in super().pack(*args):
                yield array if rows == -1 or not len(array) else np.concatenate((array, array[:1]))
                if rows == -1:
                    return

    monkeypatch.setitem(packing._PACKERS, "fake_rows", Wrong())
    with pytest.raises(BuildError, match=r"weight \w+, rank 0: packer fake_rows does not yield"):
        fakes.build(tmp_path / "x", tp=1)
    assert not (tmp_path / "x").exists()


def test_packer_error_names_the_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(fakes.RowPacker):
        def pack(self, *args: Any) -> Iterator[np.ndarray]:
            raise PluginError("fake_rows: rows: expected even, found odd")
            yield

    monkeypatch.setitem(packing._PACKERS, "fake_rows", Refusing())
    with pytest.raises(BuildError, match="weight embed, rank 0: fake_rows: rows: expected even"):
        fakes.build(tmp_path / "x")


@pytest.mark.parametrize("name", ["../x", "engine.json", "rank0.engine", ".hidden", "a/b", ""])
def test_extra_files_have_plain_names(tmp_path: Path, name: str) -> None:
    with Staging(tmp_path / "x") as staging, pytest.raises(BuildError, match="plain file name"):
        staging.add_file(name, b"")


def test_incomplete_build_is_not_published(tmp_path: Path) -> None:
    plans = [fakes.make_plan(2, rank) for rank in range(2)]
    with Staging(tmp_path / "x") as staging:
        staging.add_weights(plans, fakes.FINGERPRINT, fakes.source)
        staging.add_engines(plans[:1], fakes.FINGERPRINT)
        with pytest.raises(BuildError, match=r"rank1\.engine missing"):
            staging.publish(fakes.make_manifest())
    assert not (tmp_path / "x").exists()


def test_manifest_does_not_depend_on_the_order_of_tables(tmp_path: Path) -> None:
    fakes.build(tmp_path / "x")
    manifest = read_manifest(tmp_path / "x")
    text = (tmp_path / "x" / "engine.json").read_text()
    assert text.startswith('{\n "schema_version": 1,')
    reversed_files = dict(reversed(manifest.files.items()))
    assert manifest.with_files(reversed_files).to_bytes() == text.encode()
