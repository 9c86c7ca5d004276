"""`dense_gemm` and the packer of dense weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.core.packing import WeightRecipe, get_packer, split
from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import DTYPES, TensorSpec
from plugins.dense_gemm import pack as pack_module

PLUGIN = get_plugin("dense_gemm")
PACKER = get_packer("dense_gemm")
PLAIN = {"activation": "none", "out_dtype": "activation"}
SILU = {"activation": "silu_mul", "out_dtype": "activation"}


def random_bits(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> np.ndarray:
    return (
        np.random.default_rng(seed)
        .integers(0, 255, (*shape, DTYPES[dtype][0]), dtype=np.uint8)
        .view(DTYPES[dtype][1])[..., 0]
    )


def bf16_matrix(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def packed_bytes(recipe: WeightRecipe, read: Callable[[str], np.ndarray], tp: int, rank: int) -> np.ndarray:
    pieces = list(PACKER.pack(recipe, read, tp, rank))
    assert all(piece.flags.c_contiguous for piece in pieces)
    spec = recipe.spec(tp)
    array = np.concatenate([piece.reshape(-1) for piece in pieces]).reshape(spec.shape)
    assert array.nbytes == spec.nbytes
    return array


def test_reference_against_float64() -> None:
    x, weight = torch.randn(5, 48, dtype=torch.float64), torch.randn(9, 48, dtype=torch.float64)
    expected = torch.einsum("tk,nk->tn", x, weight)
    torch.testing.assert_close(PLUGIN.reference(PLAIN, None)(x, weight), expected)


def test_float32_output_of_bfloat16_operands_is_not_rounded_in_between() -> None:
    x, weight = bf16_matrix((3, 256), 0), bf16_matrix((40, 256), 1)
    y = PLUGIN.reference({**PLAIN, "out_dtype": "float32"}, None)(x, weight)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    assert not torch.equal(y, y.bfloat16().float())
    assert PLUGIN.reference(PLAIN, None)(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_silu_mul_from_checkpoint_matrices(tp: int) -> None:
    inter, hidden = 128, 48
    gate, up = bf16_matrix((inter, hidden), 0), bf16_matrix((inter, hidden), 1)
    x = torch.randn(3, hidden, dtype=torch.float64)
    sources = {"gate": gate.view(torch.uint16).numpy(), "up": up.view(torch.uint16).numpy()}
    recipe = WeightRecipe("dense_gemm", ("gate", "up"), ((inter, hidden),) * 2, {"shard": "rows", "interleave": 16})
    parts = []
    for rank in range(tp):
        packed = packed_bytes(recipe, sources.__getitem__, tp, rank)
        for block in range(inter // tp // 16):
            first = rank * inter // tp + 16 * block
            assert np.array_equal(packed[32 * block : 32 * block + 16], sources["gate"][first : first + 16])
            assert np.array_equal(packed[32 * block + 16 : 32 * block + 32], sources["up"][first : first + 16])
        weight = PLUGIN.prepare(SILU, "weight", torch.from_numpy(packed).view(torch.bfloat16), torch.float64)
        parts.append(PLUGIN.reference(SILU, None)(x, weight))
    expected = torch.nn.functional.silu(x @ gate.double().t()) * (x @ up.double().t())
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_prepare_keeps_bfloat16_and_widens_exactly() -> None:
    weight = bf16_matrix((32, 16), 2)
    assert PLUGIN.prepare(PLAIN, "weight", weight, torch.bfloat16) is weight
    assert torch.equal(PLUGIN.prepare(PLAIN, "weight", weight, torch.float32), weight.float())


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    shard=st.sampled_from(["none", "rows", "cols"]),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    columns=st.integers(1, 5),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    data=st.data(),
)
def test_round_trip(tp: int, shard: str, rows: list[int], columns: int, dtype: str, data: st.DataObject) -> None:
    shapes = tuple((8 * n, 8 * columns) for n in rows)
    names = tuple(f"w{i}" for i in range(len(shapes)))
    arrays = {name: random_bits(shape, i, dtype) for i, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    recipe = WeightRecipe("dense_gemm", names, shapes, {"shard": shard, "dtype": dtype})
    rank = data.draw(st.integers(0, tp - 1))
    packed = packed_bytes(recipe, arrays.__getitem__, tp, rank)
    axis = {"none": None, "rows": 0, "cols": 1}[shard]
    wanted = [arrays[n] if axis is None else split(arrays[n], axis, tp, rank) for n in names]
    assert packed.tobytes() == np.concatenate(wanted).tobytes()  # [q_r; k_r; v_r]
    unpacked = PACKER.unpack(recipe, packed.view(np.uint8), tp)
    for part, array in zip(unpacked, wanted, strict=True):
        assert part.shape == array.shape and part.tobytes() == array.tobytes()  # bits: some are NaN


@settings(max_examples=30, deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), blocks=st.integers(1, 3), columns=st.integers(1, 9), data=st.data())
def test_round_trip_interleaved(tp: int, blocks: int, columns: int, data: st.DataObject) -> None:
    shape = (16 * tp * blocks, columns)
    arrays = {"gate": random_bits(shape, 1), "up": random_bits(shape, 2)}
    recipe = WeightRecipe("dense_gemm", ("gate", "up"), (shape, shape), {"shard": "rows", "interleave": 16})
    rank = data.draw(st.integers(0, tp - 1))
    packed = packed_bytes(recipe, arrays.__getitem__, tp, rank)
    assert packed.shape == (2 * shape[0] // tp, columns)
    unpacked = PACKER.unpack(recipe, packed, tp)
    for part, name in zip(unpacked, ("gate", "up"), strict=True):
        assert np.array_equal(part, split(arrays[name], 0, tp, rank))


@pytest.mark.parametrize("attrs", [{}, {"shard": "cols"}, {"shard": "rows", "interleave": 16}])
def test_large_matrices_come_in_pieces(monkeypatch: pytest.MonkeyPatch, attrs: dict) -> None:
    monkeypatch.setattr(pack_module, "CHUNK_BYTES", 4096)
    arrays = {"a": random_bits((96, 64), 1), "b": random_bits((96, 64), 2)}
    recipe = WeightRecipe("dense_gemm", ("a", "b"), ((96, 64),) * 2, attrs)
    pieces = list(PACKER.pack(recipe, arrays.__getitem__, 2, 1))
    assert len(pieces) > 2 and max(piece.nbytes for piece in pieces) <= 4096
    whole = packed_bytes(recipe, arrays.__getitem__, 2, 1)
    monkeypatch.undo()
    assert np.array_equal(whole, packed_bytes(recipe, arrays.__getitem__, 2, 1))


def test_vectors_are_concatenated() -> None:
    arrays = {"a": random_bits((5,), 1, "float32"), "b": random_bits((3,), 2, "float32")}
    recipe = WeightRecipe("dense_gemm", ("a", "b"), ((5,), (3,)), {"dtype": "float32"})
    assert recipe.spec(8) == TensorSpec((8,), "float32")
    packed = packed_bytes(recipe, arrays.__getitem__, 8, 3)
    assert packed.tobytes() == arrays["a"].tobytes() + arrays["b"].tobytes()
    assert [part.shape for part in PACKER.unpack(recipe, packed, 8)] == [(5,), (3,)]


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        (((6, 8),), {"shard": "rows"}, r"w0: expected a matrix whose rows divide by tp=4, found \[6, 8\]"),
        (((8, 6),), {"shard": "cols"}, r"w0: expected a matrix whose cols divide by tp=4"),
        (((8,),), {"shard": "rows"}, r"w0: expected a matrix"),
        (((8, 8), (8, 4)), {}, r"w1: expected rows like those of \[8, 8\], found \[8, 4\]"),
        (((8, 8),), {"shard": "heads"}, "shard: expected one of"),
        (((8, 8),), {"dtype": "float8"}, "dtype: expected one of"),
        (((32, 8), (32, 8)), {"shard": "rows", "interleave": 16}, r"rows / tp a multiple of 16 \(tp=4\)"),
        (((64, 8), (64, 8)), {"interleave": 8}, "interleave: expected 16, found 8"),
        ((), {}, "expected one for every source, at least one"),
    ],
)
def test_packer_refuses(shapes: tuple[tuple[int, ...], ...], attrs: dict, message: str) -> None:
    names = tuple(f"w{i}" for i in range(len(shapes)))
    with pytest.raises(PluginError, match=message):
        WeightRecipe("dense_gemm", names, shapes, attrs).spec(4)


def test_packer_refuses_a_source_of_another_dtype_or_shape() -> None:
    recipe = WeightRecipe("dense_gemm", ("w",), ((4, 8),))
    with pytest.raises(PluginError, match=r"w: expected bfloat16 \[4, 8\], found float32 \[4, 8\]"):
        list(PACKER.pack(recipe, lambda name: np.zeros((4, 8), np.float32), 1, 0))
    with pytest.raises(PluginError, match=r"w: expected bfloat16 \[4, 8\], found uint16 \[8, 4\]"):
        list(PACKER.pack(recipe, lambda name: np.zeros((8, 4), np.uint16), 1, 0))


def test_infer_and_cost() -> None:
    x, weight = TensorSpec((3, 64), "bfloat16"), TensorSpec((96, 64), "bfloat16")
    assert PLUGIN.infer(PLAIN, [x, weight]) == [TensorSpec((3, 96), "bfloat16")]
    assert PLUGIN.infer({**PLAIN, "out_dtype": "float32"}, [x, weight]) == [TensorSpec((3, 96), "float32")]
    outputs = PLUGIN.infer(SILU, [x, weight])
    assert outputs == [TensorSpec((3, 48), "bfloat16")]
    assert PLUGIN.cost(SILU, [x, weight], outputs, 0) == (2 * (3 * 64 + 96 * 64 + 3 * 48), 2 * 3 * 96 * 64)


@pytest.mark.parametrize(
    ("attrs", "weight", "message"),
    [
        (
            PLAIN,
            TensorSpec((96, 32), "bfloat16"),
            r"dense_gemm: weight: expected .*K=64, found bfloat16\[96,32\]",
        ),
        (SILU, TensorSpec((48, 64), "bfloat16"), "rows in multiples of 32 for silu_mul"),
        (
            {**PLAIN, "activation": "gelu"},
            TensorSpec((96, 64), "bfloat16"),
            "activation: expected one of .*'gelu'",
        ),
        (
            {**PLAIN, "out_dtype": "half"},
            TensorSpec((96, 64), "bfloat16"),
            "out_dtype: expected one of .*'half'",
        ),
    ],
)
def test_infer_refuses(attrs: dict, weight: TensorSpec, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        PLUGIN.infer(attrs, [TensorSpec((3, 64), "bfloat16"), weight])
