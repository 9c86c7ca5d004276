"""What runs the phases of a plan. The step loop (`engine_runtime.decoder`) needs only this interface."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from plugins.core.plan import Plan


class Executor(Protocol):
    """One rank's plan with its memory. Persistent buffers are reached through `read` and `write` alone."""

    plan: Plan

    def run(self, phase: str) -> None:
        """Run every step of the phase with this key, e.g. "verify[16]"."""
        ...

    def read(self, name: str, at: int | slice = slice(None)) -> np.ndarray:
        """The buffer `name` (or what of it is at index or slice `at` of its first axis) after the last pass, in the
        storage dtype of its spec; not to be written, and of no use after the next pass or write."""
        ...

    def write(self, name: str, values: Any, at: int | slice = slice(None)) -> None:
        """Put `values` (array or scalar) in the buffer `name`, at index or slice `at` of its first axis."""
        ...

    def synchronize(self) -> None:
        """Wait for all passes that were started."""
        ...
