"""CUDA tactic of `draft_topk`: segments of every row, then their merge."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_THREADS = 256
_MOST_PER_THREAD = 40  # values in registers
_MOST_TOP_K = 64


def _cut(attrs: Attrs, inputs: Inputs) -> tuple[int, int, int, int]:
    """rows, columns, segments, values a thread."""
    logits = inputs[0]
    assert logits is not None
    block = attrs["block_size"]
    rows, columns = logits.shape[0] // block * (block - 1), logits.shape[1]
    segments = -(-columns // (_THREADS * _MOST_PER_THREAD))
    per = -(-columns // (_THREADS * segments))
    return rows, columns, -(-columns // (_THREADS * per)), per


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    return f"top_k: expected up to {_MOST_TOP_K}, found {attrs['top_k']}" if attrs["top_k"] > _MOST_TOP_K else None


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """`Part` of topk.cuh for every row and segment."""
    rows, _, segments, _ = _cut(attrs, inputs)
    return rows * segments * (8 * attrs["top_k"] + 8)


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    rows, columns, segments, per = _cut(attrs, inputs)
    constants = (
        ("BLOCK", attrs["block_size"]),
        ("VOCAB", columns),
        ("TOP_K", attrs["top_k"]),
        ("SEGMENTS", segments),
        ("PER", per),
        ("FIRST", attrs["tp_rank"] * columns),
    )
    return (
        Launch("draft_topk/segments.cu", "segments", constants[:-1], (rows, segments, 1), (_THREADS, 1, 1)),
        Launch("draft_topk/merge.cu", "merge", constants, (rows, 1, 1), (_THREADS, 1, 1)),
    )


TACTICS = (Tactic("segments", ARCHS, refuses=_refuses, workspace=_workspace, launches=_launches),)
