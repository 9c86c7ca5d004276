"""What `FakeTensorRt` makes of its "plans": ONNX networks that run.

Plugins are made, cloned and enqueued in the order of the nodes; ONNX operators are computed by onnxruntime. Tensors
that are no input or output of the network lie in the memory that the user gives, as in TensorRT.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from tests.fake_tensorrt import PluginField
from tests.runtime.fake_device import memory

if TYPE_CHECKING:
    from tests.fake_tensorrt import FakeTensorRt

_ALIGNMENT = 256


class Engine:
    def __init__(self, trt: FakeTensorRt, data: bytes) -> None:
        self.trt, self.model = trt, onnx.shape_inference.infer_shapes(onnx.load_from_string(data))
        self.plugins: dict[str, Any] = {}
        graph = self.model.graph
        self.types = {v.name: v.type.tensor_type for v in [*graph.input, *graph.output, *graph.value_info]}
        self.io = [value.name for value in [*graph.input, *graph.output]]
        self.num_io_tensors = len(self.io)
        self.offsets: dict[str, int] = {}
        self._nodes = list(graph.node)  # one object a node
        self._readers: dict[str, set[int]] = defaultdict(set)
        for node in self._nodes:
            for name in node.input:
                self._readers[name].add(id(node))
        size = 0

        def place(name: str, nbytes: int) -> None:
            nonlocal size
            self.offsets[name] = size
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

        for node in self._nodes:
            if node.domain == "k2":
                fields = [PluginField(a.name, helper.get_attribute_value(a), "char") for a in node.attribute]
                plugin = trt.creators[node.op_type].create_plugin(node.name, fields, "runtime").clone()
                shapes = plugin.get_output_shapes([], [], SimpleNamespace(constant=lambda value: value))
                for name, dtype, shape in zip(node.output, plugin.get_output_data_types([]), shapes, strict=True):
                    kind = {"float32": 1, "bfloat16": 16, "int32": 6, "int64": 7}[dtype]
                    self.types[name] = helper.make_tensor_type_proto(kind, list(shape)).tensor_type
                place(f"{node.name} workspace", plugin.get_workspace_size([], []))
                self.plugins[node.name] = plugin
            else:
                self._infer(node)
            for name in node.output:
                if name not in self.io:
                    place(name, self.nbytes(name))
        self.device_memory_size_v2 = size

        # runs of ONNX operators are computed together
        groups = groupby(self._nodes, key=lambda node: (node.domain, node.name if node.domain else ""))
        self.segments = [list(nodes) for _, nodes in groups]

    def _infer(self, node: onnx.NodeProto) -> None:
        """Types of what an ONNX operator gives: ONNX cannot infer past plugins, so node by node."""
        single = self.model_of([node])
        for value in onnx.shape_inference.infer_shapes(single, strict_mode=True, data_prop=True).graph.output:
            self.types[value.name] = value.type.tensor_type

    def model_of(self, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
        """A model of some nodes, which gives what they give to others."""
        read = dict.fromkeys(name for node in nodes for name in node.input)
        constants = [c for c in self.model.graph.initializer if c.name in read]
        made = [name for node in nodes for name in node.output]
        known = {*made, *(constant.name for constant in constants)}
        inputs = [
            helper.make_value_info(name, onnx.TypeProto(tensor_type=self.types[name]))
            for name in read
            if name not in known
        ]
        given = [
            name for name in made if len(nodes) == 1 or name in self.io or self._readers[name] - set(map(id, nodes))
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in given]
        graph = helper.make_graph(nodes, "some", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def get_tensor_name(self, index: int) -> str:
        return self.io[index]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim.dim_value for dim in self.types[name].shape.dim)

    def dtype(self, name: str) -> np.dtype:
        return helper.tensor_dtype_to_np_dtype(self.types[name].elem_type)

    def nbytes(self, name: str) -> int:
        return int(np.prod(self.shape(name))) * self.dtype(name).itemsize

    def create_execution_context(self, strategy: Any) -> Context:
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % _ALIGNMENT == 0 and size >= self.engine.device_memory_size_v2
        self.addresses.update({name: address + offset for name, offset in self.engine.offsets.items()})

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 16 == 0

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def execute_async_v3(self, stream: int) -> bool:
        for nodes in self.engine.segments:
            node = nodes[0]
            if node.domain == "k2":
                inputs, outputs = ([self.addresses[name] for name in names] for names in (node.input, node.output))
                workspace = self.addresses[f"{node.name} workspace"]
                self.engine.plugins[node.name].enqueue([], [], inputs, outputs, workspace, stream)
            else:
                self.engine.trt.do(lambda nodes=nodes: self._compute(nodes))  # type: ignore[misc]
        return True

    def _compute(self, nodes: list[onnx.NodeProto]) -> None:
        name = nodes[0].name
        if name not in self._sessions:
            model = self.engine.model_of(nodes).SerializeToString()
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            self._sessions[name] = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        session = self._sessions[name]
        given = {value.name: self._value(value.name) for value in session.get_inputs()}
        results = session.run_with_ort_values(None, given)
        for output, value in zip(session.get_outputs(), results, strict=True):
            np.copyto(self._tensor(output.name), value.numpy())

    def _value(self, name: str) -> onnxruntime.OrtValue:
        tensor = self._tensor(name)
        kind = self.engine.types[name].elem_type
        if kind != onnx.TensorProto.BFLOAT16:
            return onnxruntime.OrtValue.ortvalue_from_numpy(tensor)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(np.uint16), kind)

    def _tensor(self, name: str) -> np.ndarray:
        engine = self.engine
        return memory(self.addresses[name], engine.nbytes(name)).view(engine.dtype(name)).reshape(engine.shape(name))
