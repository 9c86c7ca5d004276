"""`all_gather`: the columns of every tensor-parallel rank, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.all_gather.tactics import TACTICS
from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec


class AllGather(Plugin):
    """x [T, N] of every rank -> [T, N * tp_world], rank r's block in columns r N .. r N + N - 1."""

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        x = Operands(self, inputs).take("x", ("T", "N"), *FLOATS)
        self.expect(attrs["tp_world"] >= 1, "tp_world", "1 or more ranks", attrs["tp_world"])
        return [TensorSpec((x.shape[0], x.shape[1] * attrs["tp_world"]), x.dtype)]

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.all_gather.reference import all_gather

        world = attrs["tp_world"]
        return lambda x: all_gather([x] if world == 1 else comm.all_gather(x))


PLUGIN = AllGather(
    name="all_gather",
    inputs=("x",),
    outputs=("y",),
    attrs={"tp_world": "int"},
    tactics=(REFERENCE, *TACTICS),
)
