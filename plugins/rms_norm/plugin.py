"""`rms_norm`: root mean square normalisation with a learned scale."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.rms_norm.tactics import TACTICS


class RmsNorm(Plugin):
    """weight * cast(x / sqrt(mean(x^2) + eps)) over the last axis, rounded as in `reference.rms_norm`."""

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        x = operands.take("x", ("T", "H"), *FLOATS)
        operands.take("weight", ("H",), *FLOATS)
        return [x]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        moved, _ = super().cost(attrs, inputs, outputs, context)
        return moved, 4 * outputs[0].numel

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.rms_norm.reference import rms_norm

        eps = attrs["eps"]
        return lambda x, weight: rms_norm(x, weight, eps)


PLUGIN = RmsNorm(
    name="rms_norm",
    inputs=("x", "weight"),
    outputs=("y",),
    attrs={"eps": "float"},
    tactics=(REFERENCE, *TACTICS),
)
