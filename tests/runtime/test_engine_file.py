"""Loading an engine: everything that can be wrong on disk is one `EngineError` that says how to rebuild."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors import SafetensorError, deserialize

from engine_runtime.engine import load_engine
from plugins.core import packing
from plugins.core.container import decode_header, encode_header
from plugins.core.engine_file import EngineError, FileRecord, Manifest, read_manifest, verify_artifact
from plugins.core.spec import TensorSpec
from tests import engine_fakes as fakes

ROOT = Path(__file__).parents[2]
COMMAND = "python build.py CHECKPOINT -o "


@pytest.fixture(autouse=True)
def fake_packer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packing._PACKERS, "fake_rows", fakes.RowPacker())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(packing._PACKERS, "fake_rows", fakes.RowPacker())
        fakes.build(base / "x")
        fakes.build(base / "tp1", tp=1)
        fakes.build(base / "other", fingerprint="another checkpoint")
        fakes.build(base / "splat", splat=True)
    return base


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built / "x", tmp_path / "x")
    return tmp_path / "x"


def refused(directory: Path, *parts: str, rank: int = 0, verify: Any = "digest", **options: Any) -> str:
    with pytest.raises(EngineError) as caught:
        load_engine(directory, rank, verify=verify, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800
    for part in parts:
        assert part in message, message
    return message


def resign(directory: Path, name: str, data: bytes) -> None:
    """Replace file `name` and make the manifest agree with it."""
    (directory / name).write_bytes(data)
    manifest = read_manifest(directory)
    files = manifest.files | {name: FileRecord(len(data), blake3(data).hexdigest())}
    (directory / "engine.json").write_bytes(manifest.with_files(files).to_bytes())


def test_loads_what_was_built(built: Path) -> None:
    engine = load_engine(built / "x", 1, tp=2, arch="cpu")
    assert engine.plan == fakes.make_plan(2, 1) and engine.rank == 1 and engine.path == built / "x"
    assert list(engine.weights) == list(fakes.ROWS)  # upload order
    for name, array in engine.weights.items():
        np.testing.assert_array_equal(array, np.split(fakes.source(name), 2)[1][::-1])
        assert not array.flags.writeable or not array.size
    assert engine.cubins == {"kernel.a": b"x", "kernel.b": b"\x7fELF" * 9}
    assert engine.manifest == read_manifest(built / "x")
    assert load_engine(built / "x", 0, verify="size").plan == fakes.make_plan(2, 0)
    assert verify_artifact(built / "x") == engine.manifest


@pytest.mark.parametrize("name", ["engine.json", "rank0.engine", "rank0.weights", "chat_template.jinja"])
def test_every_flipped_bit_and_every_truncation_is_refused(engine: Path, name: str) -> None:
    path, rng = engine / name, random.Random(name)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for _ in range(170):
        # most flips go to the first bytes and the header, where they could do more than change a weight
        position = rng.randrange(min(len(good), rng.choice([16, header, len(good)])) if header < 1 << 40 else len(good))
        data = bytearray(good)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        refused(engine, name if name != "engine.json" else "engine.json", COMMAND)
        with pytest.raises(EngineError):
            verify_artifact(engine)
    for length in {0, 1, 7, 8, 9, len(good) - 1, *(rng.randrange(len(good)) for _ in range(40))}:
        path.write_bytes(good[:length])
        if length != len(good):
            refused(engine, name, COMMAND)
    for tail in (b"\0", b"{}", bytes(4096)):
        path.write_bytes(good + tail)
        refused(engine, name, COMMAND)
    path.write_bytes(good)
    load_engine(engine, 0)


def test_flips_in_a_file_of_another_rank_are_found_by_verify(engine: Path) -> None:
    data = bytearray((engine / "rank1.weights").read_bytes())
    data[-5000] ^= 1
    (engine / "rank1.weights").write_bytes(data)
    data = bytearray((engine / "rank0.engine").read_bytes())
    data[300] ^= 1
    (engine / "rank0.engine").write_bytes(data)
    with pytest.raises(EngineError) as caught:
        verify_artifact(engine)
    assert "rank1.weights: damaged" in str(caught.value) and "rank0.engine: damaged" in str(caught.value)
    refused(engine, "damaged", "`rm ", rank=1)


def test_wrong_arch_ranks_and_rank(engine: Path) -> None:
    refused(
        engine,
        "built for cpu, this device is sm_90a",
        f"{COMMAND}{engine} --tp 2 --arch sm_90a",
        arch="sm_90a",
    )
    refused(engine, "built for 2 ranks, started with 8", f"{COMMAND}{engine} --tp 8 --arch cpu", tp=8)
    for rank in (2, -1):
        refused(engine, f"no rank {rank} in an engine of 2 ranks", rank=rank)


def test_missing_engine_says_whether_a_build_was_begun(tmp_path: Path) -> None:
    refused(tmp_path / "x", "no engine here", f"build one with `{COMMAND}{tmp_path / 'x'}`")
    (tmp_path / ".x.building").mkdir()
    refused(tmp_path / "x", "its build did not finish")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "cannot be read")


@pytest.mark.parametrize("verify", ["digest", "size"])
def test_mixed_missing_and_stray_files(engine: Path, built: Path, verify: str) -> None:
    def swapped(name: str, source: Path, *parts: str) -> None:
        good = (engine / name).read_bytes()
        (engine / name).write_bytes(source.read_bytes())
        refused(engine, name, *parts, COMMAND, verify=verify)
        (engine / name).write_bytes(good)

    swapped("rank0.weights", engine / "rank1.weights", "rank: expected '0', found '1'")
    swapped("rank0.engine", engine / "rank1.engine", "rank: expected '0', found '1'")
    swapped("rank0.weights", built / "other" / "rank0.weights", "fingerprint: expected 'fake-checkpoint'")
    swapped("rank0.engine", built / "other" / "rank0.engine", "fingerprint: expected 'fake-checkpoint'")
    swapped("rank0.engine", engine / "rank0.weights", "expected 12288 bytes")
    swapped("rank0.weights", built / "tp1" / "rank0.weights", "bytes")

    for name in ("rank1.weights", "rank1.engine", "rank0.weights", "chat_template.jinja"):
        (engine / name).rename(engine / "away")
        refused(engine, f"{name}: missing", COMMAND, verify=verify)
        (engine / "away").rename(engine / name)
    for name in ("rank2.weights", "rank7.engine"):
        (engine / name).write_bytes(b"")
        refused(engine, f"{name} do not belong to this engine", verify=verify)
        (engine / name).unlink()
    load_engine(engine, 0, verify=verify)  # type: ignore[arg-type]


def test_same_size_other_layout_is_found_without_the_digest(engine: Path) -> None:
    name = "rank0.weights"
    data = (engine / name).read_bytes()
    layout = decode_header(data).metadata["layout"].encode()
    resign(engine, name, data.replace(layout, layout[::-1]))
    refused(engine, "layout: expected", verify="size")
    specs = {f"{key}"[::-1]: weight.spec for key, weight in fakes.make_plan().weights.items()}
    header, container = encode_header(decode_header(data).metadata, specs)
    resign(engine, name, header + bytes(container.size - len(header)))
    refused(engine, "its tensors are not the plan's weights")


def test_layout_version_of_the_runtime(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packer = fakes.RowPacker()
    packer.layout_version = 9
    monkeypatch.setitem(packing._PACKERS, "fake_rows", packer)
    refused(engine, "fake_rows weights have layout version 3, this runtime reads 9", COMMAND)
    monkeypatch.delitem(packing._PACKERS, "fake_rows")
    refused(engine, "packer 'fake_rows', which this runtime lacks")


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (lambda m: m.update(schema_version=2), "schema version: expected 1, found 2"),
    "version type": (lambda m: m.update(schema_version=True), "schema version: expected 1, found True"),
    "no version": (lambda m: m.pop("schema_version"), "schema version: expected 1, found None"),
    "name": (lambda m: m.update(name="other"), "its own digest does not match"),
    "missing": (lambda m: m.pop("arch"), "fields missing or unknown: 'arch'"),
    "unknown": (lambda m: m.update(surprise=1), "fields missing or unknown: 'surprise'"),
    "type": (lambda m: m.update(tp="2"), "tp: expected int, found str"),
    "many ranks": (lambda m: m.update(tp=10**12), "tp: expected 1 to 1024"),
    "ranks": (lambda m: m.update(tp=3), "rank2.engine"),
    "weights": (lambda m: m.update(weights="maybe"), "weights: expected 'packed' or 'splat'"),
    "splat": (lambda m: m.update(weights="splat"), "rank0.weights"),
    "path": (
        lambda m: m["files"].update({"../../etc/passwd": m["files"]["rank0.engine"]}),
        "not a plain file name",
    ),
    "itself": (
        lambda m: m["files"].update({"engine.json": m["files"]["rank0.engine"]}),
        "not a plain file name",
    ),
    "digest": (lambda m: m["files"]["rank0.engine"].update(blake3="00"), "a size and a digest"),
    "size": (lambda m: m["files"]["rank0.engine"].update(bytes=-1), "a size and a digest"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_changed_manifest(engine: Path, case: str) -> None:
    change, expected = MANIFESTS[case]
    value = json.loads((engine / "engine.json").read_text())
    change(value)
    (engine / "engine.json").write_text(json.dumps(value, indent=1) + "\n")
    refused(engine, "engine.json", expected, f"rebuild with `{COMMAND}{engine}`")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b'{"a":1,"a":2}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b"{" + b" " * (17 << 20),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_manifest_that_is_none(engine: Path, text: bytes) -> None:
    (engine / "engine.json").write_bytes(text)
    refused(engine, "not a usable manifest")


def test_special_files(engine: Path) -> None:
    (engine / "rank0.weights").unlink()
    (engine / "rank0.weights").mkdir()
    refused(engine, "rank0.weights: missing")
    (engine / "rank0.weights").rmdir()
    (engine / "rank0.weights").symlink_to("/nonexistent")
    refused(engine, "rank0.weights: missing")
    (engine / "engine.json").unlink()
    (engine / "engine.json").mkdir()
    refused(engine, "engine.json: cannot be read")


def mutated(value: Any, rng: random.Random) -> Any:
    """`value` with one node, chosen at random, replaced by something that does not belong there."""
    junk = [None, True, -1, 1 << 70, 1.5, "", "cpu", [], [1], {}, {"a": 1}, [[None]], "\ud800", "x" * 100]
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return rng.choice(junk)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if rng.random() < 0.15 else value | {key: mutated(value[key], rng)}
    index = rng.randrange(len(value))
    return [*value[:index], mutated(value[index], rng), *value[index + 1 :]]


def test_malformed_plan_with_a_valid_digest(engine: Path) -> None:
    rng = random.Random(5)
    metadata = decode_header((engine / "rank0.engine").read_bytes()).metadata
    plan = json.loads(metadata["plan"])
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(400):
        value = mutated(plan, rng) if number else plan
        header, _ = encode_header(metadata | {"plan": json.dumps(value)}, {})
        resign(engine, "rank0.engine", header)
        try:
            load_engine(engine, 0)
            outcomes["loaded"] += 1
        except EngineError as error:
            outcomes["refused"] += 1
            assert COMMAND in str(error)
    assert outcomes["refused"] > 200 and outcomes["loaded"] > 1
    for text, expected in (
        ("{", "malformed"),
        ("[]", "malformed"),
        ('{"version": 2}', "expected version 1, found 2"),
    ):
        header, _ = encode_header(metadata | {"plan": text}, {})
        resign(engine, "rank0.engine", header)
        refused(engine, "rank0.engine: plan", expected)
    header, _ = encode_header({key: item for key, item in metadata.items() if key != "plan"}, {})
    resign(engine, "rank0.engine", header)
    refused(engine, "rank0.engine: plan: malformed")
    for key, other in {"tp": 3, "arch": "sm_90a", "activation_dtype": "bfloat16", "rank": 1}.items():
        header, _ = encode_header(metadata | {"plan": json.dumps(plan | {key: other})}, {})
        resign(engine, "rank0.engine", header)
        refused(engine, "rank0.engine: plan", key)


def test_header_is_stricter_than_safetensors() -> None:
    """Whatever the safetensors package refuses is refused; what is accepted it reads in the same way."""
    rng = random.Random(11)
    specs = {
        "a": TensorSpec((3, 5), "bfloat16"),
        "none": TensorSpec((0,), "int32"),
        "b": TensorSpec((4096,), "float32"),
    }
    encoded, container = encode_header({"format": "test"}, specs)
    body = bytes(container.size - len(encoded))
    table = json.loads(encoded[8:])
    accepted = 0
    for number in range(600):
        value = mutated(table, rng) if number else table
        if number % 3 == 2 and isinstance(value, dict):  # offsets that almost fit
            name = rng.choice(["a", "b", "none", "_pad.0"])
            start, end = table[name]["data_offsets"]
            offsets = [start + rng.choice([-1, 0, 1, 4096]), end + rng.choice([-1, 0, 1, 4096])]
            value = table | {name: table[name] | {"data_offsets": offsets}}
        text = json.dumps(value).encode().ljust(len(encoded) - 8)
        data = struct.pack("<Q", len(text)) + text + body
        try:
            theirs: dict[str, Any] | None = dict(deserialize(data))
        except SafetensorError:
            theirs = None
        try:
            ours = decode_header(data)
        except ValueError:
            continue
        accepted += 1
        assert theirs is not None, text
        assert set(ours.tensors) == {name for name in theirs if not name.startswith("_pad.")}
        for name, entry in ours.tensors.items():
            assert theirs[name]["shape"] == list(entry.spec.shape)
            assert len(theirs[name]["data"]) == entry.spec.nbytes
    assert accepted > 3


@pytest.mark.parametrize("length", [0, 1, 23, 100, 2**31, 2**63, 2**64 - 1, 2**64 - 8])
def test_header_length_is_bounded(length: int) -> None:
    with pytest.raises(ValueError, match="header"):
        decode_header(struct.pack("<Q", length) + b"{}" + b" " * 20)
    for size in range(8):
        with pytest.raises(ValueError, match="header of"):
            decode_header(b"\xff" * size)


@pytest.mark.parametrize("name", ["_pad.3", "__metadata__"])
def test_reserved_tensor_names(name: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        encode_header({}, {name: TensorSpec((1,), "uint8")})


def test_manifest_survives_a_round_trip() -> None:
    manifest = fakes.make_manifest(weights="splat").with_files(
        {f"rank{rank}.engine": FileRecord(1, "0" * 64) for rank in (1, 0)}
    )
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_runtime_needs_neither_torch_nor_builder(built: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["builder"] = None
from plugins.core import packing
packing._PACKERS["fake_rows"] = packing.Packer()
packing._PACKERS["fake_rows"].layout_version = 3
from engine_runtime.engine import load_engine
assert len(load_engine({str(built / "x")!r}, 0).weights) == 5
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
