"""`int4_marlin_gemm`: the routed experts, int4 weights with bfloat16 group scales, grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.int4_marlin_gemm.pack import STAGES, TILE, TILE_BYTES
from plugins.int4_marlin_gemm.tactics import TACTICS

if TYPE_CHECKING:
    import torch


class Int4MarlinGemm(Plugin):
    """One of the two stages of the routed experts; the weight is packed as `pack` describes.

    gate_up: x [T, H] -> [T k, I]: row t k + j is silu(gate) * up of token t's j-th expert, zero without one.
    down: x [T k, I], route_weights float32 [T, k], shared? [T, H] -> [T, H]: the sum over j of
    route_weights[t, j] * (down x[t k + j]), plus shared[t].
    expert_offsets int32 [E + 1] and sorted_routes int32 [T k] are those of `moe_route`.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        stage, top_k = attrs["stage"], attrs["top_k"]
        self.expect(stage in STAGES, "stage", f"one of {STAGES}", repr(stage))
        self.expect(top_k >= 1, "top_k", "1 or more", top_k)
        operands = Operands(self, inputs)
        operands.take("weight", ("E", "N/32", "K/32", TILE_BYTES), "uint8")
        operands.take("expert_offsets", (operands["E"] + 1,), "int32")
        rows = operands["N/32"] * TILE
        operands = Operands(self, inputs, K=operands["K/32"] * TILE)
        x = operands.take("x", ("T" if stage == "gate_up" else "T k", "K"), *FLOATS)
        if stage == "gate_up":
            operands.refuse("route_weights", "only for stage down")
            operands.refuse("shared", "only for stage down")
            routes = x.shape[0] * top_k
            operands.take("sorted_routes", (routes,), "int32")
            return [TensorSpec((routes, rows // 2), x.dtype)]
        routes = x.shape[0]
        self.expect(routes % top_k == 0, "x", f"rows in multiples of top_k={top_k}", x)
        operands.take("sorted_routes", (routes,), "int32")
        operands.take("route_weights", (routes // top_k, top_k), "float32")
        if operands.has("shared"):
            operands.take("shared", (routes // top_k, rows), x.dtype)
        return [TensorSpec((routes // top_k, rows), x.dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        """Counts the experts that T tokens touch on average if routed uniformly: E (1 - (1 - k / E)^T)."""
        moved, _ = super().cost(attrs, inputs, outputs, context)
        weight, routes = inputs[1], inputs[3]
        if weight is None or routes is None:
            return moved, 0
        experts, tile_rows, tile_columns, _ = weight.shape
        tokens = routes.numel / attrs["top_k"]
        touched = 1 - (1 - min(1.0, attrs["top_k"] / experts)) ** tokens
        flops = 2 * routes.numel * tile_rows * tile_columns * TILE * TILE
        return moved - weight.nbytes + round(weight.nbytes * touched), flops

    def prepare(self, attrs: Attrs, operand: str, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        """Dequantised (and rounded to bfloat16) [E, 2 I, K], gate rows first, or [E, N, K], in `dtype`."""
        if operand != "weight":
            return super().prepare(attrs, operand, weight, dtype)
        from plugins.int4_marlin_gemm.reference import dequantise_tiles

        return dequantise_tiles(weight, attrs["stage"], dtype)

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.int4_marlin_gemm.reference import down, gate_up

        top_k = attrs["top_k"]
        if attrs["stage"] == "gate_up":
            return lambda x, weight, offsets, routes, *absent: gate_up(x, weight, offsets, routes, top_k)
        return lambda x, weight, offsets, routes, route_weights, shared=None: down(
            x, weight, offsets, routes, route_weights, shared
        )


PLUGIN = Int4MarlinGemm(
    name="int4_marlin_gemm",
    inputs=("x", "weight", "expert_offsets", "sorted_routes", "route_weights?", "shared?"),
    outputs=("y",),
    attrs={"stage": "str", "top_k": "int"},
    tactics=(REFERENCE, *TACTICS),
)
