"""The graph that the builder's passes work on, read from ONNX: nodes in execution order over named values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec

DOMAIN = "k2"
OPSET = 23
STATE, WEIGHT = "state.", "w."  # prefixes of graph inputs: persistent buffers and weights

ONNX_DTYPES = {
    "float32": TensorProto.FLOAT,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "uint32": TensorProto.UINT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
}
_SPEC_DTYPES = {value: key for key, value in ONNX_DTYPES.items()}


@dataclass(frozen=True)
class Node:
    """One operation. `op` is a plugin name where `domain` is "k2", an ONNX operator otherwise ("" = absent input)."""

    name: str
    domain: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """A pass: `specs` gives every value's shape; `outputs` maps a value to the persistent buffer that receives it."""

    name: str
    nodes: list[Node]
    specs: dict[str, TensorSpec]
    outputs: dict[str, str]

    def input_specs(self, node: Node) -> list[TensorSpec | None]:
        return [self.specs[name] if name else None for name in node.inputs]

    def consumers(self) -> dict[str, list[Node]]:
        """Nodes that read each value."""
        users: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                users.setdefault(name, []).append(node)
        return users

    def inputs(self, prefix: str) -> list[str]:
        """Graph inputs with `prefix`, in order of first use."""
        seen = dict.fromkeys(name for node in self.nodes for name in node.inputs if name.startswith(prefix))
        return list(seen)

    def infer(self) -> None:
        """Recompute the specs of all values from those of the graph inputs.

        Raises `PluginError` with the node's name where a plugin does not take its operands.
        """
        for node in self.nodes:
            if node.domain == DOMAIN:
                try:
                    results = get_plugin(node.op).infer(node.attrs, self.input_specs(node))
                except Exception as error:
                    raise type(error)(f"graph {self.name}, node {node.name}: {error}") from error
            else:
                results = [_infer_standard(self, node)]
            self.specs.update(zip(node.outputs, results, strict=True))


def _infer_standard(graph: Graph, node: Node) -> TensorSpec:
    first, second = (graph.specs[name] for name in node.inputs)
    if node.op != "Add" or first != second:
        raise ValueError(f"graph {graph.name}, node {node.name}: {node.op} of {first} and {second} is not supported")
    return first


def to_onnx(graph: Graph) -> onnx.ModelProto:
    """The graph as a checked ONNX model; weights and buffers are inputs with shape and dtype only."""

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, ONNX_DTYPES[graph.specs[name].dtype], graph.specs[name].shape)

    nodes = [helper.make_node(n.op, n.inputs, n.outputs, name=n.name, domain=n.domain, **n.attrs) for n in graph.nodes]
    inputs = [info(name) for name in graph.inputs(STATE) + graph.inputs(WEIGHT)]
    internal = [info(name) for node in graph.nodes for name in node.outputs if name not in graph.outputs]
    proto = helper.make_graph(nodes, graph.name, inputs, [info(name) for name in graph.outputs], value_info=internal)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(proto, opset_imports=opsets, producer_name="k2-engine")
    helper.set_model_props(model, {f"output:{value}": buffer for value, buffer in graph.outputs.items()})
    onnx.checker.check_model(model)
    return model


def from_onnx(model: onnx.ModelProto) -> Graph:
    """Inverse of `to_onnx`."""
    proto = model.graph
    specs = {}
    for value in [*proto.input, *proto.output, *proto.value_info]:
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_value for dim in tensor.shape.dim)
        specs[value.name] = TensorSpec(shape, _SPEC_DTYPES[tensor.elem_type])
    props = {prop.key: prop.value for prop in model.metadata_props}
    outputs = {value.name: props[f"output:{value.name}"] for value in proto.output}
    nodes = [
        Node(
            n.name,
            n.domain,
            n.op_type,
            tuple(n.input),
            tuple(n.output),
            {a.name: _attr(a) for a in n.attribute},
        )
        for n in proto.node
    ]
    for i, node in enumerate(nodes):
        if node.domain == DOMAIN:
            nodes[i] = replace(node, attrs=_typed(node))
    return Graph(proto.name, nodes, specs, outputs)


def _attr(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float):
        # ONNX keeps float32: the shortest decimal that rounds to it gives back 1e-05 rather than 9.99999e-06
        return float(str(np.float32(value)))
    return value


def _typed(node: Node) -> dict[str, Any]:
    kinds = get_plugin(node.op).attrs
    return {name: bool(value) if kinds[name] == "bool" else value for name, value in node.attrs.items()}
