"""TensorRT's module in Python, as far as the executor uses it: its "plans" are the ONNX networks themselves."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any


class _Base:
    def __init__(self) -> None:
        pass


class PluginField:
    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name, self.data, self.type = name, data, kind


class DimsExprs(list):
    def __init__(self, size: int) -> None:
        super().__init__([None] * size)


class Desc:
    """Of a tensor, for `on_shape_change`; in the build phase TensorRT has it inside another."""

    def __init__(self, dtype: str, dims: tuple[int, ...], layout: str = "linear") -> None:
        self.type, self.dims, self.format = dtype, dims, layout

    @property
    def desc(self) -> Desc:
        return self


class FakeTensorRt:
    """`do(work)` is the device's stream."""

    __name__ = "tensorrt_fake"
    __version__ = "1.0"
    float32, bfloat16, int32, int64 = "float32", "bfloat16", "int32", "int64"
    ILogger = type("ILogger", (_Base,), {"ERROR": 1, "INTERNAL_ERROR": 0})
    IPluginV3, IPluginV3OneCore, IPluginV3OneBuild, IPluginV3OneRuntime, IPluginCreatorV3One = (
        type(name, (_Base,), {}) for name in ("V3", "Core", "Build", "Runtime", "CreatorV3One")
    )
    PluginField, PluginFieldCollection, DimsExprs = PluginField, list, DimsExprs
    PluginFieldType = SimpleNamespace(CHAR="char")
    TensorFormat = SimpleNamespace(LINEAR="linear")
    ExecutionContextAllocationStrategy = Enum("Strategy", ["USER_MANAGED"])

    def __init__(self, do: Callable[[Callable[[], None]], None]) -> None:
        self.do = do
        self.creators: dict[str, Any] = {}

    def __hash__(self) -> int:
        return id(self)

    def get_plugin_registry(self) -> Any:
        def register(creator: Any, namespace: str) -> None:
            assert namespace == creator.plugin_namespace == "k2"
            self.creators[creator.name] = creator

        return SimpleNamespace(register_creator=register)

    def Runtime(self, log: Any) -> Any:
        def load(data: bytes) -> Any:
            if data[:3] == b"bad":
                log.log(self.ILogger.ERROR, "not a plan")
                return None
            from tests.fake_tensorrt_engine import Engine

            return Engine(self, data)

        return SimpleNamespace(deserialize_cuda_engine=load)
