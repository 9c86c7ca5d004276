"""Packed weights on their way to the device: read once, hashed and uploaded while the next piece is being read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from blake3 import blake3

from engine_runtime.engine import Engine, WeightsFile
from engine_runtime.executor.device import Device
from plugins.core.engine_file import EngineError
from plugins.core.plan import ARENA_ALIGNMENT, Weight
from plugins.core.splat import splat_launch

_PIECE = 64 << 20  # bytes of one read, hash and copy
_PIECES = 3  # one being read, one being hashed, one on its way
_READERS = 4  # threads that share a piece: what a fast disk takes to reach its rate
Fraction = Callable[[float], None]


class WeightSource(Protocol):
    """Where a rank's weights come from."""

    nbytes: int  # of device memory

    def upload(self, device: Device, cubins: Mapping[str, bytes], progress: Fraction) -> dict[str, int]:
        """Put all weights on the device; gives their addresses by name. Raises `EngineError`."""
        ...


def weight_source(engine: Engine) -> WeightSource:
    """Of an engine that was loaded without mapping its weights."""
    return SplatWeights(engine.plan.weights) if engine.weights_file is None else FileWeights(engine.weights_file)


class SplatWeights:
    """Synthetic weights, made on the device by `plugins.core.splat`."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self.nbytes = sum(_aligned(weight.spec.nbytes) for weight in weights.values())

    def upload(self, device: Device, cubins: Mapping[str, bytes], progress: Fraction) -> dict[str, int]:
        base, at = device.allocate(self.nbytes), 0
        addresses = {}
        for name, weight in self._weights.items():
            launch = splat_launch(name, weight.spec)
            addresses[name] = base + at
            device.kernel(launch, cubins[launch.image]).start((base + at,), int(device.stream))
            at += _aligned(weight.spec.nbytes)
            progress(at / self.nbytes)
        return addresses


class FileWeights:
    """A weights file, copied as it is from its first tensor on: the packed layout is the device's."""

    def __init__(self, file: WeightsFile) -> None:
        self._file = file
        self._start = min((entry.start for entry in file.tensors.values()), default=file.size)
        self.nbytes = file.size - self._start

    def upload(self, device: Device, cubins: Mapping[str, bytes], progress: Fraction) -> dict[str, int]:
        file = self._file
        base = device.allocate(self.nbytes)
        hasher = None if file.digest is None else blake3(max_threads=blake3.AUTO)
        try:
            with open(file.path, "rb", buffering=0) as opened, ThreadPoolExecutor(_READERS) as readers:
                self._stream(opened.fileno(), base, device, readers, hasher, progress)
        except OSError as error:
            raise EngineError(f"{file.path}: cannot be read: {error.strerror}") from None
        if hasher is not None and hasher.hexdigest() != file.digest:
            raise EngineError(
                f"{file.path}: content differs from what was built (BLAKE3 {file.digest}, found "
                f"{hasher.hexdigest()}): rebuild with `rm {file.path}; {file.again}`"
            )
        return {name: base + entry.start - self._start for name, entry in file.tensors.items()}

    def _stream(
        self,
        descriptor: int,
        base: int,
        device: Device,
        readers: ThreadPoolExecutor,
        hasher: blake3 | None,
        progress: Fraction,
    ) -> None:
        size = self._file.size
        buffers = [device.pinned(_PIECE) for _ in range(_PIECES)]
        copied = [device.event() for _ in range(_PIECES)]
        pieces = [(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]

        def read(index: int) -> list[Future[None]]:
            start, end = pieces[index]
            device.wait(copied[index % _PIECES])  # the copy out of this buffer, three pieces ago
            into = memoryview(buffers[index % _PIECES].data)
            share = -(-(end - start) // _READERS)
            parts = [(at, min(at + share, end)) for at in range(start, end, share)]
            return [readers.submit(_read, descriptor, a, into[a - start : b - start]) for a, b in parts]

        waiting = read(0) if pieces else []
        for index, (start, end) in enumerate(pieces):
            for part in waiting:
                part.result()
            waiting = read(index + 1) if index + 1 < len(pieces) else []
            piece = buffers[index % _PIECES][: end - start]
            skip = max(self._start - start, 0)  # the header stays here
            if skip < len(piece):
                device.upload(base + start + skip - self._start, piece[skip:])
            device.record(copied[index % _PIECES])
            if hasher is not None:
                hasher.update(piece.data)
            progress(end / size)
        for event in copied:
            device.wait(event)


def _read(descriptor: int, at: int, into: memoryview) -> None:
    while into:
        count = os.preadv(descriptor, [into], at)
        if count == 0:
            raise OSError(0, "it ends too early")
        into, at = into[count:], at + count


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
