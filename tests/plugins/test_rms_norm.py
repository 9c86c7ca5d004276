"""`rms_norm` against transformers and torch."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec

PLUGIN = get_plugin("rms_norm")
EPS = 1e-5


def run(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return PLUGIN.reference({"eps": eps}, None)(x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 1536), (16, 7168)])
def test_is_bit_equal_to_transformers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    oracle = DeepseekV3RMSNorm(shape[1], eps=EPS).to(dtype)
    oracle.weight.data = torch.randn(shape[1], generator=generator).to(dtype)
    with torch.no_grad():
        assert torch.equal(run(x, oracle.weight.data), oracle(x))


def test_float64_agrees_with_torch() -> None:
    x, weight = torch.randn(7, 96, dtype=torch.float64), torch.randn(96, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (96,), weight, EPS)
    torch.testing.assert_close(run(x, weight), expected, rtol=1e-14, atol=1e-14)


def test_eps_matters_for_small_rows() -> None:
    x, weight = torch.full((1, 32), 1e-3), torch.ones(32)
    torch.testing.assert_close(run(x, weight, 1e-6), torch.full((1, 32), 0.5**0.5))
    assert run(x, weight, 1e-5)[0, 0] < 0.31


def test_zero_row_gives_zero_and_nan_row_stays_alone() -> None:
    x = torch.randn(3, 32)
    x[0], x[1] = 0, float("nan")
    y = run(x, torch.ones(32))
    assert torch.equal(y[0], torch.zeros(32))
    assert torch.isnan(y[1]).all()
    assert torch.equal(y[2:], run(x[2:], torch.ones(32)))


def test_infer_and_cost() -> None:
    x = TensorSpec((4, 128), "bfloat16")
    inputs = [x, TensorSpec((128,), "bfloat16")]
    outputs = PLUGIN.infer({"eps": EPS}, inputs)
    assert outputs == [x]
    assert PLUGIN.cost({"eps": EPS}, inputs, outputs, 0) == (2 * 4 * 128 * 2 + 256, 4 * 4 * 128)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            TensorSpec((64,), "bfloat16"),
            r"rms_norm: weight: expected float32 or bfloat16 \[H\] with H=128, found",
        ),
        (
            TensorSpec((128,), "int32"),
            r"weight: expected float32 or bfloat16 \[H\] with H=128, found int32\[128\]",
        ),
        (TensorSpec((1, 128), "float32"), r"weight: .* found float32\[1,128\]"),
        (None, "weight: .* found nothing"),
    ],
)
def test_infer_refuses(weight: TensorSpec | None, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        PLUGIN.infer({"eps": EPS}, [TensorSpec((4, 128), "float32"), weight])
