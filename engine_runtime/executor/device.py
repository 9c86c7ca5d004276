"""One CUDA device as an executor uses it: memory, copies, events and graphs on one stream.

Everything is asynchronous and in the order of the calls, except where a method says that it waits. `CudaError` is
raised for whatever the driver refuses, `DeviceTimeout` where work does not end.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver

from plugins.core.kernel import CudaError, Image, Kernel, call
from plugins.core.plugin import Launch

STUCK_SECONDS = 60.0  # no pass takes this long; one that does never ends
_SPIN_SECONDS = 2.0  # of asking without a pause: a pass is short, and whoever waits has nothing else to do
_PAUSE_SECONDS = 0.0005
_NO_TIMING = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: a captured event that can be read after each replay


class DeviceTimeout(Exception):
    """Work that does not end: a stuck kernel, or a rank that never came to a collective."""


def device_arch(ordinal: int) -> str:
    """The architecture that engines for device `ordinal` are built for, e.g. "sm_120a"; raises `CudaError`."""
    call(driver.cuInit, 0)
    handle = call(driver.cuDeviceGet, ordinal)
    names = driver.CUdevice_attribute
    major = call(driver.cuDeviceGetAttribute, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
    minor = call(driver.cuDeviceGetAttribute, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
    return f"sm_{major}{minor}a"


class Device:
    """Device `ordinal` with its primary context, current in the thread that makes it."""

    def __init__(self, ordinal: int = 0) -> None:
        call(driver.cuInit, 0)
        self._handle = call(driver.cuDeviceGet, ordinal)
        self.context = call(driver.cuDevicePrimaryCtxRetain, self._handle)
        call(driver.cuCtxSetCurrent, self.context)
        self.name: str = call(driver.cuDeviceGetName, 128, self._handle).split(b"\0")[0].decode()
        self.stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._images: dict[str, Image] = {}
        self._pinned: list[int] = []

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = call(driver.cuMemGetInfo)
        return int(free), int(total)

    # ---- memory and copies ----

    def allocate(self, nbytes: int) -> int:
        """Address of `nbytes` bytes, aligned to 256; their content is undefined."""
        return int(call(driver.cuMemAlloc, max(nbytes, 1)))

    def free(self, address: int) -> None:
        call(driver.cuMemFree, address)

    def pinned(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of host memory, zeroed, that copies reach directly; it lives as long as the device."""
        address = int(call(driver.cuMemHostAlloc, max(nbytes, 1), 0))
        self._pinned.append(address)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        array[:] = 0
        return array

    def upload(self, to: int, values: np.ndarray) -> None:
        """Copy contiguous `values`. Pinned ones must stay as they are until the copy is done; others may change."""
        call(driver.cuMemcpyHtoDAsync, to, values.ctypes.data, values.nbytes, self.stream)

    def download(self, values: np.ndarray, source: int) -> None:
        """Fill contiguous `values`; they are there once an event recorded after this is done."""
        call(driver.cuMemcpyDtoHAsync, values.ctypes.data, source, values.nbytes, self.stream)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        call(driver.cuMemcpyDtoDAsync, to, source, nbytes, self.stream)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            call(driver.cuMemsetD8Async, address, byte, nbytes, self.stream)

    # ---- kernels and graphs ----

    def kernel(self, launch: Launch, cubin: bytes) -> Kernel:
        """`launch`, ready to start; equal images are loaded once."""
        if launch.image not in self._images:
            self._images[launch.image] = Image(cubin)
        return Kernel(launch, self._images[launch.image])

    def capture(self, body: Callable[[], None]) -> Any:
        """A graph of everything that `body` puts on the stream, uploaded and ready to replay."""
        call(driver.cuStreamBeginCapture, self.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            body()
        except BaseException:
            driver.cuStreamEndCapture(self.stream)
            raise
        graph = call(driver.cuStreamEndCapture, self.stream)
        executable = call(driver.cuGraphInstantiate, graph, 0)
        call(driver.cuGraphDestroy, graph)
        call(driver.cuGraphUpload, executable, self.stream)
        return executable

    def replay(self, graph: Any) -> None:
        call(driver.cuGraphLaunch, graph, self.stream)

    def drop(self, graph: Any) -> None:
        call(driver.cuGraphExecDestroy, graph)

    # ---- time ----

    def event(self, timing: bool = False) -> Any:
        return call(driver.cuEventCreate, 0 if timing else _NO_TIMING)

    def record(self, event: Any) -> None:
        """Mark this point of the stream."""
        call(driver.cuEventRecord, event, self.stream)

    def record_in_graph(self, event: Any) -> None:
        """Within a capture: every replay marks its time at this point in `event`, which was made with `timing`."""
        call(driver.cuEventRecordWithFlags, event, self.stream, _EXTERNAL)

    def seconds(self, start: Any, end: Any) -> float:
        """Between two events with timing that are done."""
        return float(call(driver.cuEventElapsedTime, start, end)) * 1e-3

    def wait(self, event: Any) -> None:
        """Wait until everything before the last `record` of `event` is done; raises `DeviceTimeout`."""
        start = time.monotonic()
        while True:
            (status,) = driver.cuEventQuery(event)
            if status == driver.CUresult.CUDA_SUCCESS:
                return
            if status != driver.CUresult.CUDA_ERROR_NOT_READY:
                raise CudaError(f"cuEventQuery: {status.name}")
            waited = time.monotonic() - start
            if waited > STUCK_SECONDS:
                raise DeviceTimeout(f"{self.name}: a pass has not ended within {STUCK_SECONDS:g} seconds")
            if waited > _SPIN_SECONDS:
                time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Wait for the work on the stream, and give the context with all its memory back."""
        driver.cuStreamSynchronize(self.stream)  # a context that has failed refuses this; it is left anyway
        for address in self._pinned:
            driver.cuMemFreeHost(address)
        self._pinned.clear()
        driver.cuStreamDestroy(self.stream)
        driver.cuDevicePrimaryCtxRelease(self._handle)
