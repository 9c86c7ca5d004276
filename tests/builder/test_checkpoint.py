"""Opening checkpoints: what is read, and each way in which a download can be broken, with its message."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from builder.checkpoint import DTYPES, Checkpoint
from builder.config import ModelConfig, load_draft_config, load_model_config
from builder.errors import CheckpointError
from builder.preflight import expected_draft_tensors, expected_tensors, preflight, preflight_draft
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft
from tests.full_size import k26_config, k26_draft_config

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny_checkpoint(directory, n_routed_experts=4, num_experts_per_tok=2, num_hidden_layers=2)
    return directory


@pytest.fixture
def copy(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "copy")


def check(directory: Path) -> Any:
    return preflight(Checkpoint.open(directory), load_model_config(directory))


def refused(directory: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        check(directory)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], reindex: bool = True) -> None:
    """Rewrite a shard after `change`, and its entries in the index."""
    tensors = load_file(path)
    before = set(tensors)
    change(tensors)
    save_file(tensors, path)
    index_path = path.parent / INDEX
    if reindex and index_path.exists():
        index = json.loads(index_path.read_text())
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k not in before}
        index["weight_map"] |= dict.fromkeys(tensors, path.name)
        index_path.write_text(json.dumps(index))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2", "deepseek_v3"])
@pytest.mark.parametrize("shape_dtype", [torch.int32, torch.int64])
def test_every_family(tmp_path: Path, family: str, shape_dtype: torch.dtype) -> None:
    config = make_tiny_checkpoint(
        tmp_path, family=family, shape_dtype=shape_dtype, n_routed_experts=4, num_hidden_layers=2
    )
    report = check(tmp_path)
    assert set(report.consumed) == set(expected_tensors(config))
    ignored = [name for group in report.ignored for name in group.names]
    assert len(ignored) == (2 if family == "kimi_k25" else 0)
    assert report.router_dtype == "bfloat16"


def test_arrays_are_those_of_safetensors(pristine: Path) -> None:
    checkpoint = Checkpoint.open(pristine)
    seen = set()
    for path in shards(pristine):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                info, array = checkpoint.info(name), checkpoint.array(name)
                bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
                assert f"torch.{info.dtype}" == str(tensor.dtype)
                assert (info.file, info.shape) == (path.name, tuple(tensor.shape))
                np.testing.assert_array_equal(array, bits.numpy())
                with open(path, "rb") as raw:
                    raw.seek(info.start)
                    assert raw.read(info.nbytes) == array.tobytes()
                seen.add(name)
    assert seen == set(checkpoint.names())


def test_arrays_are_read_only_views(pristine: Path) -> None:
    checkpoint = Checkpoint.open(pristine)
    array = checkpoint.array("language_model.lm_head.weight")
    assert not array.flags.owndata
    assert not array.flags.writeable
    before = array.tobytes()
    checkpoint.drop_pages("language_model.lm_head.weight")
    assert array.tobytes() == before
    with pytest.raises(CheckpointError, match="there is no tensor nothing"):
        checkpoint.array("nothing")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_dropped_pages_leave_memory(tmp_path: Path) -> None:
    size = 64 << 20
    save_file({"big": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    before = _resident()
    assert int(checkpoint.array("big").sum()) == 0
    assert _resident() - before > size // 2
    checkpoint.drop_pages("big")
    assert _resident() - before < size // 8


def test_single_file_without_index(pristine: Path, copy: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in shards(copy):
        tensors |= load_file(path)
        path.unlink()
    (copy / INDEX).unlink()
    save_file(tensors, copy / "model.safetensors")
    assert set(check(copy).consumed) == set(check(pristine).consumed)


def test_fingerprint(pristine: Path, copy: Path) -> None:
    original = Checkpoint.open(pristine).fingerprint()
    assert len(original) == 64
    assert Checkpoint.open(copy).fingerprint() == original
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config + " ")
    assert Checkpoint.open(copy).fingerprint() != original
    (copy / "config.json").write_text(config)
    assert Checkpoint.open(copy).fingerprint() == original
    retrained = bytearray(shards(copy)[0].read_bytes())
    retrained[-1] ^= 1
    shards(copy)[0].write_bytes(retrained)
    assert Checkpoint.open(copy).fingerprint() != original
    edit(shards(copy)[0], lambda tensors: tensors.update({"z": torch.zeros(1)}))
    assert Checkpoint.open(copy).fingerprint() != original


def test_fingerprint_of_a_large_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit a sample is hashed: other bytes everywhere are noticed, and the last block is in it."""
    monkeypatch.setattr("builder.checkpoint.SAMPLE_BYTES", 4096)
    monkeypatch.setattr("builder.checkpoint.SAMPLE_BLOCKS", 16)
    found = set()
    for value, last in ((0, 0), (1, 0), (0, 1)):
        data = torch.full((1 << 16,), value, dtype=torch.uint8)
        data[-1] = last
        save_file({"t": data}, tmp_path / "model.safetensors")
        found.add(Checkpoint.open(tmp_path).fingerprint())
    assert len(found) == 3


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors.index.json nor model.safe"):
        Checkpoint.open(tmp_path)


def test_all_missing_shards_are_named(copy: Path) -> None:
    for path in shards(copy)[:2]:
        path.unlink()
    problems = refused(copy)
    assert [problem.rpartition("/")[2] for problem in problems] == [
        f"model-0000{number}-of-000003.safetensors is missing: download it" for number in (1, 2)
    ]


def test_truncated_shard(copy: Path) -> None:
    path = shards(copy)[1]
    size = path.stat().st_size
    os.truncate(path, size - 100)
    assert refused(copy) == (f"{path} is cut short: expected {size} bytes, found {size - 100}; download it again",)
    os.truncate(path, 50)
    assert "ends inside its header: expected at least" in refused(copy)[0]
    os.truncate(path, 4)
    assert "is not a safetensors file" in refused(copy)[0]
    os.truncate(path, 0)
    assert refused(copy) == (f"{path} is empty: download it again",)


def test_bytes_after_the_end(copy: Path) -> None:
    with open(shards(copy)[0], "ab") as file:
        file.write(b"x")
    assert "has bytes after its last tensor" in refused(copy)[0]


def test_git_lfs_pointer(copy: Path) -> None:
    path = shards(copy)[0]
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9812345678\n")
    assert f"{path} is a Git-LFS pointer of 135 bytes" in refused(copy)[0]
    assert "git lfs pull" in refused(copy)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<!DOCTYPE html><html>Not found</html>", "is not a safetensors file: its header length reads"),
        (
            struct.pack("<Q", 100_000_001) + b"{" * 64,
            "header length reads 100000001, expected 2 to 100000000",
        ),
        (struct.pack("<Q", 4) + b"null", "the header is not a JSON object"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "the header is not a JSON object"),
        (struct.pack("<Q", 60_000) + b"[" * 60_000, "the header is not a JSON object"),
    ],
)
def test_garbage(copy: Path, data: bytes, message: str) -> None:
    shards(copy)[0].write_bytes(data)
    assert message in refused(copy)[0]


NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F4"}, "is described as"),
        ({"shape": "x"}, "is described as"),
        ({"shape": [-128]}, "is described as"),
        ({"shape": [64]}, "expected 128 bytes for bfloat16 [64]"),
        ({"data_offsets": [0]}, "is described as"),
        ({"data_offsets": [0, 256]}, "overlaps the tensor before it"),
        ({"data_offsets": [10**9, 10**9 + 256]}, "leaves unused bytes before it"),
    ],
)
def test_bad_header_entries(copy: Path, change: dict[str, Any], message: str) -> None:
    edit_header(shards(copy)[-1], lambda header: header[NORM].update(change))
    problem = refused(copy)[0]
    assert message in problem
    assert "model-00003-of-000003.safetensors" in problem


def test_index_and_files_disagree(copy: Path) -> None:
    first, last = shards(copy)[0], shards(copy)[-1]
    edit(last, lambda tensors: tensors.pop(NORM), reindex=False)
    assert refused(copy)[0].endswith(f"tensor {NORM} should be in {last.name}, but is not: download that file again")
    edit(first, lambda tensors: tensors.update({NORM: torch.ones(128).bfloat16()}), reindex=False)
    assert refused(copy)[0].endswith(f"tensor {NORM} should be in {last.name}, but is in {first.name}")
    edit(first, lambda tensors: tensors.update(surplus=torch.ones(1)), reindex=False)
    assert f"does not list surplus, found in {first.name}" in refused(copy)[1]


def test_tensor_in_two_files(copy: Path) -> None:
    edit(shards(copy)[0], lambda tensors: tensors.update({NORM: torch.ones(128).bfloat16()}), reindex=False)
    assert f"tensor {NORM} is in both {shards(copy)[0].name} and {shards(copy)[-1].name}" in refused(copy)[0]


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", "", "a\0.safetensors", 3])
def test_index_cannot_leave_the_directory(copy: Path, file: Any) -> None:
    (copy / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
    assert "expected a plain file name" in refused(copy)[0]


def test_index_without_a_map(copy: Path) -> None:
    (copy / INDEX).write_text("{}")
    assert "weight_map is missing or empty" in refused(copy)[0]


def test_missing_and_unknown_tensors(copy: Path) -> None:
    edit(shards(copy)[-1], lambda tensors: tensors.update({"stray.weight": tensors.pop(NORM)}))
    missing, unknown = refused(copy)
    assert f"tensor {NORM} is missing" in missing
    assert "tensor stray.weight (bfloat16 [128]) has no place in a text model of 2 layers" in unknown


def test_many_problems_are_counted(copy: Path) -> None:
    edit(shards(copy)[1], lambda tensors: [tensors.pop(name) for name in list(tensors)[:-1]])
    with pytest.raises(CheckpointError) as caught:
        check(copy)
    assert len(caught.value.problems) > 20
    lines = str(caught.value).splitlines()
    assert len(lines) == 9
    assert lines[-1] == f"... and {len(caught.value.problems) - 8} more problems"


@pytest.mark.parametrize(
    ("name", "tensor", "found", "expected"),
    [
        ("mlp.experts.3.up_proj.weight_packed", torch.zeros(128, 8).int(), "int32 [128, 8]", "[128, 16]"),
        ("mlp.experts.3.up_proj.weight_packed", torch.zeros(128, 16), "float32 [128, 16]", "int32"),
        ("mlp.experts.3.up_proj.weight_scale", torch.zeros(128, 4), "float32 [128, 4]", "bfloat16"),
        ("mlp.experts.3.up_proj.weight_shape", torch.zeros(2), "float32 [2]", "int32 or int64 [2]"),
        ("mlp.gate.e_score_correction_bias", torch.zeros(4).bfloat16(), "bfloat16 [4]", "float32 [4]"),
        ("mlp.gate.weight", torch.zeros(4, 128).half(), "float16 [4, 128]", "bfloat16 or float32 [4, 128]"),
        ("self_attn.o_proj.weight", torch.zeros(128, 127).bfloat16(), "bfloat16 [128, 127]", "[128, 128]"),
        ("input_layernorm.weight", torch.zeros(128), "float32 [128]", "bfloat16 [128]"),
    ],
)
def test_wrong_dtype_or_shape(copy: Path, name: str, tensor: torch.Tensor, found: str, expected: str) -> None:
    full = f"language_model.model.layers.1.{name}"
    edit(shards(copy)[1], lambda tensors: tensors.update({full: tensor}))
    (problem,) = refused(copy)
    assert f"tensor {full} is {found}: expected " in problem
    assert expected in problem


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wrong_weight_shape_value(copy: Path, dtype: torch.dtype) -> None:
    name = f"language_model.{EXPERT}.weight_shape"
    edit(shards(copy)[1], lambda tensors: tensors.update({name: torch.tensor([128, 127], dtype=dtype)}))
    (problem,) = refused(copy)
    assert f"tensor {name} holds [128, 127]: expected [128, 128]" in problem


def test_router_in_float32(copy: Path) -> None:
    name = "language_model.model.layers.1.mlp.gate.weight"
    edit(shards(copy)[1], lambda tensors: tensors.update({name: tensors[name].float()}))
    assert check(copy).router_dtype == "float32"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("self_attn.o_proj.weight_scale_inv", torch.ones(1, 1), "belongs to an FP8 checkpoint"),
        ("self_attn.o_proj.weight", torch.zeros(128, 128).to(torch.float8_e4m3fn), "to an FP8 checkpoint"),
        ("mlp.experts.3.up_proj.weight", torch.zeros(128, 128).bfloat16(), "is an expert in bfloat16"),
        ("mlp.experts.gate_up_proj", torch.zeros(4, 256, 128).bfloat16(), "is an expert in bfloat16"),
        ("self_attn.o_proj.weight_packed", torch.zeros(128, 16).int(), "only in routed experts"),
    ],
)
def test_other_weight_formats(copy: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    edit(shards(copy)[1], lambda t: t.update({f"language_model.model.layers.1.{name}": tensor}))
    (problem,) = refused(copy)
    assert message in problem


def test_ignored_tensors_are_reported(copy: Path) -> None:
    at = "language_model.model.layers."
    extra = {
        f"{at}0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        f"{at}2.eh_proj.weight": torch.ones(4, 4).bfloat16(),
    }
    edit(shards(copy)[1], lambda tensors: tensors.update(extra))
    assert "layers.2.eh_proj.weight" in refused(copy)[0]  # config.json knows no such layer
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (copy / "config.json").write_text(json.dumps(config))
    groups = {group.reason.split()[0]: (len(group.names), group.nbytes) for group in check(copy).ignored}
    assert groups == {"rotary": (1, 32), "multi-token": (1, 32), "vision": (2, 128)}


def test_file_that_changes_after_opening(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    os.truncate(shards(copy)[-1], 1000)
    with pytest.raises(CheckpointError, match="has 1000 bytes, but had .* when the build began"):
        checkpoint.array(NORM)


def test_drafter(tmp_path: Path, pristine: Path) -> None:
    make_tiny_draft(tmp_path, load_model_config(pristine))
    draft = load_draft_config(tmp_path)
    report = preflight_draft(Checkpoint.open(tmp_path), draft)
    assert len(report.consumed) == 3 + 11 * draft.num_hidden_layers
    path = tmp_path / "model.safetensors"
    edit(path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="lm_head.weight .* has no place in a DFlash drafter"):
        preflight_draft(Checkpoint.open(tmp_path), draft)


def test_expected_tensors_of_the_real_models() -> None:
    tensors = expected_tensors(k26_config())
    assert len(tensors) == 208_215  # 208,550 published, less 335 of the vision tower and projector
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert abs(total - 594.2e9) < 0.1e9
    draft = expected_draft_tensors(k26_draft_config())
    assert len(draft) == 69
    assert sum(prod(tensor.shape) for tensor in draft.values()) == 3_479_277_056


def write_hollow_checkpoint(directory: Path, config: ModelConfig) -> None:
    """All files of the full-size checkpoint, with true headers and holes for weights."""
    safetensors_name = {name: key for key, (name, _) in DTYPES.items()}
    expected = expected_tensors(config)
    weight_map = {}
    names = sorted(expected, key=lambda name: (name.endswith("weight_shape"), name))
    for shard in range(64):
        file = f"model-{shard + 1:05}-of-000064.safetensors"
        header, end, shapes = {}, 0, b""
        for name in sorted(names[shard::64], key=lambda name: not name.endswith("weight_shape")):
            tensor = expected[name]
            if name.endswith("weight_shape"):
                rows, words = expected[name.replace("weight_shape", "weight_packed")].shape
                shapes += struct.pack("<2i", rows, words * 8)
            header[name] = {"dtype": safetensors_name[tensor.dtypes[0]], "shape": tensor.shape}
            header[name]["data_offsets"] = (end, end + tensor.nbytes)
            end += tensor.nbytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(directory / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text + shapes)
            stream.truncate(8 + len(text) + end)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_full_size_in_seconds(tmp_path: Path) -> None:
    config = k26_config()
    write_hollow_checkpoint(tmp_path, config)
    started = os.times().user
    report = preflight(Checkpoint.open(tmp_path), config)
    assert os.times().user - started < 15  # 2 s on an idle core
    assert len(report.consumed) == 208_215
