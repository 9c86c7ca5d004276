"""Arena planning and graph rewrites on small graphs made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import BuildError
from builder.fuse import fuse
from builder.graph import Graph, Node, from_onnx, to_onnx
from builder.planner import Interval, assign_offsets, plan_phase
from plugins.core.plan import ARENA_ALIGNMENT
from plugins.core.plugin import PluginError
from plugins.core.spec import TensorSpec


@st.composite
def intervals(draw: st.DrawFn) -> tuple[Interval, ...]:
    count = draw(st.integers(0, 30))
    result = []
    for index in range(count):
        first = draw(st.integers(0, 20))
        last = draw(st.integers(first, 25))
        result.append(Interval(f"v{index}", draw(st.integers(0, 5000)), first, last))
    return tuple(result)


@given(intervals())
def test_values_alive_together_do_not_overlap(values: tuple[Interval, ...]) -> None:
    offsets, size = assign_offsets(values)
    assert set(offsets) == {value.name for value in values}
    for value in values:
        assert offsets[value.name] % ARENA_ALIGNMENT == 0
        assert offsets[value.name] + value.nbytes <= size
    for i, a in enumerate(values):
        for b in values[:i]:
            if a.first <= b.last and b.first <= a.last and a.nbytes and b.nbytes:
                start, other = offsets[a.name], offsets[b.name]
                assert start + a.nbytes <= other or other + b.nbytes <= start, (a, b)


def test_a_chain_reuses_two_places() -> None:
    chain = tuple(Interval(f"v{i}", 1024, i, i + 1) for i in range(50))
    assert assign_offsets(chain)[1] == 2 * 1024


def layer(tp_world: int) -> Graph:
    """y = rms_norm(x + all_reduce(gemm(x))), with x + .. used again afterwards."""
    act, weight = TensorSpec((4, 64), "float32"), TensorSpec((64, 64), "bfloat16")
    gemm = {"activation": "none", "out_dtype": "activation"}
    nodes = [
        Node(
            "embed",
            "k2",
            "embed",
            ("state.tokens", "w.table"),
            ("x",),
            {"tp_rank": 0, "out_dtype": "float32"},
        ),
        Node("gemm", "k2", "dense_gemm", ("x", "w.a"), ("a",), gemm),
        Node("sum", "k2", "all_reduce", ("a",), ("s",), {"eps": 0.0, "tp_world": tp_world}),
        Node("add", "", "Add", ("x", "s"), ("h",), {}),
        Node("norm", "k2", "rms_norm", ("h", "w.n"), ("y",), {"eps": 1e-5}),
        Node("head", "k2", "dense_gemm", ("y", "w.a"), ("z",), gemm),
        Node("gather", "k2", "all_gather", ("z",), ("g",), {"tp_world": tp_world}),
    ]
    specs = {
        "state.tokens": TensorSpec((4,), "int32"),
        "w.table": weight,
        "w.a": weight,
        "w.n": TensorSpec((64,), "bfloat16"),
    }
    specs.update(dict.fromkeys(("x", "a", "s", "h", "y", "z"), act))
    specs["g"] = TensorSpec((4, 64 * tp_world), "float32")
    return Graph("layer", nodes, specs, {"g": "logits", "h": "taps.0"})


def test_onnx_round_trip() -> None:
    graph = layer(2)
    assert from_onnx(to_onnx(graph)) == graph


@pytest.mark.parametrize(
    ("tp", "ops"),
    [
        (2, ["embed", "dense_gemm", "all_reduce", "dense_gemm", "all_gather"]),
        (1, ["embed", "dense_gemm", "all_reduce", "dense_gemm"]),
    ],
)
def test_fusion_keeps_values_and_drops_nodes(tp: int, ops: list[str]) -> None:
    graph = fuse(layer(tp))
    assert [node.op for node in graph.nodes] == ops
    fused = graph.nodes[2]
    assert fused.inputs == ("a", "x", "w.n")
    assert fused.outputs == ("h", "y")
    assert fused.attrs == {"eps": 1e-5, "tp_world": tp}
    assert list(graph.outputs.values()) == ["logits", "taps.0"]
    phase, arena = plan_phase(graph, "verify", 4, "cpu")
    by_name = {step.node: step for step in phase.steps}
    tap, normed = by_name["norm"].outputs
    assert (tap.kind, tap.name) == ("buffer", "taps.0")
    assert normed.kind == "arena"
    assert phase.steps[-1].outputs[0].name == "logits"
    assert arena > 0


def test_an_operator_without_a_tactic_names_the_node() -> None:
    with pytest.raises(BuildError, match=r"layer, node embed: no tactic of embed for sm_120a"):
        plan_phase(fuse(layer(1)), "verify", 4, "sm_120a")


def test_a_node_that_was_not_fused_is_refused() -> None:
    with pytest.raises(BuildError, match="node add: ONNX operator Add was not fused"):
        plan_phase(layer(1), "verify", 4, "cpu")


def test_shape_errors_name_graph_node_and_operand() -> None:
    graph = layer(1)
    graph.specs["w.n"] = TensorSpec((32,), "bfloat16")
    with pytest.raises(PluginError, match=r"graph layer, node norm: rms_norm: weight: expected .*found bfloat16\[32\]"):
        graph.infer()
