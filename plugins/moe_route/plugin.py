"""`moe_route`: the router and the lists of routes by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plugins.core.operands import FLOATS, Operands
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.moe_route.tactics import TACTICS

if TYPE_CHECKING:
    import torch


class MoeRoute(Plugin):
    """x [T, H], weight [E, H], bias float32 [E], row_request int32 [T] -> route_weights float32 [T, k],
    expert_offsets int32 [E + 1], sorted_routes int32 [T k], route_experts int32 [T, k].

    Route t k + j is the j-th expert of token t. The routes of expert e, ascending, are
    sorted_routes[expert_offsets[e] : expert_offsets[e + 1]]; entries past expert_offsets[E] are -1. Rows with
    row_request -1 have no routes (weights 0, experts -1).
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        operands = Operands(self, inputs)
        operands.take("x", ("T", "H"), *FLOATS)
        operands.take("weight", ("E", "H"), *FLOATS)
        operands.take("bias", ("E",), "float32")
        operands.take("row_request", ("T",), "int32")
        tokens, experts, top_k = operands["T"], operands["E"], attrs["top_k"]
        self.expect(1 <= top_k <= experts, "top_k", f"1 .. {experts} (the number of experts)", top_k)
        return [
            TensorSpec((tokens, top_k), "float32"),
            TensorSpec((experts + 1,), "int32"),
            TensorSpec((tokens * top_k,), "int32"),
            TensorSpec((tokens, top_k), "int32"),
        ]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        moved, _ = super().cost(attrs, inputs, outputs, context)
        weight = inputs[1]
        return moved, 0 if weight is None else 2 * outputs[0].shape[0] * weight.numel

    def prepare(self, attrs: Attrs, operand: str, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        """Everything in at least float32: the experts are chosen there, whatever the activations are."""
        import torch

        return weight.to(torch.promote_types(dtype, torch.float32))

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.moe_route.reference import route, routes_by_expert

        top_k, scaling, normalise = attrs["top_k"], attrs["routed_scaling_factor"], attrs["norm_topk_prob"]

        def run(x, weight, bias, row_request):  # type: ignore[no-untyped-def]
            weights, experts = route(x, weight, bias, row_request, top_k, scaling, normalise)
            offsets, routes = routes_by_expert(experts, weight.shape[0])
            return weights, offsets, routes, experts

        return run


PLUGIN = MoeRoute(
    name="moe_route",
    inputs=("x", "weight", "bias", "row_request"),
    outputs=("route_weights", "expert_offsets", "sorted_routes", "route_experts"),
    attrs={"top_k": "int", "routed_scaling_factor": "float", "norm_topk_prob": "bool"},
    tactics=(REFERENCE, *TACTICS),
)
