"""`int4_marlin_gemm`: layout, dequantisation against compressed-tensors, results against transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from plugins.core.packing import WeightRecipe, get_packer, split
from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec
from plugins.int4_marlin_gemm.reference import dequantise
from plugins.moe_route.reference import routes_by_expert

PLUGIN = get_plugin("int4_marlin_gemm")
PACKER = get_packer("int4_marlin_gemm")
GROUP = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
NAN = float("nan")


@dataclass
class Checkpoint:
    """Random experts in checkpoint form, and what compressed-tensors makes of them (bfloat16)."""

    arrays: dict[str, np.ndarray]
    gate_up: torch.Tensor  # [E, 2 I, H]
    down: torch.Tensor  # [E, H, I]

    def recipe(self, stage: str) -> WeightRecipe:
        names = ("gate", "up") if stage == "gate_up" else ("down",)
        patterns = tuple(f"{{}}.{name}.{part}" for name in names for part in ("weight_packed", "weight_scale"))
        shapes = tuple(self.arrays[pattern.replace("{}", "0")].shape for pattern in patterns)
        attrs = {"stage": stage}
        return WeightRecipe.repeated("int4_marlin_gemm", patterns, shapes, self.gate_up.shape[0], attrs)

    def packed(self, stage: str, tp: int, rank: int) -> np.ndarray:
        recipe = self.recipe(stage)
        pieces = list(PACKER.pack(recipe, self.arrays.__getitem__, tp, rank))
        return np.concatenate([piece.reshape(-1) for piece in pieces]).reshape(recipe.spec(tp).shape)

    def prepared(self, stage: str, tp: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        packed = torch.from_numpy(self.packed(stage, tp, rank))
        return PLUGIN.prepare({"stage": stage, "top_k": 2}, "weight", packed, dtype)


def checkpoint(experts: int, inter: int, hidden: int, seed: int = 0) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    arrays: dict[str, np.ndarray] = {}
    dense: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
    for expert in range(experts):
        for name, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
            q = torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator)
            scale = torch.rand(shape[0], shape[1] // 32, generator=generator).add(0.1).div(8).to(torch.bfloat16)
            words = pack_to_int32(q, 4)
            arrays[f"{expert}.{name}.weight_packed"] = words.numpy()
            arrays[f"{expert}.{name}.weight_scale"] = scale.view(torch.uint16).numpy()
            unpacked = unpack_from_int32(words, 4, torch.Size(shape))
            dense[name].append(dequantize(unpacked, scale, args=GROUP))
    gate_up = [torch.cat(pair) for pair in zip(dense["gate"], dense["up"], strict=True)]
    return Checkpoint(arrays, torch.stack(gate_up), torch.stack(dense["down"]))


def lists(chosen: list[list[int]], experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return routes_by_expert(torch.tensor(chosen, dtype=torch.int32), experts)


def test_dequantise_is_bit_equal_to_compressed_tensors() -> None:
    made = checkpoint(1, 64, 96)
    scales = torch.from_numpy(made.arrays["0.down.weight_scale"]).view(torch.bfloat16)
    dense = dequantise(torch.from_numpy(made.arrays["0.down.weight_packed"]), scales)
    assert made.down.dtype == torch.bfloat16
    assert torch.equal(dense, made.down[0])


def test_layout_word_by_word() -> None:
    made = checkpoint(2, 64, 96)
    for stage, tp, rank in (("gate_up", 2, 1), ("down", 2, 1)):
        packed = made.packed(stage, tp, rank)
        for expert in range(2):

            def part(name: str, expert: int = expert, stage: str = stage, rank: int = rank) -> np.ndarray:
                return split(made.arrays[f"{expert}.{name}"], 0 if stage == "gate_up" else 1, 2, rank)

            if stage == "down":
                words, scales = part("down.weight_packed"), part("down.weight_scale")
            else:
                words, scales = (
                    np.concatenate(
                        [
                            part(f"{name}.{kind}")[16 * j : 16 * j + 16]
                            for j in range(packed.shape[1])
                            for name in ("gate", "up")
                        ]
                    )
                    for kind in ("weight_packed", "weight_scale")
                )
            for j, k in np.ndindex(packed.shape[1:3]):
                tile_words = packed[expert, j, k, :512].view(np.int32)
                tile_scales = packed[expert, j, k, 512:].view(np.uint16)
                for g, t, r in np.ndindex(8, 4, 4):
                    row = 32 * j + 8 * r + g
                    assert tile_words[4 * (4 * g + t) + r] == words[row, 4 * k + t]
                    assert tile_scales[4 * g + r] == scales[row, k]


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    stage=st.sampled_from(["gate_up", "down"]),
    experts=st.integers(1, 3),
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_round_trip(tp: int, stage: str, experts: int, outer: int, inner: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, tp - 1))
    gated = stage == "gate_up"
    rows, columns = (16 * tp * outer, 32 * inner) if gated else (32 * outer, 32 * tp * inner)
    generator = np.random.default_rng(seed)
    patterns = ["a.p", "a.s", "b.p", "b.s"] if gated else ["a.p", "a.s"]
    arrays, names, shapes = {}, [], []
    for expert in range(experts):
        for pattern in patterns:
            words = pattern.endswith("p")
            shape = (rows, columns // (8 if words else 32))
            high = 2**31 if words else 2**16
            values = generator.integers(-(2**31) if words else 0, high, shape)
            arrays[f"{expert}.{pattern}"] = values.astype(np.int32 if words else np.uint16)
            names.append(f"{expert}.{pattern}")
            shapes.append(shape)
    recipe = WeightRecipe("int4_marlin_gemm", tuple(names), tuple(shapes), {"stage": stage})
    pieces = list(PACKER.pack(recipe, arrays.__getitem__, tp, rank))
    spec = recipe.spec(tp)
    assert spec.dtype == "uint8" and spec.shape[0] == experts and spec.shape[3] == 576
    assert sum(piece.nbytes for piece in pieces) == spec.nbytes
    packed = np.concatenate([piece.reshape(-1) for piece in pieces])
    unpacked = PACKER.unpack(recipe, packed, tp)
    for name, part in zip(names, unpacked, strict=True):
        wanted = split(arrays[name], 0 if gated else 1, tp, rank)
        assert part.dtype == wanted.dtype and np.array_equal(part, wanted)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_prepare_gives_the_rank_of_the_dequantised_experts(tp: int) -> None:
    made = checkpoint(2, 128, 64)
    inter = 128 // tp
    for rank in range(tp):
        mine = slice(rank * inter, (rank + 1) * inter)
        gate_up = made.prepared("gate_up", tp, rank, torch.bfloat16)
        assert torch.equal(gate_up[:, :inter], made.gate_up[:, :128][:, mine])
        assert torch.equal(gate_up[:, inter:], made.gate_up[:, 128:][:, mine])
        assert torch.equal(made.prepared("down", tp, rank, torch.float32), made.down[..., mine].float())


def run_moe(
    made: Checkpoint,
    x: torch.Tensor,
    chosen: list[list[int]],
    weights: torch.Tensor,
    tp: int,
    shared: torch.Tensor,
) -> torch.Tensor:
    """Both stages on every rank, summed; `shared` is on rank 0."""
    experts, top_k = made.gate_up.shape[0], len(chosen[0])
    offsets, routes = lists(chosen, experts)
    total = torch.zeros_like(x)
    for rank in range(tp):
        gate_up = made.prepared("gate_up", tp, rank, x.dtype)
        act = PLUGIN.reference({"stage": "gate_up", "top_k": top_k}, None)(x, gate_up, offsets, routes, None, None)
        assert act.shape == (len(chosen) * top_k, made.down.shape[2] // tp)
        down = made.prepared("down", tp, rank, x.dtype)
        run = PLUGIN.reference({"stage": "down", "top_k": top_k}, None)
        total += run(act, down, offsets, routes, weights, shared if rank == 0 else None)
    return total


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_transformers(tp: int, dtype: torch.dtype) -> None:
    made = checkpoint(6, 64, 96)
    config = DeepseekV3Config(hidden_size=96, moe_intermediate_size=64, n_routed_experts=6, hidden_act="silu")
    oracle = DeepseekV3Experts(config).to(dtype)
    oracle.gate_up_proj.data, oracle.down_proj.data = made.gate_up.to(dtype), made.down.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 96, generator=generator, dtype=dtype)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(7)])
    weights = torch.rand(7, 3, generator=generator, dtype=dtype)
    shared = torch.randn(7, 96, generator=generator, dtype=dtype)
    with torch.no_grad():
        expected = oracle(x, chosen, weights) + shared
    y = run_moe(made, x, chosen.tolist(), weights, tp, shared)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@settings(max_examples=25, deadline=None)
@given(
    chosen=st.lists(
        st.one_of(
            st.just([-1, -1]),
            st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True),
            st.just([3, 1]),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_ragged_routes_and_poison(chosen: list[list[int]]) -> None:
    """Padding rows, unused experts and activation rows without a route hold NaN: none may come through."""
    made = SMALL
    gate_up, down = made.gate_up.double(), made.down.double()
    x = torch.randn(len(chosen), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = torch.rand(len(chosen), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = torch.zeros_like(x)
    expected_act = torch.zeros(2 * len(chosen), 32, dtype=torch.float64)
    for t, pair in enumerate(chosen):
        for j, expert in enumerate(pair):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                expected_act[2 * t + j] = gate / (1 + torch.exp(-gate)) * up
                expected[t] += weights[t, j] * (down[expert] @ expected_act[2 * t + j])
    used = {expert for pair in chosen for expert in pair}
    for expert in set(range(4)) - used:
        gate_up[expert] = down[expert] = NAN
    padding = torch.tensor([pair[0] < 0 for pair in chosen])
    x[padding] = NAN
    weights[padding] = NAN
    offsets, routes = lists(chosen, 4)
    act = PLUGIN.reference({"stage": "gate_up", "top_k": 2}, None)(x, gate_up, offsets, routes, None, None)
    torch.testing.assert_close(act, expected_act)
    act[padding.repeat_interleave(2)] = NAN
    run = PLUGIN.reference({"stage": "down", "top_k": 2}, None)
    torch.testing.assert_close(run(act, down, offsets, routes, weights, None), expected)
    shared = torch.ones_like(x)
    torch.testing.assert_close(run(act, down, offsets, routes, weights, shared), expected + 1)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(5, 32)
    chosen = [[0, 1], [1, 2], [0, 1], [3, 0], [1, 0]]
    weights = torch.rand(5, 2)
    shared = torch.zeros(5, 32)
    together = run_moe(SMALL, x, chosen, weights, 1, shared)
    for t in range(5):
        alone = run_moe(SMALL, x[t : t + 1], chosen[t : t + 1], weights[t : t + 1], 1, shared[:1])
        torch.testing.assert_close(together[t : t + 1], alone, rtol=1e-5, atol=1e-5)


def test_bfloat16_sums_in_float32_and_rounds_once() -> None:
    down = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    offsets, routes = lists([[0, 1, 2]], 3)
    act = torch.tensor([[1.0], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)
    shared = torch.tensor([[2.0**-8]], dtype=torch.bfloat16)
    run = PLUGIN.reference({"stage": "down", "top_k": 3}, None)
    y = run(act, down, offsets, routes, torch.ones(1, 3), shared)
    assert y.dtype == torch.bfloat16 and y.item() == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("stage", "shape", "tp", "message"),
    [
        ("gate_up", (64, 64), 8, r"I / tp must be a multiple of 16: I=64, tp=8"),
        ("down", (64, 64), 4, r"H and I / tp must be multiples of 32: H=64, I=64, tp=4"),
        ("down", (48, 64), 1, r"H and I / tp must be multiples of 32: H=48, I=64, tp=1"),
        ("down", (64, 48), 1, r"expected words \[N, K/8\] with K a multiple of 32, found \[64, 6\]"),
        ("up", (64, 64), 1, "stage: expected one of .* found 'up'"),
    ],
)
def test_packer_refuses_sizes(stage: str, shape: tuple[int, int], tp: int, message: str) -> None:
    rows, columns = shape
    count = 2 if stage == "gate_up" else 1
    shapes = ((rows, columns // 8), (rows, columns // 32)) * count
    names = tuple(f"w{i}" for i in range(len(shapes)))
    with pytest.raises(PluginError, match=message):
        WeightRecipe("int4_marlin_gemm", names, shapes, {"stage": stage}).spec(tp)


def test_packer_refuses_odd_sources() -> None:
    with pytest.raises(PluginError, match="expected 4 sources an expert, each with a shape, found 2"):
        WeightRecipe("int4_marlin_gemm", ("p", "s"), ((32, 4), (32, 1)), {"stage": "gate_up"}).spec(1)
    with pytest.raises(PluginError, match=r"s: expected shape \[32, 1\], found \[32, 2\]"):
        WeightRecipe("int4_marlin_gemm", ("p", "s"), ((32, 4), (32, 2)), {"stage": "down"}).spec(1)
    recipe = WeightRecipe("int4_marlin_gemm", ("p", "s"), ((32, 4), (32, 1)), {"stage": "down"})
    arrays = {"p": np.zeros((32, 4), np.int32), "s": np.zeros((32, 1), np.float32)}
    with pytest.raises(PluginError, match=r"s: expected uint16 \[32, 1\], found float32 \[32, 1\]"):
        list(PACKER.pack(recipe, arrays.__getitem__, 1, 0))


def operands(stage: str, tokens: int = 3) -> list[TensorSpec | None]:
    """K2.6 on one of eight ranks: H 7168, I 256, 384 experts, top 8."""
    routes = TensorSpec((8 * tokens,), "int32")
    offsets = TensorSpec((385,), "int32")
    if stage == "gate_up":
        weight = TensorSpec((384, 16, 224, 576), "uint8")
        return [TensorSpec((tokens, 7168), "bfloat16"), weight, offsets, routes, None, None]
    x, weight = TensorSpec((8 * tokens, 256), "bfloat16"), TensorSpec((384, 224, 8, 576), "uint8")
    shared = TensorSpec((tokens, 7168), "bfloat16")
    return [x, weight, offsets, routes, TensorSpec((tokens, 8), "float32"), shared]


def test_infer_and_cost() -> None:
    up, down = {"stage": "gate_up", "top_k": 8}, {"stage": "down", "top_k": 8}
    act, out = PLUGIN.infer(up, operands("gate_up")), PLUGIN.infer(down, operands("down"))
    assert act == [TensorSpec((24, 256), "bfloat16")]
    assert out == [TensorSpec((3, 7168), "bfloat16")]
    assert PLUGIN.infer(up, operands("gate_up")[:4]) == act
    moved, flops = PLUGIN.cost(up, operands("gate_up", 1), PLUGIN.infer(up, operands("gate_up", 1)), 0)
    assert flops == 2 * 8 * 512 * 7168
    expert = 16 * 224 * 576
    assert 8 * expert < moved < 8.05 * expert  # one token reads its eight experts
    large, _ = PLUGIN.cost(up, operands("gate_up", 4096), PLUGIN.infer(up, operands("gate_up", 4096)), 0)
    assert large > 384 * expert


@pytest.mark.parametrize(
    ("stage", "index", "spec", "message"),
    [
        ("gate_up", 0, TensorSpec((3, 7136), "bfloat16"), r"x: expected .*K=7168, found bfloat16\[3,7136\]"),
        (
            "gate_up",
            1,
            TensorSpec((384, 16, 224, 512), "uint8"),
            r"weight: expected uint8 \[E, N/32, K/32, 576\]",
        ),
        (
            "gate_up",
            2,
            TensorSpec((384,), "int32"),
            r"expert_offsets: expected int32 \[385\], found int32\[384\]",
        ),
        ("gate_up", 3, TensorSpec((3,), "int32"), r"sorted_routes: expected int32 \[24\], found int32\[3\]"),
        (
            "gate_up",
            4,
            TensorSpec((3, 8), "float32"),
            r"route_weights: expected no operand \(only for stage down\)",
        ),
        ("down", 0, TensorSpec((23, 256), "bfloat16"), "x: expected rows in multiples of top_k=8"),
        ("down", 4, None, r"route_weights: expected float32 \[3, 8\], found nothing"),
        ("down", 5, TensorSpec((3, 7168), "float32"), r"shared: expected bfloat16 \[3, 7168\]"),
    ],
)
def test_infer_refuses(stage: str, index: int, spec: TensorSpec | None, message: str) -> None:
    inputs = operands(stage)
    inputs[index] = spec
    with pytest.raises(PluginError, match="int4_marlin_gemm: " + message):
        PLUGIN.infer({"stage": stage, "top_k": 8}, inputs)


SMALL = checkpoint(4, 32, 32, seed=5)
