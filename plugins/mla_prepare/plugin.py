"""`mla_prepare`: q_b projection, norms, RoPE, absorption of W_UK, and the write of the KV latents."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands, nbytes
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.rope import ROPE_ATTRS, inv_freq_of
from plugins.core.spec import TensorSpec
from plugins.mla_prepare.tactics import TACTICS

FORMS = ("absorbed", "expanded")


class MlaPrepare(Plugin):
    """qkv_a [T, Q + C + P] -> q [T, h, C + P] (absorbed) or [T, h, n + P] (expanded); writes kv_pool[layer].

    Weights: q_a_norm [Q], kv_a_norm [C], q_b [h (n + P), Q], w_uk [h, n, C] (read by the absorbed form only).
    positions and row_slot int32 [at least T]; kv_pool [L, S, C + P].
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        heads, nope, rope = (attrs[key] for key in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        self.expect(attrs["form"] in FORMS, "form", f"one of {FORMS}", repr(attrs["form"]))
        self.expect(rope % 2 == 0, "qk_rope_head_dim", "an even number", rope)
        operands = Operands(self, inputs)
        operands.take("q_a_norm", ("Q",), *FLOATS)
        operands.take("kv_a_norm", ("C",), *FLOATS)
        entry = operands["C"] + rope
        qkv_a = operands.take("qkv_a", ("T", operands["Q"] + entry), *FLOATS)
        operands.take("q_b", (heads * (nope + rope), "Q"), *FLOATS)
        operands.take("w_uk", (heads, nope, "C"), *FLOATS)
        operands.take("positions", (">=T",), "int32")
        operands.take("row_slot", (">=T",), "int32")
        operands.take("kv_pool", ("L", "S", entry), *FLOATS)
        self.expect(0 <= attrs["layer"] < operands["L"], "layer", f"0 .. {operands['L'] - 1}", attrs["layer"])
        last = entry if attrs["form"] == "absorbed" else nope + rope
        return [TensorSpec((operands["T"], heads, last), qkv_a.dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        """Of the pool, the T rows that are written count."""
        qkv_a, _, _, q_b, w_uk, _, _, pool = inputs
        rows = outputs[0].shape[0]
        moved, flops = nbytes((qkv_a, q_b)) + nbytes(outputs), 0
        if pool is not None:
            moved += rows * pool.nbytes // (pool.shape[0] * pool.shape[1])
        for weight in (q_b, w_uk if attrs["form"] == "absorbed" else None):
            flops += 0 if weight is None else 2 * rows * weight.numel
        return moved + (nbytes((w_uk,)) if attrs["form"] == "absorbed" else 0), flops

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        import torch

        from plugins.mla_prepare.reference import mla_prepare

        layer, eps, absorb = attrs["layer"], attrs["eps"], attrs["form"] == "absorbed"
        amplitude = attrs["rope_amplitude"]
        inv_freq = torch.from_numpy(inv_freq_of(attrs, attrs["qk_rope_head_dim"]))
        return lambda qkv_a, q_a_norm, kv_a_norm, q_b, w_uk, positions, row_slot, kv_pool: mla_prepare(
            qkv_a,
            q_a_norm,
            kv_a_norm,
            q_b,
            w_uk,
            positions,
            row_slot,
            kv_pool[layer],
            inv_freq,
            amplitude,
            eps,
            absorb,
        )


PLUGIN = MlaPrepare(
    name="mla_prepare",
    inputs=("qkv_a", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "positions", "row_slot", "kv_pool"),
    outputs=("q",),
    attrs={
        "layer": "int",
        "num_heads": "int",
        "qk_nope_head_dim": "int",
        "qk_rope_head_dim": "int",
        "eps": "float",
        "form": "str",
        **ROPE_ATTRS,
    },
    mutates=("kv_pool",),
    sharded_attrs=("num_heads",),
    tactics=(REFERENCE, *TACTICS),
)
