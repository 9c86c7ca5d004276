"""A phase of the native plan as TensorRT's ONNX model: plugins in the domain "k2", ONNX operators between.

Weights and persistent buffers are network inputs, so that a plan is small and reads its weights where the runtime has
put them. A result that goes to a persistent buffer is a network output; steps that read it later read that tensor.
"""

from __future__ import annotations

import onnx
from onnx import helper

from builder.errors import BuildError
from builder.graph import ONNX_DTYPES, OPSET
from builder.tensorrt.glue import lower
from plugins.core.plan import Arg, Phase
from plugins.core.plugin import PLUGIN_NAMES
from plugins.core.spec import TensorSpec
from plugins.core.tensorrt import (
    DONE,
    NAMESPACE,
    done_name,
    glue_kind,
    input_name,
    is_glue,
    output_name,
    segment_key,
    shown,
    step_calls,
)


def to_network(phase: Phase, native: frozenset[str] = frozenset()) -> onnx.ModelProto:
    """The model of `phase`. native: kinds of glue (`glue_kind`) that stay plugins.

    Raises `BuildError` for an operator that is no plugin.
    """
    for step in phase.steps:
        if step.plugin not in PLUGIN_NAMES:
            raise BuildError(
                f"{phase.key}, node {step.node}: {step.plugin} is no plugin: expected one of {', '.join(PLUGIN_NAMES)}"
            )
    calls = step_calls(phase)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    inputs: dict[str, TensorSpec] = {}
    outputs: dict[str, TensorSpec] = {}
    written: dict[str, tuple[str, TensorSpec]] = {}  # buffer -> network output that holds it, and its spec

    def read(arg: Arg, where: str) -> str:
        assert arg.spec is not None
        if arg.kind == "arena":
            return arg.name
        if arg.kind == "buffer" and arg.name in written:
            name, spec = written[arg.name]
            if spec != arg.spec:
                raise BuildError(f"{where}: buffer {arg.name}: read as {arg.spec} after it was written as {spec}")
            return name
        name = input_name(arg)
        if inputs.setdefault(name, arg.spec) != arg.spec:
            raise BuildError(f"{where}: {name}: read as {arg.spec} and as {inputs[name]} in one phase")
        return name

    for step in phase.steps:
        call = calls[step.node]
        present = [read(arg, str(call)) for arg in step.inputs if arg.spec is not None]
        results = []
        for arg in step.outputs:
            if arg.spec is None:
                continue
            name = arg.name
            if arg.kind == "buffer":
                name = output_name(arg.name)
                written[arg.name] = (name, arg.spec)
                outputs[name] = arg.spec
            results.append(name)
        if is_glue(step) and glue_kind(step) not in native:
            made, values = lower(step, present, results[0])
            nodes += made
            constants += values
            continue
        present += [done_name(node) for node in call.waits_for]
        if call.done:
            results.append(done_name(step.node))
            outputs[done_name(step.node)] = DONE  # else TensorRT would leave out a step whose work nobody reads
        fields = {"phase": phase.key, "node": step.node}
        nodes.append(helper.make_node(step.plugin, present, results, name=step.node, domain=NAMESPACE, **fields))

    return _model(phase.key, nodes, inputs, outputs, constants)


def segments(phase: Phase) -> dict[str, onnx.ModelProto]:
    """A model for each kind of glue in `phase`: x, weight -> y."""
    found: dict[str, onnx.ModelProto] = {}
    for step in phase.steps:
        if not is_glue(step) or glue_kind(step) in found:
            continue
        nodes, constants = lower(step, ("x", "weight"), "y")
        (x, weight), (y,) = ([arg.spec for arg in args if arg.spec is not None] for args in (step.inputs, step.outputs))
        kind = glue_kind(step)
        found[kind] = _model(segment_key(phase.key, kind), nodes, {"x": x, "weight": weight}, {"y": y}, constants)
    return found


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, TensorSpec],
    outputs: dict[str, TensorSpec],
    constants: list[onnx.TensorProto],
) -> onnx.ModelProto:
    def info(name: str, spec: TensorSpec) -> onnx.ValueInfoProto:
        told = shown(spec)
        return helper.make_tensor_value_info(name, ONNX_DTYPES[told.dtype], told.shape)

    graph = helper.make_graph(
        nodes,
        name,
        [info(*item) for item in inputs.items()],
        [info(*item) for item in outputs.items()],
        initializer=constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)]
    return helper.make_model(graph, opset_imports=opsets, producer_name="k2-engine")
