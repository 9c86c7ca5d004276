"""Geometry of the kernels that give a block to each row of bfloat16 (plugins/core/device/rows.cuh)."""

from __future__ import annotations

from plugins.core.spec import TensorSpec

VECTOR = 8  # values of 16 bytes
_MOST_THREADS = 512
MOST_COLUMNS = 8 * VECTOR * _MOST_THREADS


def row_constants(columns: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """The macros VECTORS, PER and THREADS for rows of `columns` values, and the threads of a block."""
    vectors = columns // VECTOR
    per = -(-vectors // _MOST_THREADS)
    threads = -(-vectors // per)
    threads += -threads % 32
    return (("VECTORS", vectors), ("PER", per), ("THREADS", threads)), threads


def refuses_rows(*specs: TensorSpec | None) -> str | None:
    """Why rows of the last axis cannot be taken, None if they can."""
    for spec in specs:
        if spec is None:
            continue
        if spec.dtype != "bfloat16":
            return f"expected bfloat16, found {spec}"
        if spec.shape[-1] % VECTOR or spec.shape[-1] > MOST_COLUMNS:
            return f"expected rows of a multiple of {VECTOR} values, up to {MOST_COLUMNS}, found {spec}"
    return None
