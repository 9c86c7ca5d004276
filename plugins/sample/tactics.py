"""CUDA tactic of `sample`: the largest score of splits of every row, draws over splits, then a block a row."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, MULTIPROCESSORS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_THREADS, _LAST_THREADS = 256, 1024
_PARTIAL = 16  # bytes
_LEAST_PER_THREAD, _MOST_SPLITS = 4, 128


def _sizes(inputs: Inputs) -> tuple[int, int, int]:
    """rows, vocabulary, words of a mask row."""
    logits, mask = inputs[0], inputs[15]
    assert logits is not None and mask is not None
    return logits.shape[0], logits.shape[1], mask.shape[1]


def _splits(rows: int, vocab: int, arch: str) -> int:
    """So many that two blocks a multiprocessor are busy, while a thread still has a few values."""
    wanted = -(-2 * MULTIPROCESSORS[arch] // rows)
    return max(1, min(wanted, vocab // (_THREADS * _LEAST_PER_THREAD), _MOST_SPLITS))


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """Two sets of partial results for every split, and a list of keys for every row."""
    rows, vocab, _ = _sizes(inputs)
    return 2 * rows * _MOST_SPLITS * _PARTIAL + 8 * rows * vocab


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    rows, vocab, words = _sizes(inputs)
    splits = _splits(rows, vocab, arch)
    has_parents = len(inputs) > 17 and inputs[17] is not None
    constants = (
        ("TOKENS", rows),
        ("VOCAB", vocab),
        ("WORDS", words),
        ("SPLITS", splits),
        ("ANCESTORS", int(has_parents)),
    )
    return (
        Launch("sample/largest.cu", "largest", constants, (splits, rows, 1), (_THREADS, 1, 1)),
        Launch("sample/draw.cu", "draw", constants, (splits, rows, 1), (_THREADS, 1, 1)),
        Launch("sample/finish.cu", "finish", constants, (rows, 1, 1), (_LAST_THREADS, 1, 1)),
    )


TACTICS = (Tactic("splits", ARCHS, workspace=_workspace, launches=_launches),)
