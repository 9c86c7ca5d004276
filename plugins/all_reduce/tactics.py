"""CUDA tactics of `all_reduce`: addition and norm by a block a row, after NCCL where there are several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.rows import refuses_rows, row_constants
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]


def _refuses_one(attrs: Attrs, inputs: Inputs) -> str | None:
    if attrs["tp_world"] != 1:
        return f"expected tp_world 1, found {attrs['tp_world']}"
    return refuses_rows(*inputs)


def _refuses_many(attrs: Attrs, inputs: Inputs) -> str | None:
    return refuses_rows(*inputs)


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """The sum over the ranks, as the transport leaves it."""
    assert inputs[0] is not None
    return inputs[0].nbytes


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
    assert x is not None
    constants, threads = row_constants(x.shape[1])
    constants += (
        ("EPS", float_bits(attrs["eps"])),
        ("REDUCED", int(attrs["tp_world"] > 1)),
        ("FUSED", int(residual is not None)),
    )
    return (Launch("all_reduce/add_norm.cu", "add_norm", constants, (x.shape[0], 1, 1), (threads, 1, 1)),)


TACTICS = (
    Tactic("rows", ARCHS, refuses=_refuses_one, launches=_launches),
    Tactic("nccl", ARCHS, refuses=_refuses_many, workspace=_workspace, launches=_launches),
)
