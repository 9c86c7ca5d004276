"""CUDA tactic of `draft_kv_append`: a warp a row and head."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.rope import inv_freq_of
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_WARPS = 4


def rope_constants(attrs: Attrs) -> tuple[tuple[str, int | str], ...]:
    """EPS, AMPLITUDE and INV_FREQ of a head of `head_dim` values."""
    values = inv_freq_of(attrs, attrs["head_dim"]).tolist()
    return (
        ("EPS", float_bits(attrs["eps"])),
        ("AMPLITUDE", float_bits(attrs["rope_amplitude"])),
        ("INV_FREQ", ",".join(f"{float_bits(value)}u" for value in values)),
    )


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    for spec in (inputs[0], inputs[1], inputs[4]):
        if spec is None or spec.dtype != "bfloat16":
            return f"takes bfloat16 operands, found {spec}"
    return None


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    kv, pool = inputs[0], inputs[4]
    assert kv is not None and pool is not None
    rows, heads = kv.shape[0], attrs["num_kv_heads"]
    sizes = (("ROWS", rows), ("HEADS", heads), ("DIM", attrs["head_dim"]), ("SLOTS", pool.shape[2]))
    grid = (-(-rows * heads // _WARPS), 1, 1)
    constants = (*sizes, *rope_constants(attrs))
    source = "draft_kv_append/append.cu"
    return (Launch(source, "append", constants, grid, (32 * _WARPS, 1, 1), scalars=(attrs["layer"],)),)


TACTICS = (Tactic("warps", ARCHS, refuses=_refuses, launches=_launches),)
