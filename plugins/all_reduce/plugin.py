"""`all_reduce`: sum over tensor-parallel ranks, alone or fused with the residual add and the next RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.all_reduce.tactics import TACTICS
from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec


class AllReduce(Plugin):
    """x [T, H] of every rank -> their sum; with residual [T, H] and norm_weight [H] (both or neither):
    (h = residual + sum, rms_norm(h, norm_weight, eps)). Without them there is one output, and no eps.

    The sum runs in rank order on every rank, so that the result, and with it the routing of the experts, is
    bit-identical everywhere.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        x = operands.take("x", ("T", "H"), *FLOATS)
        self.expect(attrs["tp_world"] >= 1, "tp_world", "1 or more ranks", attrs["tp_world"])
        if not operands.has("residual"):
            operands.refuse("norm_weight", "it comes with residual only")
            return [x]
        operands.take("residual", ("T", "H"), x.dtype)
        operands.take("norm_weight", ("H",), *FLOATS)
        return [x, x]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        """This rank's memory and arithmetic; what goes over the links is modelled by the caller."""
        moved, _ = super().cost(attrs, inputs, outputs, context)
        norm = 5 if len(outputs) == 2 else 0
        return moved, (attrs["tp_world"] - 1 + norm) * outputs[0].numel

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.all_reduce.reference import all_reduce, all_reduce_norm

        world, eps = attrs["tp_world"], attrs["eps"]

        def run(x, residual=None, norm_weight=None):  # type: ignore[no-untyped-def]
            parts = [x] if world == 1 else comm.all_gather(x)
            if residual is None:
                return all_reduce(parts)
            return all_reduce_norm(parts, residual, norm_weight, eps)

        return run


PLUGIN = AllReduce(
    name="all_reduce",
    inputs=("x", "residual?", "norm_weight?"),
    outputs=("sum", "normed?"),
    attrs={"eps": "float", "tp_world": "int"},
    tactics=(REFERENCE, *TACTICS),
)
