"""torch.export of the passes, and its translation to ONNX with the plugin operators in domain "k2"."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from builder.errors import BuildError
from builder.graph import DOMAIN, STATE, WEIGHT, Graph, Node
from builder.model.ops import register, required_outputs, spec_of
from builder.model.passes import Pass
from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec


def export(module: Pass, name: str) -> Graph:
    """Trace one pass (builder.model.passes) on the meta device."""
    register()
    with torch.no_grad():
        program = torch.export.export(module, (), strict=False)
    return _to_graph(program, name, module.outputs)


def with_rows(graph: Graph, name: str, rows: dict[str, int]) -> Graph:
    """The same pass for another bucket: buffers named in `rows` get that many rows, all shapes follow.

    Much faster than tracing again; valid because no attribute of a pass depends on its row count, and checked by
    every operator's shape inference.
    """
    specs = {}
    for value in graph.inputs(WEIGHT) + graph.inputs(STATE):
        spec = graph.specs[value]
        count = rows.get(value.removeprefix(STATE), spec.shape[0])
        specs[value] = TensorSpec((count, *spec.shape[1:]), spec.dtype)
    result = Graph(name, graph.nodes, specs, graph.outputs)
    result.infer()
    return result


def _to_graph(program: torch.export.ExportedProgram, name: str, outputs: tuple[str, ...]) -> Graph:
    values: dict[str, Any] = {}  # fx node name -> value name, or the list of an operator's result names
    graph = Graph(name, [], {}, {})
    targets = {spec.arg.name: (spec.kind, spec.target) for spec in program.graph_signature.input_specs}
    used: dict[str, int] = {}
    for fx_node in program.graph.nodes:
        if fx_node.op == "placeholder":
            values[fx_node.name] = _input_name(*targets[fx_node.name])
            graph.specs[values[fx_node.name]] = spec_of(fx_node.meta["val"])
        elif fx_node.op == "output":
            for buffer, result in zip(outputs, fx_node.args[0], strict=True):
                graph.outputs[values[result.name]] = buffer
        elif fx_node.target is operator.getitem:
            source, index = fx_node.args
            values[fx_node.name] = values[source.name][index]
        else:
            node = _to_node(fx_node, values, used)
            graph.nodes.append(node)
            results = fx_node.meta["val"]
            if isinstance(results, torch.Tensor):
                values[fx_node.name] = node.outputs[0]
                results = [results]
            else:
                values[fx_node.name] = list(node.outputs)
            graph.specs.update({key: spec_of(val) for key, val in zip(node.outputs, results or (), strict=True)})
    return graph


def _input_name(kind: InputKind, target: str) -> str:
    if kind == InputKind.PARAMETER:
        return WEIGHT + target
    name = target.removeprefix("state.")
    return STATE + (name.replace("_", ".") if name.startswith("taps_") else name)


def _to_node(fx_node: torch.fx.Node, values: dict[str, Any], used: dict[str, int]) -> Node:
    stack = fx_node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())))[0] if stack else ""

    def unique(op: str) -> str:
        base = f"{path}.{op}" if path else op
        used[base] = used.get(base, 0) + 1
        return base if used[base] == 1 else f"{base}.{used[base]}"

    target = fx_node.target
    if target is torch.ops.aten.add.Tensor:
        name = unique("add")
        inputs = _names(fx_node.args, values)
        return Node(name, "", "Add", inputs, (name,))
    if not (isinstance(target, torch._ops.OpOverload) and target.namespace == DOMAIN):
        raise BuildError(f"export: {path}: operation {target} has no ONNX translation; use a plugin operator")
    plugin = get_plugin(target._opname)
    name = unique(plugin.name)
    count = len(plugin.inputs)
    inputs = _names(fx_node.args[:count], values)
    attrs = dict(zip(plugin.attrs, fx_node.args[count:], strict=True))
    results = required_outputs(plugin)
    outputs = (name,) if len(results) == 1 else tuple(f"{name}:{result}" for result in results)
    return Node(name, DOMAIN, plugin.name, inputs, outputs, attrs)


def _names(args: tuple[Any, ...], values: dict[str, Any]) -> tuple[str, ...]:
    return tuple("" if arg is None else values[arg.name] for arg in args)
