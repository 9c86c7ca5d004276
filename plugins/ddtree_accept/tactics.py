"""CUDA tactic of `ddtree_accept`: a warp a request."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_THREADS = 256
_LANES = 32
_MOST_STAGED = 11_000  # path entries of all requests in shared memory
_REQUEST_ROWS, _STOP_IDS, _TOKEN_COUNTS = 6, 7, 19  # places among the inputs


def _sizes(attrs: Attrs, inputs: Inputs) -> tuple[int, int, int]:
    """requests, stop ids a request, vocabulary."""
    rows, stops, counts = (inputs[place] for place in (_REQUEST_ROWS, _STOP_IDS, _TOKEN_COUNTS))
    assert rows is not None and stops is not None and counts is not None
    return rows.shape[0], stops.shape[1], counts.shape[1]


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    requests, stops, _ = _sizes(attrs, inputs)
    if stops > _LANES:
        return f"stop_ids: expected up to {_LANES} a request, found {stops}"
    if requests * (attrs["path_length"] + 2) > _MOST_STAGED:
        return f"expected up to {_MOST_STAGED} path entries, found {requests} requests of {attrs['path_length']}"
    return None


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    requests, stops, vocab = _sizes(attrs, inputs)
    constants = (("REQUESTS", requests), ("PATH", attrs["path_length"]), ("STOPS", stops), ("VOCAB", vocab))
    return (Launch("ddtree_accept/accept.cu", "accept", constants, (1, 1, 1), (_THREADS, 1, 1)),)


TACTICS = (Tactic("warps", ARCHS, refuses=_refuses, launches=_launches),)
