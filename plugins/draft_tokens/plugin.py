"""`draft_tokens`: the token ids that a DFlash block starts from."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.draft_tokens.tactics import TACTICS


class DraftTokens(Plugin):
    """draft_requests i32 [B], anchor i32 [R] -> ids i32 [B block_size]."""

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        operands.take("draft_requests", ("B",), "int32")
        operands.take("anchor", ("R",), "int32")
        return [TensorSpec((operands["B"] * attrs["block_size"],), "int32")]

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.draft_tokens.reference import draft_tokens

        return lambda requests, anchor: draft_tokens(requests, anchor, attrs["block_size"], attrs["mask_token_id"])


PLUGIN = DraftTokens(
    name="draft_tokens",
    inputs=("draft_requests", "anchor"),
    outputs=("tokens",),
    attrs={"block_size": "int", "mask_token_id": "int"},
    tactics=(REFERENCE, *TACTICS),
)
