"""The CPU executor on a hand-made plan: addresses, weights, poison, profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_runtime.executor.cpu import CpuExecutor
from plugins.core.plugin import PluginError
from plugins.core.spec import TensorSpec, bf16_to_f32
from plugins.core.splat import splat
from plugins.int4_marlin_gemm.pack import TILE_BYTES
from tests.runtime.plans import EPS, HIDDEN, ROWS, VOCAB, change_arg, small_plan, small_weights


def expected_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> torch.Tensor:
    """float64, from the definition of the operators."""
    table, norm, head = (torch.from_numpy(bf16_to_f32(weights[n])).double() for n in ("table", "norm", "head"))
    return torch.nn.functional.rms_norm(table[tokens], (HIDDEN,), norm, EPS) @ head.T


def test_results_land_at_the_addresses_of_the_plan() -> None:
    executor = CpuExecutor(small_plan(), small_weights())
    tokens = [3, 31, 0, 3]
    executor.write("tokens", tokens)
    executor.write("row_request", 0)
    executor.poison("verify[4]")
    assert np.isnan(executor.read("logits")).all()
    executor.run("verify[4]")
    expected = expected_logits(small_weights(), tokens)
    assert torch.allclose(torch.from_numpy(executor.read("logits")).double(), expected, rtol=1e-4, atol=1e-4)
    assert executor.read("sampled").tolist() == expected.argmax(1).tolist()
    # the smaller bucket overwrites the first rows of the same buffers only
    executor.write("tokens", [8, 9], slice(0, 2))
    before = executor.read("logits")[2:].copy()
    executor.run("verify[2]")
    assert torch.allclose(
        torch.from_numpy(executor.read("logits")[:2]).double(),
        expected_logits(small_weights(), [8, 9]),
        rtol=1e-4,
        atol=1e-4,
    )
    assert np.array_equal(executor.read("logits")[2:], before)


def test_in_place_operands_are_the_persistent_buffers() -> None:
    executor = CpuExecutor(small_plan(), small_weights())
    pool = np.arange(32, dtype=np.float32).reshape(1, 8, 4)
    executor.write("kv_pool", pool)
    executor.write("row_slot", [4, 5, 6, 7])
    executor.write("path_rows", [[0, 2], [-1, -1]])
    executor.write("num_emitted", [2, 0])
    executor.run("verify[4]")
    expected = pool.copy()
    expected[0, 5] = pool[0, 6]
    assert np.array_equal(executor.read("kv_pool"), expected)


def test_bfloat16_activations() -> None:
    plan = small_plan()
    spec = TensorSpec((ROWS, HIDDEN), "bfloat16")
    inner = [("embed", "outputs"), ("sum", "inputs"), ("sum", "outputs")]
    inner += [("norm", "inputs"), ("norm", "outputs"), ("head", "inputs")]
    for node, side in inner:
        plan = change_arg(plan, node, side, 0, spec=spec)
    phase = plan.phases["verify[4]"]
    steps = tuple(
        replace(s, attrs={**s.attrs, "out_dtype": "bfloat16"}) if s.node == "embed" else s for s in phase.steps
    )
    plan = replace(plan, phases={phase.key: replace(phase, steps=steps)}, activation_dtype="bfloat16")
    executor = CpuExecutor(plan, small_weights())
    executor.write("tokens", [1, 2, 3, 4])
    executor.poison("verify[4]")
    executor.run("verify[4]")
    expected = expected_logits(small_weights(), [1, 2, 3, 4])
    error = (torch.from_numpy(executor.read("logits")).double() - expected).abs().max()
    assert 0 < error < 0.02 * expected.abs().max()


def test_profile_names_every_step() -> None:
    executor = CpuExecutor(small_plan(), small_weights())
    executor.write("row_request", 0)
    times = executor.profile("verify[4]")
    assert [name for name, _, _ in times] == ["embed", "sum", "norm", "head", "gather", "draw", "compact"]
    assert all(seconds >= 0 for _, _, seconds in times)
    table = executor.collect_profile()
    executor.run("verify[4]")
    executor.run("verify[2]")
    assert set(table) == {plugin for _, plugin, _ in times}


def test_a_result_of_another_shape_is_refused() -> None:
    plan = change_arg(small_plan(), "head", "outputs", 0, spec=TensorSpec((1, VOCAB), "float32"))
    executor = CpuExecutor(plan, small_weights())
    with pytest.raises(PluginError, match=r"step head: dense_gemm gave shape \[4, 32\], the plan holds \[1, 32\]"):
        executor.run("verify[4]")


def test_what_does_not_fit_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match="plan for arch 'sm_120a'"):
        CpuExecutor(replace(small_plan(), arch="sm_120a"), small_weights())
    with pytest.raises(ValueError, match="plan for 2 ranks: the communicator has 1"):
        CpuExecutor(small_plan(2, 0), small_weights(2, 0))
    weights = small_weights()
    with pytest.raises(ValueError, match="weight head: not in the weights file"):
        CpuExecutor(small_plan(), {k: v for k, v in weights.items() if k != "head"})
    with pytest.raises(ValueError, match=r"weight head: expected bfloat16\[32,64\], found uint16\[31, 64\]"):
        CpuExecutor(small_plan(), {**weights, "head": weights["head"][:31]})


def test_synthetic_weights_are_reproducible_and_sane() -> None:
    matrix = TensorSpec((128, 256), "bfloat16")
    first = bf16_to_f32(splat("layers.0.a", matrix))
    assert np.array_equal(first, bf16_to_f32(splat("layers.0.a", matrix)))
    assert not np.array_equal(first, bf16_to_f32(splat("layers.0.b", matrix)))
    assert first.std() == pytest.approx(1 / 16, rel=0.05) and abs(first.mean()) < 1e-3
    vector = splat("norm", TensorSpec((512,), "float32"))
    assert 0.9 <= vector.min() < 0.95 and 1.05 < vector.max() <= 1.1
    tiles = splat("experts", TensorSpec((2, 4, 8, TILE_BYTES), "uint8"))
    scales = bf16_to_f32(np.ascontiguousarray(tiles[..., 512:]).view(np.uint16))
    expected = (3 / 256) ** 0.5 / 8
    assert (scales > 0.89 * expected).all() and (scales < 1.11 * expected).all()
    assert len(np.unique(tiles[..., :512])) == 256
    with pytest.raises(ValueError, match=r"weight table: no synthetic values for int32\[4\]"):
        splat("table", TensorSpec((4,), "int32"))
    executor = CpuExecutor(small_plan(), None)
    executor.write("row_request", 0)
    executor.run("verify[4]")
    logits = executor.read("logits")
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10
