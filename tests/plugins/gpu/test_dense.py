"""Dense matrices on the device against float64: the shapes of a K2.6 layer, and ragged ones."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.gpu.device import Operator
from tests.plugins.gpu.moe_data import relative_error

pytestmark = pytest.mark.gpu
LAYER = [(7168, 2112), (1536, 1536), (1024, 7168), (7168, 384), (7168, 512), (256, 7168), (7168, 20480)]
NANO = [(256, 704), (128, 768), (512, 256), (96, 40), (32, 4096)]
ROUNDING = 2.5e-3


def check(tokens: int, columns: int, rows: int, activation: str, out_dtype: str) -> None:
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight = (torch.randn(rows, columns, device="cuda") * columns**-0.5).bfloat16()
    operator = Operator("dense_gemm", {"activation": activation, "out_dtype": out_dtype}, [x, weight])
    (found,), (again,) = operator.run(), operator.run()
    assert torch.equal(found.view(torch.uint8), again.view(torch.uint8))
    reference = x.double() @ weight.double().t()
    if activation == "silu_mul":
        gate, up = reference.view(tokens, -1, 2, 16).unbind(2)
        reference = (torch.nn.functional.silu(gate) * up).reshape(tokens, -1)
    assert relative_error(found, reference) < (1e-5 if out_dtype == "float32" else ROUNDING)


@pytest.mark.parametrize("tokens", [1, 7, 8, 17, 32, 33, 64, 100, 128, 300])
@pytest.mark.parametrize(("columns", "rows"), LAYER + NANO)
def test_matrix(columns: int, rows: int, tokens: int) -> None:
    check(tokens, columns, rows, "none", "activation")


@pytest.mark.parametrize("tokens", [1, 32, 128, 300])
def test_float32_result(tokens: int) -> None:
    check(tokens, 7168, 20480, "none", "float32")


@pytest.mark.parametrize("tokens", [1, 5, 32, 128, 300])
def test_silu_mul(tokens: int) -> None:
    check(tokens, 7168, 512, "silu_mul", "activation")
    check(tokens, 256, 64, "silu_mul", "activation")
