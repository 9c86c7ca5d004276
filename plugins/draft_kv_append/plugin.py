"""`draft_kv_append`: keys and values of newly committed rows, into the drafter's paged context."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands, nbytes
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.rope import ROPE_ATTRS, inv_freq_of
from plugins.core.spec import TensorSpec
from plugins.draft_kv_append.tactics import TACTICS


class DraftKvAppend(Plugin):
    """kv [A, 2 g d], k_norm [d], append_positions and append_slots int32 [at least A]; writes
    draft_kv[layer].

    draft_kv is [layers, 2, S, g, d]: normed and rotated keys, then values.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        heads, dim = attrs["num_kv_heads"], attrs["head_dim"]
        self.expect(dim % 2 == 0, "head_dim", "an even number", dim)
        operands = Operands(self, inputs)
        operands.take("kv", ("A", 2 * heads * dim), *FLOATS)
        operands.take("k_norm", (dim,), *FLOATS)
        operands.take("append_positions", (">=A",), "int32")
        operands.take("append_slots", (">=A",), "int32")
        operands.take("draft_kv", ("layers", 2, "S", heads, dim), *FLOATS)
        layers = operands["layers"]
        self.expect(0 <= attrs["layer"] < layers, "layer", f"0 .. {layers - 1}", attrs["layer"])
        return []

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        return 2 * nbytes(inputs[:1]), 0

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        import torch

        from plugins.draft_kv_append.reference import draft_kv_append

        layer, eps, amplitude = attrs["layer"], attrs["eps"], attrs["rope_amplitude"]
        inv_freq = torch.from_numpy(inv_freq_of(attrs, attrs["head_dim"]))
        return lambda kv, k_norm, positions, slots, draft_kv: draft_kv_append(
            kv, k_norm, positions, slots, draft_kv[layer], inv_freq, amplitude, eps
        )


PLUGIN = DraftKvAppend(
    name="draft_kv_append",
    inputs=("kv", "k_norm", "append_positions", "append_slots", "draft_kv"),
    attrs={"layer": "int", "num_kv_heads": "int", "head_dim": "int", "eps": "float", **ROPE_ATTRS},
    mutates=("draft_kv",),
    sharded_attrs=("num_kv_heads",),
    tactics=(REFERENCE, *TACTICS),
)
