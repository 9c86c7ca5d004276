"""CUDA tactic of `all_gather`: NCCL, then the ranks' blocks side by side."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_THREADS = 256


def _row_bytes(inputs: Inputs) -> tuple[TensorSpec, int]:
    x = inputs[0]
    assert x is not None
    return x, x.nbytes // x.shape[0]


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    x, row = _row_bytes(inputs)
    return f"expected rows of a multiple of 4 bytes, found {x}" if row % 4 else None


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    x, _ = _row_bytes(inputs)
    return x.nbytes * int(attrs["tp_world"])


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    x, row = _row_bytes(inputs)
    world, vector = attrs["tp_world"], row % 16 == 0
    constants = (
        ("WORLD", world),
        ("ROWS", x.shape[0]),
        ("VECTOR", int(vector)),
        ("UNITS", row // (16 if vector else 4)),
    )
    return (Launch("all_gather/interleave.cu", "interleave", constants, (x.shape[0], world, 1), (_THREADS, 1, 1)),)


TACTICS = (Tactic("nccl", ARCHS, refuses=_refuses, workspace=_workspace, launches=_launches),)
