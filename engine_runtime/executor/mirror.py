"""The small buffers of an engine on the device, and their image in pinned host memory.

The step loop reads and writes the image; what it has written goes up in one copy before the next pass, and what a pass
writes comes down in one copy at the end of its graph. So a step costs two copies of a few kilobytes, whatever the
number of buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine_runtime.executor.device import Device
from plugins.core.plan import ARENA_ALIGNMENT
from plugins.core.spec import DTYPES, TensorSpec

Span = tuple[int, int]  # first byte and the one after the last


class Mirror:
    """Buffers `specs` on `device`; `written` tells for each phase which of them it writes.

    The image holds what the device holds, but for host writes that wait for `flush` and for the results of a pass that
    is still running: `read` and `write` wait for that pass.
    """

    def __init__(self, device: Device, specs: Mapping[str, TensorSpec], written: Mapping[str, set[str]]) -> None:
        self._device = device
        # buffers that the same phases write lie together, those that only the host writes at the end
        phases = {name: tuple(phase for phase in written if name in written[phase]) for name in specs}
        ordered = sorted(specs, key=lambda name: (not phases[name], phases[name]))
        self._spans: dict[str, Span] = {}
        size = 0
        for name in ordered:
            self._spans[name] = (size, size + specs[name].nbytes)
            size += -(-specs[name].nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        self.nbytes = size
        self._address = device.allocate(size)
        device.fill(self._address, 0, size)
        self._bytes = device.pinned(size)
        self._views = {
            name: self._bytes[slice(*self._spans[name])].view(DTYPES[spec.dtype][1]).reshape(spec.shape)
            for name, spec in specs.items()
        }
        self._read_only = {name: view.view() for name, view in self._views.items()}
        for view in self._read_only.values():
            view.flags.writeable = False
        self._host_only = {name for name in specs if not phases[name]}
        self._results = {phase: self._hull(names & set(specs)) for phase, names in written.items()}
        self._dirty: dict[str, None] = {}
        self._event = device.event()
        self._busy = False

    def address(self, name: str) -> int:
        """Of the buffer `name` on the device."""
        return self._address + self._spans[name][0]

    def read(self, name: str) -> np.ndarray:
        """The buffer after the last pass, not to be written; it stays as it is until the next pass or write."""
        self._settle()
        return self._read_only[name]

    def write(self, name: str, values: Any, at: int | slice) -> None:
        self._settle()
        self._views[name][at] = values
        self._dirty[name] = None

    def flush(self) -> None:
        """Send what was written to the device, before a pass."""
        if not self._dirty:
            return
        names = set(self._dirty)
        spans = [self._spans[name] for name in sorted(names - self._host_only)]
        hull = self._hull(names & self._host_only)  # one copy: between them is nothing that the device changes
        for start, end in spans if hull is None else [*spans, hull]:
            self._device.upload(self._address + start, self._bytes[start:end])
        self._dirty.clear()
        self._mark()

    def fetch(self, phase: str) -> None:
        """Within the capture of `phase`, at its end: bring down what it has written."""
        span = self._results[phase]
        if span is not None:
            self._device.download(self._bytes[slice(*span)], self._address + span[0])

    def ran(self, phase: str) -> None:
        """The graph of `phase` was started."""
        if self._results[phase] is not None:
            self._mark()

    def _hull(self, names: set[str]) -> Span | None:
        if not names:
            return None
        return min(self._spans[name][0] for name in names), max(self._spans[name][1] for name in names)

    def _mark(self) -> None:
        self._device.record(self._event)
        self._busy = True

    def _settle(self) -> None:
        """No copy reads or writes the image any more."""
        if self._busy:
            self._device.wait(self._event)
            self._busy = False
