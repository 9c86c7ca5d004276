"""`kv_compact`: moves the KV of the accepted path to consecutive positions."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.kv_compact.tactics import TACTICS


class KvCompact(Plugin):
    """path_rows int32 [R, path], num_emitted and first_row int32 [R], row_slot int32 [T]; writes kv_pool [L,
    S, width].

    Row path_rows[r, i] goes to the slot of row first_row[r] + i. Nothing moves where the accepted path is
    the spine.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        operands.take("path_rows", ("R", "path"), "int32")
        operands.take("num_emitted", ("R",), "int32")
        operands.take("first_row", ("R",), "int32")
        operands.take("row_slot", ("T",), "int32")
        operands.take("kv_pool", ("L", "S", "width"), *FLOATS)
        return []

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        """The most that can move: every path row but the root, read and written."""
        path, _, _, _, pool = inputs
        if path is None or pool is None:
            return super().cost(attrs, inputs, outputs, context)
        return 2 * path.shape[0] * (path.shape[1] - 1) * (pool.nbytes // pool.shape[1]), 0

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.kv_compact.reference import kv_compact

        return kv_compact


PLUGIN = KvCompact(
    name="kv_compact",
    inputs=("path_rows", "num_emitted", "first_row", "row_slot", "kv_pool"),
    mutates=("kv_pool",),
    tactics=(REFERENCE, *TACTICS),
)
