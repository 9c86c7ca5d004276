"""Operators that TensorRT gets as ONNX operators of its own, to fuse and compile: everything but the plugins.

They round where the references do (`plugins/*/reference.py`), with one exception: TensorRT keeps a product before
SiLU in bfloat16, as transformers does; our kernel does not round it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from plugins.core.plan import Step
from plugins.dense_gemm.pack import INTERLEAVE

Lowered = tuple[list[onnx.NodeProto], list[onnx.TensorProto]]


def lower(step: Step, inputs: Sequence[str], output: str) -> Lowered:
    """ONNX nodes and constants that compute `output` from `inputs`; names begin with the node's."""
    return _LOWERINGS[step.plugin](step, inputs, output)


class _Nodes:
    """Nodes of one step under construction."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, output: str = "", **attrs: Any) -> str:
        name = f"{self.step.node}/{len(self.nodes)}.{op}"
        self.nodes.append(helper.make_node(op, inputs, [output or name], name=name, **attrs))
        return output or name

    def constant(self, label: str, value: np.ndarray) -> str:
        name = f"{self.step.node}/{label}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def cast(self, value: str, dtype: str, output: str = "") -> str:
        kinds = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16}
        return self.add("Cast", value, output=output, to=kinds[dtype])

    def weight(self, name: str) -> str:
        """The step's weight in the dtype of its activations (another one only in float32 plans)."""
        spec = self.step.inputs[1].spec
        assert spec is not None
        return name if spec.dtype == _dtype(self.step) else self.cast(name, _dtype(self.step))


def _rms_norm(step: Step, inputs: Sequence[str], output: str) -> Lowered:
    x, weight = inputs
    dtype = _dtype(step)
    nodes = _Nodes(step)
    wide = nodes.cast(x, "float32")
    squares = nodes.add("Mul", wide, wide)
    axes = nodes.constant("axes", np.array([-1], np.int64))
    mean = nodes.add("ReduceMean", squares, axes, keepdims=1)
    eps = nodes.constant("eps", np.array([step.attrs["eps"]], np.float32))
    root = nodes.add("Sqrt", nodes.add("Add", mean, eps))
    normed = nodes.cast(nodes.add("Div", wide, root), dtype)
    nodes.add("Mul", normed, nodes.weight(weight), output=output)
    return nodes.nodes, nodes.constants


def _dense_gemm(step: Step, inputs: Sequence[str], output: str) -> Lowered:
    x, weight = inputs
    nodes = _Nodes(step)
    if step.attrs["activation"] == "none":
        nodes.add("Gemm", x, nodes.weight(weight), output=output, transB=1)
        return nodes.nodes, nodes.constants
    (spec,) = (arg.spec for arg in step.outputs)
    assert spec is not None
    rows, columns = spec.shape
    blocks = nodes.constant("blocks", np.array([rows, columns // INTERLEAVE, 2, INTERLEAVE], np.int64))
    product = nodes.add("Reshape", nodes.add("Gemm", x, nodes.weight(weight), transB=1), blocks)
    halves = []
    for half in range(2):
        bounds = [
            nodes.constant(f"{label}{half}", np.array([n], np.int64)) for label, n in (("at", half), ("to", half + 1))
        ]
        axis = nodes.constant(f"axis{half}", np.array([2], np.int64))
        halves.append(nodes.cast(nodes.add("Slice", product, *bounds, axis), "float32"))
    gate, up = halves
    active = nodes.add("Mul", nodes.add("Mul", gate, nodes.add("Sigmoid", gate)), up)
    flat = nodes.constant("flat", np.array([rows, columns], np.int64))
    nodes.add("Reshape", nodes.cast(active, _dtype(step)), flat, output=output)
    return nodes.nodes, nodes.constants


def _dtype(step: Step) -> str:
    spec = step.outputs[0].spec
    assert spec is not None
    return spec.dtype


_LOWERINGS: dict[str, Callable[[Step, Sequence[str], str], Lowered]] = {
    "rms_norm": _rms_norm,
    "dense_gemm": _dense_gemm,
}
