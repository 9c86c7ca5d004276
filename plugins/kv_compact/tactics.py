"""CUDA tactic of `kv_compact`: a block a request and layer."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, MAX_SHARED_BYTES
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_VECTOR = 16  # bytes
_THREADS = 128
_STATIC = 2048  # bytes of shared memory beside what is staged


def _sizes(inputs: Inputs) -> tuple[int, int, TensorSpec, int]:
    """requests, path length, pool, bytes of an entry."""
    path, pool = inputs[0], inputs[4]
    assert path is not None and pool is not None
    return path.shape[0], path.shape[1], pool, pool.nbytes // (pool.shape[0] * pool.shape[1])


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    _, path, pool, entry = _sizes(inputs)
    if entry % _VECTOR:
        return f"kv_pool: expected entries of a multiple of {_VECTOR} bytes, found {pool}"
    if path * entry > MAX_SHARED_BYTES - _STATIC:
        return f"a path of {path} entries of {entry} bytes does not fit in shared memory"
    return None


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    requests, path, pool, entry = _sizes(inputs)
    constants = (("PATH", path), ("VECTORS", entry // _VECTOR), ("SLOTS", pool.shape[1]), ("THREADS", _THREADS))
    grid = (requests, pool.shape[0], 1)
    return (Launch("kv_compact/compact.cu", "compact", constants, grid, (_THREADS, 1, 1), smem=path * entry),)


TACTICS = (Tactic("staged", ARCHS, refuses=_refuses, launches=_launches),)
