"""`all_reduce`, `all_gather`, `embed` and `gather_rows`: operators that move rows of ranks and buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec

REDUCE, GATHER = get_plugin("all_reduce"), get_plugin("all_gather")
EMBED, ROWS = get_plugin("embed"), get_plugin("gather_rows")
NAN = float("nan")


class Ranks:
    """What rank `rank` sees of operands that are all known."""

    def __init__(self, values: list[torch.Tensor], rank: int) -> None:
        self.values, self.rank, self.world = values, rank, len(values)

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        assert torch.equal(value, self.values[self.rank])
        return self.values


class Silent:
    """The transport of a single rank: nobody may use it."""

    rank, world = 0, 1

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("a single rank communicates")


def reduce_attrs(world: int) -> dict:
    return {"eps": 1e-5, "tp_world": world}


def embed_attrs(rank: int) -> dict:
    return {"tp_rank": rank, "out_dtype": "bfloat16"}


def test_all_reduce_is_the_same_bits_on_every_rank() -> None:
    parts = [torch.randn(4, 33) * 10.0**r for r in range(5)]
    results = [REDUCE.reference(reduce_attrs(5), Ranks(parts, r))(parts[r], None, None) for r in range(5)]
    in_rank_order = (((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4]
    assert all(torch.equal(result, in_rank_order) for result in results)
    exact = torch.stack(parts).double().sum(0)
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=1e-2)


def test_all_reduce_of_bfloat16_rounds_once() -> None:
    parts = [torch.tensor([[1.0]]), torch.tensor([[2.0**-9]]), torch.tensor([[2.0**-9]])]
    parts = [part.bfloat16() for part in parts]  # rounding after every addition would stay at 1
    result = REDUCE.reference(reduce_attrs(3), Ranks(parts, 0))(parts[0], None, None)
    assert result.dtype == torch.bfloat16 and result.item() == 1.0
    parts += [torch.tensor([[2.0**-8]]).bfloat16()]
    assert REDUCE.reference(reduce_attrs(4), Ranks(parts, 2))(parts[2], None, None).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fused_all_reduce_equals_its_parts(dtype: torch.dtype) -> None:
    parts = [torch.randn(3, 64).to(dtype) for _ in range(2)]
    residual, weight = torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype)
    hidden, normed = REDUCE.reference(reduce_attrs(2), Ranks(parts, 1))(parts[1], residual, weight)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(hidden, (residual.to(wide) + (parts[0].to(wide) + parts[1].to(wide))).to(dtype))
    assert torch.equal(normed, get_plugin("rms_norm").reference({"eps": 1e-5}, None)(hidden, weight))


def test_one_rank_does_not_communicate() -> None:
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)
    run = REDUCE.reference(reduce_attrs(1), Silent())
    assert torch.equal(run(x, None, None), x)
    assert torch.equal(run(x, residual, weight)[0], residual + x)
    assert torch.equal(GATHER.reference({"tp_world": 1}, Silent())(x), x)


def test_all_gather_puts_rank_blocks_side_by_side() -> None:
    parts = [torch.full((3, 2), float(r)) for r in range(4)]
    y = GATHER.reference({"tp_world": 4}, Ranks(parts, 2))(parts[2])
    assert torch.equal(y, torch.tensor([0.0, 0, 1, 1, 2, 2, 3, 3]).expand(3, 8))


@settings(max_examples=40, deadline=None)
@given(
    world=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 4),
    tokens=st.lists(st.integers(0, 7), min_size=1, max_size=9),
)
def test_embedding_is_the_sum_over_ranks(world: int, rows: int, tokens: list[int]) -> None:
    vocabulary = world * rows
    table = torch.randn(vocabulary, 6)
    ids = torch.tensor(tokens, dtype=torch.int32) % vocabulary
    parts = [EMBED.reference(embed_attrs(r), None)(ids, table[r * rows : (r + 1) * rows]) for r in range(world)]
    assert torch.equal(torch.stack(parts).sum(0), torch.nn.functional.embedding(ids, table))


def test_embedding_of_foreign_ids_is_zero_even_beside_nan() -> None:
    table = torch.full((4, 3), NAN)
    table[2] = 1
    ids = torch.tensor([-1, 0, 3, 8, 100, 6], dtype=torch.int32)  # rank 1 holds 4 .. 7
    y = EMBED.reference(embed_attrs(1), None)(ids, table)
    assert torch.equal(y[:5], torch.zeros(5, 3))
    assert torch.equal(y[5], torch.ones(3))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_gather_rows(count: int) -> None:
    xs = [torch.randn(5, 4) for _ in range(count)]
    for x in xs:
        x[0] = NAN
    rows = torch.tensor([3, -1, 1, 1, -1, 4], dtype=torch.int32)
    absent = [None] * (8 - count)
    y = ROWS.reference({}, None)(rows, *xs, *absent)
    for a, row in enumerate(rows.tolist()):
        expected = torch.zeros(4 * count) if row < 0 else torch.cat([x[row] for x in xs])
        assert torch.equal(y[a], expected)


def test_infer() -> None:
    x, vector = TensorSpec((4, 16), "bfloat16"), TensorSpec((16,), "bfloat16")
    tokens = TensorSpec((4,), "int32")
    assert REDUCE.infer(reduce_attrs(8), [x]) == [x]
    assert REDUCE.infer(reduce_attrs(8), [x, None, None]) == [x]
    assert REDUCE.infer(reduce_attrs(8), [x, x, vector]) == [x, x]
    assert GATHER.infer({"tp_world": 8}, [x]) == [TensorSpec((4, 128), "bfloat16")]
    assert EMBED.infer(embed_attrs(3), [tokens, TensorSpec((99, 16), "bfloat16")]) == [x]
    in_float32 = {**embed_attrs(3), "out_dtype": "float32"}
    assert EMBED.infer(in_float32, [tokens, TensorSpec((99, 16), "bfloat16")]) == [TensorSpec((4, 16), "float32")]
    rows = TensorSpec((3,), "int32")
    assert ROWS.infer({}, [rows, x, x, None]) == [TensorSpec((3, 32), "bfloat16")]


def test_cost_counts_what_is_read() -> None:
    x = TensorSpec((4, 16), "bfloat16")
    table = TensorSpec((1000, 16), "bfloat16")
    assert EMBED.cost(embed_attrs(0), [TensorSpec((4,), "int32"), table], [x], 0)[0] == 16 + 2 * x.nbytes
    out = TensorSpec((2, 16), "bfloat16")
    assert ROWS.cost({}, [TensorSpec((2,), "int32"), x], [out], 0)[0] == 8 + 2 * out.nbytes
    assert REDUCE.cost(reduce_attrs(4), [x], [x], 0) == (2 * x.nbytes, 3 * x.numel)


@pytest.mark.parametrize(
    ("plugin", "attrs", "inputs", "message"),
    [
        ("all_reduce", reduce_attrs(2), [(4, 8), (4, 8), None], "all_reduce: norm_weight: .* found nothing"),
        ("all_reduce", reduce_attrs(2), [(4, 8), None, (8,)], "norm_weight: expected no operand .*residual"),
        (
            "all_reduce",
            reduce_attrs(2),
            [(4, 8), (3, 8), (8,)],
            r"residual: expected float32 \[T, H\] with T=4, H=8",
        ),
        ("all_reduce", reduce_attrs(0), [(4, 8)], "tp_world: expected 1 or more ranks, found 0"),
        ("all_gather", {"tp_world": 2}, [(4,)], r"all_gather: x: .*\[T, N\], found float32\[4\]"),
        ("gather_rows", {}, [(3,), (4, 8)], r"rows: expected int32 \[A\], found float32\[3\]"),
        ("embed", embed_attrs(0), [(3,), (4, 8)], r"tokens: expected int32 \[T\]"),
        ("all_gather", {"tp_world": 2}, [(4, 8), (4, 8)], "all_gather: expected at most 1 operands, found 2"),
    ],
)
def test_infer_refuses(plugin: str, attrs: dict, inputs: list, message: str) -> None:
    specs = [None if shape is None else TensorSpec(shape, "float32") for shape in inputs]
    with pytest.raises(PluginError, match=message):
        get_plugin(plugin).infer(attrs, specs)


def test_gather_rows_refuses_gaps_and_other_widths() -> None:
    rows, x = TensorSpec((3,), "int32"), TensorSpec((4, 8), "float32")
    with pytest.raises(PluginError, match=r"x2: expected no operand \(x1 is absent\)"):
        ROWS.infer({}, [rows, x, None, x])
    with pytest.raises(PluginError, match=r"x1: expected float32 \[T, H\] with T=4, H=8, found float32\[4,9\]"):
        ROWS.infer({}, [rows, x, TensorSpec((4, 9), "float32")])
