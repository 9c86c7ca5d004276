"""A compiled kernel on the current CUDA context: loading its cubin and starting it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from plugins.core.plugin import Launch


class CudaError(Exception):
    """A driver call that failed; the message names the call and the driver's error."""


class Kernel:
    """One `Launch`, ready to start. Raises `CudaError`.

    The caller has made a context current, as the primary context that torch or an executor uses.
    """

    def __init__(self, launch: Launch, cubin: bytes) -> None:
        self.launch = launch
        self._module = _call(driver.cuModuleLoadData, cubin)
        function = _call(driver.cuModuleGetFunction, self._module, launch.kernel.encode())
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute, function, limit, launch.smem)
        self._function = function
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
        _call(driver.cuLaunchKernelEx, self._config, self._function, ctypes.addressof(pointers), 0)


def _call(function: Any, *arguments: Any) -> Any:
    """What a driver function returns beside its status."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{function.__name__}: {status.name}")
    return results[0] if results else None
