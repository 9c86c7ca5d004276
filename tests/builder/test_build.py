"""`build.py` as its users meet it: one command from a checkpoint to an artifact, and what it refuses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder.checkpoint import Checkpoint
from builder.cli import main
from engine_runtime.engine import load_engine
from plugins.core.engine_file import read_manifest
from plugins.core.packing import get_packer
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft

SMALL = ("--arch", "cpu", "--max-context", "256", "--max-requests", "2", "--verify-buckets", "1,4,16")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint and drafter that shard over up to 4 ranks."""
    checkpoint, draft = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("draft")
    config = make_tiny_checkpoint(checkpoint, seed=1)
    make_tiny_draft(draft, config, seed=2, num_key_value_heads=4)
    return checkpoint, draft


def build(source: tuple[Path, Path], output: Path, *options: str) -> int:
    checkpoint, draft = source
    return main([str(checkpoint), "--draft", str(draft), "-o", str(output), *SMALL, *options])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packed_weights_unpack_to_the_checkpoint(source, tmp_path, tp) -> None:
    """Every tensor of the checkpoint comes back bit for bit from the ranks' packed weights."""
    assert build(source, tmp_path / "engine", "--tp", str(tp)) == 0
    engines = [load_engine(tmp_path / "engine", rank) for rank in range(tp)]
    checkpoints = {False: Checkpoint.open(source[0]), True: Checkpoint.open(source[1])}
    seen = set()
    for name, weight in engines[0].plan.weights.items():
        recipe = weight.recipe
        if recipe.packer == "mla_attention":
            continue  # a part of kv_b's rows each: covered in tests/plugins/test_mla.py
        parts = [get_packer(recipe.packer).unpack(recipe, engine.weights[name], tp) for engine in engines]
        for index, tensor in enumerate(recipe.sources):
            expected = checkpoints[tensor.startswith("draft:")].array(tensor.removeprefix("draft:"))
            pieces = [part[index] for part in parts]
            if pieces[0].shape == expected.shape:
                whole = pieces[0]
                assert all(np.array_equal(piece, whole) for piece in pieces)
            else:
                axis = next(a for a in range(expected.ndim) if pieces[0].shape[a] != expected.shape[a])
                whole = np.concatenate(pieces, axis=axis)
            assert whole.dtype == expected.dtype
            assert np.array_equal(whole, expected), tensor
            seen.add(tensor)
    packed = {tensor for tensor in checkpoints[False].names() if tensor.endswith(("_packed", "_scale"))}
    assert packed <= seen


def test_builds_are_reproducible_and_keep_packed_weights(source, tmp_path, capsys) -> None:
    assert build(source, tmp_path / "a") == 0
    assert build(source, tmp_path / "b") == 0
    first, second = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    assert first.files == second.files
    inode = (tmp_path / "a" / "rank0.weights").stat().st_ino
    capsys.readouterr()
    assert build(source, tmp_path / "a", "--max-context", "512") == 0
    assert "kept the packed weights of 1 rank(s)" in capsys.readouterr().err
    assert (tmp_path / "a" / "rank0.weights").stat().st_ino == inode
    changed = read_manifest(tmp_path / "a")
    assert changed.files["rank0.weights"] == first.files["rank0.weights"]
    assert changed.files["rank0.engine"] != first.files["rank0.engine"]


def test_describe_builds_nothing(source, tmp_path, capsys) -> None:
    checkpoint, draft = source
    assert main([str(checkpoint), "--draft", str(draft), "--describe", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "verify[16]" in text and "computed for SM120" in text


def test_inspect_and_verify(source, tmp_path, capsys) -> None:
    assert build(source, tmp_path / "engine") == 0
    assert main(["verify", str(tmp_path / "engine")]) == 0
    assert "every digest as built" in capsys.readouterr().out
    page = tmp_path / "engine.html"
    assert main(["inspect", str(tmp_path / "engine"), "--phase", "verify[4]", "--html", str(page)]) == 0
    assert "target.layers.1" in capsys.readouterr().out
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    data = bytearray((tmp_path / "engine" / "rank0.weights").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "engine" / "rank0.weights").write_bytes(data)
    assert main(["verify", str(tmp_path / "engine")]) == 1
    assert "rank0.weights" in capsys.readouterr().err


def test_synthetic_weights_need_the_configuration_alone(source, tmp_path) -> None:
    bare, bare_draft = tmp_path / "config", tmp_path / "draft"
    for directory, origin in ((bare, source[0]), (bare_draft, source[1])):
        directory.mkdir()
        shutil.copy(origin / "config.json", directory)
    assert build((bare, bare_draft), tmp_path / "engine", "--splat") == 0
    manifest = read_manifest(tmp_path / "engine")
    assert manifest.weights == "splat"
    assert set(manifest.files) == {"rank0.engine"}


def test_onnx_graphs_are_valid_and_complete(source, tmp_path) -> None:
    assert build(source, tmp_path / "engine", "--onnx", str(tmp_path / "onnx")) == 0
    names = {path.stem for path in (tmp_path / "onnx").iterdir()}
    assert {
        "prefill_32",
        "prefill_256",
        "root_2",
        "verify_1",
        "verify_16",
        "append_8",
        "draft_1",
        "draft_2",
    } <= names
    for path in (tmp_path / "onnx").iterdir():
        model = onnx.load(path)
        onnx.checker.check_model(model)
        assert {entry.domain: entry.version for entry in model.opset_import} == {"": 23, "k2": 1}
        assert not model.graph.initializer
        assert {node.domain for node in model.graph.node} <= {"", "k2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "sm_120a"], r"node \S+: no tactic of \w+ for sm_120a"),
        (["--tp", "3"], "cannot be split over 3 ranks|3"),
        (["--max-context", "999999999"], "--max-context 999999999: expected 1 to"),
        (["--kv-tokens", "100"], "--kv-tokens 100: expected at least --max-context"),
        (["--max-requests", "99"], "--max-requests 99: expected 1 to 16"),
    ],
)
def test_refusals_are_one_sentence_and_leave_nothing(source, tmp_path, capsys, options, message) -> None:
    assert build(source, tmp_path / "engine", *options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert re.search(message, error)
    assert not (tmp_path / "engine").exists()


def test_a_drafter_of_another_model_is_refused(source, tmp_path, capsys) -> None:
    other, draft = tmp_path / "other", tmp_path / "draft"
    config = make_tiny_checkpoint(other, seed=1, hidden_size=256)
    make_tiny_draft(draft, config, seed=2)
    assert build((source[0], draft), tmp_path / "engine") == 1
    assert "hidden" in capsys.readouterr().err


def test_a_missing_tokenizer_is_named(source, tmp_path, capsys) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(source[0], checkpoint)
    (checkpoint / "tiktoken.model").unlink()
    assert build((checkpoint, source[1]), tmp_path / "engine") == 1
    assert "tiktoken.model: missing" in capsys.readouterr().err


def test_the_router_bias_stays_float32(source, tmp_path) -> None:
    """bfloat16 would collapse the bias that selects experts."""
    assert build(source, tmp_path / "engine") == 0
    plan = load_engine(tmp_path / "engine", 0).plan
    assert plan.weights["target.layers.1.mlp.bias"].spec.dtype == "float32"
