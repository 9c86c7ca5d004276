"""`dense_gemm`: y = x W^T, optionally with SiLU(gate) * up on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.dense_gemm.pack import INTERLEAVE
from plugins.dense_gemm.tactics import TACTICS

if TYPE_CHECKING:
    import torch

ACTIVATIONS = ("none", "silu_mul")
OUT_DTYPES = ("activation", "float32")


class DenseGemm(Plugin):
    """x [T, K], weight [N, K] -> [T, N], or [T, N / 2] with activation "silu_mul".

    With silu_mul the rows of the packed weight alternate in blocks of 16: gate rows, then the up rows of the
    same outputs (`pack.INTERLEAVE`), so that the 32 rows of one kernel tile hold both halves of 16 outputs.
    out_dtype "activation" is the dtype of x; "float32" keeps the accumulator (logits).
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        activation, out_dtype = attrs["activation"], attrs["out_dtype"]
        self.expect(activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", repr(activation))
        self.expect(out_dtype in OUT_DTYPES, "out_dtype", f"one of {OUT_DTYPES}", repr(out_dtype))
        operands = Operands(self, inputs)
        x = operands.take("x", ("T", "K"), *FLOATS)
        weight = operands.take("weight", ("N", "K"), *FLOATS)
        columns = operands["N"]
        if activation == "silu_mul":
            block = 2 * INTERLEAVE
            self.expect(columns % block == 0, "weight", f"rows in multiples of {block} for silu_mul", weight)
            columns //= 2
        return [TensorSpec((operands["T"], columns), "float32" if out_dtype == "float32" else x.dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        moved, _ = super().cost(attrs, inputs, outputs, context)
        weight = inputs[1]
        return moved, 0 if weight is None else 2 * outputs[0].shape[0] * weight.numel

    def prepare(self, attrs: Attrs, operand: str, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        """The weight in `dtype`; for silu_mul with rows de-interleaved: all gate rows, then all up rows."""
        dense = super().prepare(attrs, operand, weight, dtype)
        if attrs["activation"] == "silu_mul":
            blocks = dense.reshape(-1, 2, INTERLEAVE, dense.shape[1])
            return blocks.transpose(0, 1).reshape(dense.shape)
        return dense

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.dense_gemm.reference import gemm, gemm_silu_mul

        body = gemm_silu_mul if attrs["activation"] == "silu_mul" else gemm
        widen = attrs["out_dtype"] == "float32"
        return lambda x, weight: body(x, weight, widen)


PLUGIN = DenseGemm(
    name="dense_gemm",
    inputs=("x", "weight"),
    outputs=("y",),
    attrs={"activation": "str", "out_dtype": "str"},
    tactics=(REFERENCE, *TACTICS),
)
