"""CUDA tactic of `embed`: a block a row."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.rows import refuses_rows, row_constants
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    if attrs["out_dtype"] != "bfloat16":
        return f"out_dtype: expected bfloat16, found {attrs['out_dtype']}"
    return refuses_rows(inputs[1])


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    tokens, table = inputs
    assert tokens is not None and table is not None
    constants, threads = row_constants(table.shape[1])
    constants += (("ROWS", table.shape[0]), ("FIRST", attrs["tp_rank"] * table.shape[0]))
    return (Launch("embed/embed.cu", "embed", constants, (tokens.shape[0], 1, 1), (threads, 1, 1)),)


TACTICS = (Tactic("rows", ARCHS, refuses=_refuses, launches=_launches),)
