"""`sample`: the token that follows each row, greedy or drawn with noise keyed by position."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import Operands, nbytes
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.sample.tactics import TACTICS

PER_REQUEST = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "penalized",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class Sample(Plugin):
    """logits float32 [T, V] -> token int32 [T]: SAMPLED_* where there is none to draw, 0 for padding.

    positions, row_request, row_masked, tokens?, row_parent? int32 [at least T]; temperature, top_p, min_p, *_penalty
    float32, top_k, penalized int32, seed int64 [R]; token_counts int32, logit_bias float32 [R, V]; vocab_mask uint32
    [at least T, V / 32]. With tokens and row_parent, the rows' ancestors of this pass count as generated.
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
        operands.take("penalized", ("R",), "int32")
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            operands.take(name, ("R",), "float32")
        operands.take("token_counts", ("R", "V"), "int32")
        operands.take("logit_bias", ("R", "V"), "float32")
        operands.take("row_masked", (">=T",), "int32")
        operands.take("vocab_mask", (">=T", -(-operands["V"] // 32)), "uint32")
        if operands.has("tokens") or operands.has("row_parent"):
            operands.take("tokens", (">=T",), "int32")
            operands.take("row_parent", (">=T",), "int32")
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
    inputs=(
        "logits",
        "positions",
        "row_request",
        *PER_REQUEST,
        "token_counts",
        "logit_bias",
        "row_masked",
        "vocab_mask",
        "tokens?",
        "row_parent?",
    ),
    outputs=("token",),
    tactics=(REFERENCE, *TACTICS),
)
