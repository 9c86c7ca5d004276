"""Transports between the ranks of a CUDA engine: NCCL, and what stands in for it where there are no other ranks.

A step with the tactic "nccl" leaves its collective to the executor: it goes from the step's first input to its
workspace, before the step's kernels.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any, Protocol

from engine_runtime.executor.device import Device
from plugins.core.spec import TensorSpec

_ID_BYTES = 128
_SUM = 0
_DTYPES = {"bfloat16": 9, "float32": 7, "int32": 2, "uint8": 1}  # ncclDataType_t


class CollectiveError(Exception):
    """NCCL is missing or refuses a call; the message says which and why."""


class Collectives(Protocol):
    """Collectives on a device's stream, captured into graphs like kernels."""

    world: int
    in_place: tuple[str, ...]  # operators whose kernels may read their input, as there is nothing to wait for

    def run(self, plugin: str, source: int, target: int, spec: TensorSpec, device: Device) -> None:
        """all_reduce: target = sum over the ranks of the tensor `spec` at source. all_gather: target = those tensors
        one after the other, in rank order."""
        ...

    def close(self) -> None: ...


class SingleRank:
    """Of an engine with one rank, whose plan holds no collective."""

    world = 1
    in_place: tuple[str, ...] = ()

    def run(self, plugin: str, source: int, target: int, spec: TensorSpec, device: Device) -> None:
        raise CollectiveError(f"{plugin}: a plan for one rank has no collectives, rebuild the engine")

    def close(self) -> None:
        pass


class StandIn:
    """In place of `world` - 1 ranks that do not exist, for measurements of one: a sum is this rank's part, a gathered
    tensor has it once for every rank.

    The results are not those of the model; times leave out what the links between GPUs would take.
    """

    in_place: tuple[str, ...] = ("all_reduce",)

    def __init__(self, world: int) -> None:
        self.world = world

    def run(self, plugin: str, source: int, target: int, spec: TensorSpec, device: Device) -> None:
        for rank in range(self.world):
            device.copy(target + rank * spec.nbytes, source, spec.nbytes)

    def close(self) -> None:
        pass


class Nccl:
    """NCCL between `world` processes, which meet through the file `store` (rank 0 writes it).

    Sums are the same bits on every rank: NCCL adds each piece once, on one rank, and hands it round.
    """

    in_place: tuple[str, ...] = ()

    def __init__(self, rank: int, world: int, store: Path, device: Device, timeout: float) -> None:
        self.world = world
        self._library = _load_nccl()
        unique = ctypes.create_string_buffer(_ID_BYTES)
        if rank == 0:
            self._call("ncclGetUniqueId", unique)
            part = store.with_suffix(".part")
            part.write_bytes(unique.raw)
            os.replace(part, store)
        else:
            unique.raw = _wait_for(store, timeout)
        self._comm = ctypes.c_void_p()

        class UniqueId(ctypes.Structure):
            _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)

        self._call("ncclCommInitRank", ctypes.byref(self._comm), world, UniqueId.from_buffer(unique), rank)

    def run(self, plugin: str, source: int, target: int, spec: TensorSpec, device: Device) -> None:
        pointers = (ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_size_t(spec.numel))
        last = (self._comm, ctypes.c_void_p(int(device.stream)))
        if plugin == "all_reduce":
            self._call("ncclAllReduce", *pointers, _DTYPES[spec.dtype], _SUM, *last)
        else:
            self._call("ncclAllGather", *pointers, _DTYPES[spec.dtype], *last)

    def close(self) -> None:
        if self._comm:
            self._library.ncclCommAbort(self._comm)  # does not wait for ranks that are gone
            self._comm = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise CollectiveError(f"{name}: {self._library.ncclGetErrorString(status).decode()}")


def _load_nccl() -> ctypes.CDLL:
    """libnccl of the package nvidia-nccl-cu13, else the system's."""
    names = ["libnccl.so.2"]
    try:
        import nvidia.nccl

        names[:0] = [str(Path(folder) / "lib" / "libnccl.so.2") for folder in nvidia.nccl.__path__]
    except ImportError:
        pass
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reason = str(error)
    raise CollectiveError(f"an engine of several ranks needs NCCL: {reason}: pip install nvidia-nccl-cu13")


def _wait_for(store: Path, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.is_file():
            return store.read_bytes()
        time.sleep(0.01)
    raise CollectiveError(f"rank 0 has not opened its group within {timeout:g} seconds")
