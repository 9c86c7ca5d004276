"""`draft_topk`: a rank's best candidates of every draft depth, and the logsumexp that makes them
probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.draft_topk.tactics import TACTICS


class DraftTopk(Plugin):
    """logits float32 [B bs, V] -> candidates float32 [B (bs - 1), 2 K + 1]: K logits, K ids (int32 bits),
    logsumexp."""

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        block, top_k = attrs["block_size"], attrs["top_k"]
        self.expect(block >= 2, "block_size", "2 or more", block)
        self.expect(attrs["tp_rank"] >= 0, "tp_rank", "a rank, 0 or more", attrs["tp_rank"])
        operands = Operands(self, inputs)
        logits = operands.take("logits", ("rows", "V"), "float32")
        self.expect(operands["rows"] % block == 0, "logits", f"rows in multiples of block_size={block}", logits)
        self.expect(1 <= top_k <= operands["V"], "top_k", f"1 .. {operands['V']} (columns of a rank)", top_k)
        return [TensorSpec((operands["rows"] // block * (block - 1), 2 * top_k + 1), "float32")]

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.draft_topk.reference import draft_topk

        block, top_k, tp_rank = attrs["block_size"], attrs["top_k"], attrs["tp_rank"]
        return lambda logits: draft_topk(logits, block, top_k, tp_rank)


PLUGIN = DraftTopk(
    name="draft_topk",
    inputs=("logits",),
    outputs=("candidates",),
    attrs={"block_size": "int", "top_k": "int", "tp_rank": "int"},
    tactics=(REFERENCE, *TACTICS),
)
