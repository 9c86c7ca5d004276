"""`ddtree_accept`: which tokens a verify pass emits, and the state of every request after it."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.ddtree_accept.tactics import TACTICS

MUTATED = (
    "context_len",
    "anchor",
    "remaining",
    "emitted",
    "num_emitted",
    "path_rows",
    "finish",
    "append_rows",
    "append_positions",
    "append_slots",
    "token_counts",
)


class DdtreeAccept(Plugin):
    """sampled int32 [T], the tree's row buffers int32 [at least T] and the requests' state, advanced in
    place.

    emitted and path_rows are [R, path_length], stop_ids [R, ids], append_* at least R * path_length long,
    token_counts [R, V].
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        path = attrs["path_length"]
        self.expect(path >= 1, "path_length", "1 or more", path)
        operands = Operands(self, inputs)
        operands.take("sampled", ("T",), "int32")
        for name in ("tokens", "row_parent", "positions", "row_slot"):
            operands.take(name, (">=T",), "int32")
        for name in (
            "first_row",
            "request_rows",
            "context_len",
            "anchor",
            "remaining",
            "num_emitted",
            "finish",
            "penalized",
        ):
            operands.take(name, ("R",), "int32")
        operands.take("stop_ids", ("R", "ids"), "int32")
        operands.take("emitted", ("R", path), "int32")
        operands.take("path_rows", ("R", path), "int32")
        operands.take("token_counts", ("R", "V"), "int32")
        entries = operands["R"] * path
        for name in ("append_rows", "append_positions", "append_slots"):
            spec = operands.take(name, ("A",), "int32")
            self.expect(spec.numel >= entries, name, f"at least {entries} entries (R * path_length)", spec)
        return []

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.ddtree_accept.reference import ddtree_accept

        path = attrs["path_length"]
        return lambda *operands: ddtree_accept(*(operand.numpy() for operand in operands), path_length=path)


PLUGIN = DdtreeAccept(
    name="ddtree_accept",
    inputs=(
        "sampled",
        "tokens",
        "row_parent",
        "positions",
        "row_slot",
        "first_row",
        "request_rows",
        "stop_ids",
        "penalized",
        *MUTATED,
    ),
    attrs={"path_length": "int"},
    mutates=MUTATED,
    tactics=(REFERENCE, *TACTICS),
)
