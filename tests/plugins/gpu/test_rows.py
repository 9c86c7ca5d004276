"""The operators that work row by row, against float64."""

from __future__ import annotations

import pytest
import torch

from plugins.core.spec import TensorSpec
from plugins.core.splat import splat, splat_launch
from plugins.core.torch_dtypes import TORCH_DTYPES
from tests.plugins.gpu.device import Operator, kernel_of
from tests.plugins.gpu.references import bf16, check, ints

pytestmark = pytest.mark.gpu
WIDTHS = [7168, 256, 1536, 8]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5, 128, 1000])
def test_norms(rows: int, width: int) -> None:
    check("rms_norm", {"eps": 1e-5}, [bf16(rows, width), bf16(width)], 8e-3)  # rounded twice, and few values
    check("all_reduce", {"eps": 1e-5, "tp_world": 1}, [bf16(rows, width), bf16(rows, width), bf16(width)], 8e-3)


def test_a_nan_row_spoils_no_other() -> None:
    x = bf16(4, 7168)
    x[2, 100] = float("nan")
    (y,) = Operator("rms_norm", {"eps": 1e-5}, [x, bf16(7168)]).run()
    assert torch.isnan(y).any(1).tolist() == [False, False, True, False]


def test_after_a_sum_over_ranks() -> None:
    x, residual, weight = bf16(5, 7168), bf16(5, 7168), bf16(7168)
    alone = Operator("all_reduce", {"eps": 1e-5, "tp_world": 1}, [x, residual, weight]).run()
    operator = Operator("all_reduce", {"eps": 1e-5, "tp_world": 8}, [torch.full_like(x, 7), residual, weight])
    plain = Operator("all_reduce", {"eps": 1e-5, "tp_world": 8}, [torch.full_like(x, 7)])
    for one in (operator, plain):
        assert one.workspace is not None
        one.workspace.copy_(x.view(torch.uint8).view(-1))  # as the transport leaves it
        one.start()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(operator.outputs, alone, strict=True))
    assert torch.equal(plain.outputs[0], x)


@pytest.mark.parametrize("columns", [20480, 33])
def test_gathered_columns(columns: int) -> None:
    parts = torch.randn(8, 7, columns, device="cuda")
    operator = Operator("all_gather", {"tp_world": 8}, [torch.zeros_like(parts[0])])
    assert operator.workspace is not None
    operator.workspace.copy_(parts.view(torch.uint8).view(-1))
    operator.start()
    torch.cuda.synchronize()
    assert torch.equal(operator.outputs[0], torch.cat(list(parts), dim=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_embed(rank: int) -> None:
    table, tokens = bf16(500, 7168), ints([1, 499, 501, 999, 3, 1000])
    table[0] = float("nan")  # the row that stands in for ids of other ranks
    check("embed", {"tp_rank": rank, "out_dtype": "bfloat16"}, [tokens[rank:], table])


@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_gather_rows(count: int) -> None:
    sources = [bf16(40, 256) for _ in range(count)] + [None] * (8 - count)
    check("gather_rows", {}, [ints([5, -1, 39, 0, 5]), *sources])


def test_draft_tokens() -> None:
    check("draft_tokens", {"block_size": 8, "mask_token_id": 9}, [ints([2, -1, 0]), ints([70, 71, 72, 73])])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((3, 16, 4, 576), "uint8"),
        TensorSpec((1000, 33), "bfloat16"),
        TensorSpec((17, 5), "float32"),
        TensorSpec((7168,), "bfloat16"),
        TensorSpec((384,), "float32"),
    ],
)
def test_synthetic_weights_are_those_of_the_cpu(spec: TensorSpec) -> None:
    out = torch.full((spec.nbytes,), 7, dtype=torch.uint8, device="cuda")
    kernel_of(splat_launch("some.weight", spec)).start((out.data_ptr(),), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    expected = torch.from_numpy(splat("some.weight", spec)).view(TORCH_DTYPES[spec.dtype])
    assert torch.equal(out.cpu(), expected.contiguous().view(-1).view(torch.uint8))
