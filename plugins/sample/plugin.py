"""`sample`: the token that follows each row, greedy or drawn with noise keyed by position."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import Operands, nbytes
from plugins.core.plugin import Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec


class Sample(Plugin):
    """logits float32 [T, V] -> token int32 [T]: -1 where a row has no distribution (NaN), 0 for padding.

    positions, row_request int32 [at least T]; temperature, top_p, min_p float32, top_k int32, seed int64 [R].
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        operands.take("logits", ("T", "V"), "float32")
        operands.take("positions", (">=T",), "int32")
        operands.take("row_request", (">=T",), "int32")
        operands.take("temperature", ("R",), "float32")
        operands.take("top_k", ("R",), "int32")
        operands.take("top_p", ("R",), "float32")
        operands.take("min_p", ("R",), "float32")
        operands.take("seed", ("R",), "int64")
        return [TensorSpec((operands["T"],), "int32")]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        return nbytes(inputs[:1]), 0

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.sample.reference import sample

        return sample


PLUGIN = Sample(
    name="sample",
    inputs=("logits", "positions", "row_request", "temperature", "top_k", "top_p", "min_p", "seed"),
    outputs=("token",),
)
