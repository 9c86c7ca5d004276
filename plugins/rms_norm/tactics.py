"""CUDA tactic of `rms_norm`: a block a row."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.rows import refuses_rows, row_constants
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    return refuses_rows(*inputs)


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    x = inputs[0]
    assert x is not None
    constants, threads = row_constants(x.shape[1])
    constants += (("EPS", float_bits(attrs["eps"])),)
    return (Launch("rms_norm/norm.cu", "rms_norm", constants, (x.shape[0], 1, 1), (threads, 1, 1)),)


TACTICS = (Tactic("rows", ARCHS, refuses=_refuses, launches=_launches),)
