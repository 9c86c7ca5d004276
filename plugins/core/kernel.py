"""A compiled kernel on the current CUDA context: loading its cubin and starting it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from plugins.core.plugin import Launch


class CudaError(Exception):
    """A driver call that failed; the message names the call and the driver's error."""


class Image:
    """A cubin on the device: the kernels of one `Launch.image`. Raises `CudaError`.

    The caller has made a context current, as the primary context that torch or an executor uses.
    """

    def __init__(self, cubin: bytes) -> None:
        self._module = call(driver.cuModuleLoadData, cubin)
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}

    def function(self, name: str, smem: int) -> Any:
        """The kernel `name`, allowed `smem` bytes of dynamic shared memory or more."""
        if name not in self._functions:
            self._functions[name] = call(driver.cuModuleGetFunction, self._module, name.encode())
            call(driver.cuFuncLoad, self._functions[name])  # else the first start loads it, which no capture allows
        if smem > self._shared.get(name, 0):
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute, self._functions[name], limit, smem)
            self._shared[name] = smem
        return self._functions[name]


class Kernel:
    """One `Launch` of an `Image`, ready to start. Raises `CudaError`."""

    def __init__(self, launch: Launch, image: Image) -> None:
        self.launch = launch
        self._function = image.function(launch.kernel, launch.smem)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.smem
        attributes = []
        if launch.cluster != (1, 1, 1):
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = cluster.value.clusterDim
            dimension.x, dimension.y, dimension.z = launch.cluster
            attributes.append(cluster)
        if launch.pdl:
            dependent = driver.CUlaunchAttribute()
            dependent.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            dependent.value.programmaticStreamSerializationAllowed = 1
            attributes.append(dependent)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config = config

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """Start on `stream` (a CUstream handle) with device addresses as arguments, 0 for an absent operand."""
        arguments = (*addresses, *self.launch.scalars)
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        start, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_int64)
        pointers = (ctypes.c_void_p * len(arguments))(*(start + i * size for i in range(len(arguments))))
        self._config.hStream = stream
        call(driver.cuLaunchKernelEx, self._config, self._function, ctypes.addressof(pointers), 0)


def call(function: Any, *arguments: Any) -> Any:
    """What a driver function returns beside its status; raises `CudaError` where that is not success."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{function.__name__}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results) or None
