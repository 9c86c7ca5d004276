"""`gather_rows`: chosen rows of one or several tensors, concatenated along columns."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.gather_rows.tactics import TACTICS

MAX_SOURCES = 8


class GatherRows(Plugin):
    """y[a] = x0[rows[a]] | x1[rows[a]] | ...; zeros where rows[a] is -1.

    rows int32 [A], every x [T, H] of one dtype -> [A, H * count].
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        operands.take("rows", ("A",), "int32")
        x0 = operands.take("x0", ("T", "H"), *FLOATS)
        count = 1
        while count < MAX_SOURCES and operands.has(f"x{count}"):
            operands.take(f"x{count}", ("T", "H"), x0.dtype)
            count += 1
        for index in range(count, MAX_SOURCES):
            operands.refuse(f"x{index}", f"x{count} is absent")
        return [TensorSpec((operands["A"], operands["H"] * count), x0.dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        return 4 * outputs[0].shape[0] + 2 * outputs[0].nbytes, 0

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.gather_rows.reference import gather_rows

        return lambda rows, *xs: gather_rows(rows, [x for x in xs if x is not None])


PLUGIN = GatherRows(
    name="gather_rows",
    inputs=("rows", "x0", *(f"x{i}?" for i in range(1, MAX_SOURCES))),
    outputs=("y",),
    tactics=(REFERENCE, *TACTICS),
)
