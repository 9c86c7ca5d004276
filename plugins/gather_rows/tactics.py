"""CUDA tactic of `gather_rows`: a block a row and source."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.rows import refuses_rows, row_constants
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    return refuses_rows(*inputs[1:])


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    rows, *sources = inputs
    count = sum(source is not None for source in sources)
    assert rows is not None and sources[0] is not None
    constants, threads = row_constants(sources[0].shape[1])
    constants += (("COUNT", count),)
    return (Launch("gather_rows/gather.cu", "gather", constants, (rows.shape[0], count, 1), (threads, 1, 1)),)


TACTICS = (Tactic("rows", ARCHS, refuses=_refuses, launches=_launches),)
