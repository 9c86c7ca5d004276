"""`ddtree_build`: the draft tree of every active request, as the row buffers of the next verify pass."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.ddtree_build.tactics import TACTICS

PER_ROW = ("tokens", "positions", "row_request", "row_parent", "row_slot")


class DdtreeBuild(Plugin):
    """candidates? float32 [B D, world (2 K + 1)] and the requests' state -> row buffers, written in place.

    Without candidates every tree is its root (plain decoding). mask.shape[0] is the most rows of the pass.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        depth, top_k, world = attrs["draft_depth"], attrs["top_k"], attrs["tp_world"]
        self.expect(attrs["page_size"] >= 1, "page_size", "1 or more", attrs["page_size"])
        self.expect(depth >= 0, "draft_depth", "0 or more", depth)
        operands = Operands(self, inputs)
        operands.take("draft_requests", ("B",), "int32")
        if operands.has("candidates"):
            self.expect(depth >= 1 and top_k >= 1, "candidates", "draft_depth and top_k of 1 or more", (depth, top_k))
            operands.take("candidates", (operands["B"] * depth, world * (2 * top_k + 1)), "float32")
        for name in (
            "active",
            "anchor",
            "context_len",
            "tree_budget",
            "tree_width",
            "first_row",
            "request_rows",
        ):
            operands.take(name, ("R",), "int32")
        operands.take("block_table", ("R", "pages"), "int32")
        operands.take("tree_cost", ("R", "costs"), "float32")
        operands.take("calibration", ("R", max(1, depth)), "float32")
        mask = operands.take("mask", ("max_rows", "words"), "uint32")
        enough = 32 * operands["words"] >= operands["max_rows"]
        self.expect(enough, "mask", f"a bit for each of {operands['max_rows']} rows", mask)
        for name in PER_ROW:
            operands.take(name, (">=max_rows",), "int32")
        operands.take("row_log_weight", (">=max_rows",), "float32")
        operands.take("num_rows", (1,), "int32")
        return []

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.ddtree_build.reference import ddtree_build

        depth, top_k, page_size = attrs["draft_depth"], attrs["top_k"], attrs["page_size"]
        return lambda candidates, *buffers: ddtree_build(
            None if candidates is None else candidates.numpy(),
            *(buffer.numpy() for buffer in buffers),
            draft_depth=depth,
            top_k=top_k,
            page_size=page_size,
        )


PLUGIN = DdtreeBuild(
    name="ddtree_build",
    inputs=(
        "candidates?",
        "draft_requests",
        "active",
        "anchor",
        "context_len",
        "block_table",
        "tree_budget",
        "tree_cost",
        "calibration",
        "tree_width",
        *PER_ROW,
        "mask",
        "row_log_weight",
        "first_row",
        "request_rows",
        "num_rows",
    ),
    attrs={"draft_depth": "int", "top_k": "int", "page_size": "int", "tp_world": "int"},
    mutates=(*PER_ROW, "mask", "row_log_weight", "first_row", "request_rows", "num_rows"),
    tactics=(REFERENCE, *TACTICS),
)
