"""`mla_attention`: attention of a pass's rows over the paged latents, with the tree mask, up to o_proj's
input."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands, nbytes
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.spec import TensorSpec
from plugins.mla_attention.tactics import TACTICS

FORMS = ("absorbed", "expanded")


class MlaAttention(Plugin):
    """q [T, h, C + P] (absorbed) or [T, h, n + P] (expanded) -> [T, h v].

    w_uk [h, n, C] (read by the expanded form only), w_uv [h, v, C]; row_request int32 [at least T];
    first_row, request_rows, context_len int32 [R]; block_table int32 [R, pages]; kv_pool [L, S, C + P]; mask
    uint32 [at least T, words] or absent (causal).
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        heads, page_size, form = attrs["num_heads"], attrs["page_size"], attrs["form"]
        self.expect(form in FORMS, "form", f"one of {FORMS}", repr(form))
        operands = Operands(self, inputs)
        operands.take("w_uk", (heads, "n", "C"), *FLOATS)
        operands.take("w_uv", (heads, "v", "C"), *FLOATS)
        pool = operands.take("kv_pool", ("L", "S", "C+P"), *FLOATS)
        rope = operands["C+P"] - operands["C"]
        self.expect(rope > 0, "kv_pool", f"rows wider than C={operands['C']}", pool)
        self.expect(page_size > 0 and operands["S"] % page_size == 0, "kv_pool", f"pages of {page_size}", pool)
        self.expect(0 <= attrs["layer"] < operands["L"], "layer", f"0 .. {operands['L'] - 1}", attrs["layer"])
        width = operands["C+P"] if form == "absorbed" else operands["n"] + rope
        q = operands.take("q", ("T", heads, width), *FLOATS)
        operands.take("row_request", (">=T",), "int32")
        operands.take("first_row", ("R",), "int32")
        operands.take("request_rows", ("R",), "int32")
        operands.take("context_len", ("R",), "int32")
        operands.take("block_table", ("R", "pages"), "int32")
        if operands.has("mask"):
            mask = operands.take("mask", (">=T", "words"), "uint32")
            enough = 32 * operands["words"] >= operands["T"]
            self.expect(enough, "mask", f"a bit for each of T={operands['T']} rows", mask)
        return [TensorSpec((operands["T"], heads * operands["v"]), q.dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        """Each request's latents are read once; a pass without a mask is one request, else rows share R
        requests."""
        q, w_uk, w_uv, _, first_row, _, _, _, pool, mask = inputs
        if q is None or w_uk is None or w_uv is None or first_row is None or pool is None:
            return super().cost(attrs, inputs, outputs, context)
        rows, heads, entry = q.shape[0], q.shape[1], pool.shape[2]
        latent, nope, value = w_uk.shape[2], w_uk.shape[1], w_uv.shape[1]
        requests = 1 if mask is None else min(rows, first_row.shape[0])
        own = rows / requests
        seen = context + (own + 1) / 2  # positions that a row sees on average
        positions = round(requests * (context + own))
        moved = nbytes((q, w_uv)) + nbytes(outputs) + positions * (pool.nbytes // (pool.shape[0] * pool.shape[1]))
        if attrs["form"] == "absorbed":
            return moved, round(2 * rows * heads * (seen * (entry + latent) + latent * value))
        width = nope + entry - latent + value
        flops = 2 * heads * (positions * latent * (nope + value) + rows * seen * width)
        return moved + w_uk.nbytes, round(flops)

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        from plugins.mla_attention.reference import mla_attention

        layer, scale, page_size = attrs["layer"], attrs["softmax_scale"], attrs["page_size"]
        absorbed = attrs["form"] == "absorbed"
        return lambda q, w_uk, w_uv, row_request, first, rows, context, table, kv_pool, mask=None: mla_attention(
            q, w_uk, w_uv, first, rows, context, table, kv_pool[layer], mask, scale, page_size, absorbed
        )


PLUGIN = MlaAttention(
    name="mla_attention",
    inputs=(
        "q",
        "w_uk",
        "w_uv",
        "row_request",
        "first_row",
        "request_rows",
        "context_len",
        "block_table",
        "kv_pool",
        "mask?",
    ),
    outputs=("out",),
    attrs={
        "layer": "int",
        "num_heads": "int",
        "softmax_scale": "float",
        "page_size": "int",
        "form": "str",
    },
    sharded_attrs=("num_heads",),
    tactics=(REFERENCE, *TACTICS),
)
