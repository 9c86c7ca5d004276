"""`embed`: rows of the embedding table, which is split over ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.embed.tactics import TACTICS


class Embed(Plugin):
    """x[t] = table[tokens[t] - tp_rank * V], or zeros where this rank does not hold the id, so that the
    sum over ranks is the embedding. tokens int32 [T], table [V, H] -> [T, H] in `out_dtype`, the plan's
    activation dtype: this is where it enters the graph.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        operands.take("tokens", ("T",), "int32")
        operands.take("table", ("V", "H"), *FLOATS)
        out_dtype = attrs["out_dtype"]
        self.expect(out_dtype in FLOATS, "out_dtype", f"one of {FLOATS}", repr(out_dtype))
        self.expect(attrs["tp_rank"] >= 0, "tp_rank", "a rank, 0 or more", attrs["tp_rank"])
        return [TensorSpec((operands["T"], operands["H"]), out_dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        rows, table = outputs[0].shape[0], inputs[1]
        read = 0 if table is None else rows * table.nbytes // table.shape[0]  # the rows that are looked up
        return 4 * rows + read + outputs[0].nbytes, 0

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.embed.reference import embed

        tp_rank = attrs["tp_rank"]
        return lambda tokens, table: embed(tokens, table, tp_rank)


PLUGIN = Embed(
    name="embed",
    inputs=("tokens", "table"),
    outputs=("x",),
    attrs={"tp_rank": "int", "out_dtype": "str"},
    tactics=(REFERENCE, *TACTICS),
)
