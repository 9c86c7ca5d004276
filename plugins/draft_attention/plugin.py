"""`draft_attention`: the attention of a DFlash block over the drafter's context and the block itself."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.operands import FLOATS, Operands, nbytes
from plugins.core.plugin import REFERENCE, Attrs, Communicator, Plugin, Runner
from plugins.core.rope import ROPE_ATTRS, inv_freq_of
from plugins.core.spec import TensorSpec
from plugins.draft_attention.tactics import TACTICS


class DraftAttention(Plugin):
    """qkv [B bs, (h + 2 g) d] -> [B bs, h d], zeros for padding blocks.

    q_norm, k_norm [d]; draft_requests int32 [B]; context_len, draft_start int32 [R]; block_table int32 [R,
    pages]; draft_kv [layers, 2, S, g, d] as `draft_kv_append` writes it. sliding_window 0: the whole context.
    """

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        heads, groups, dim = (attrs[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
        self.expect(dim % 2 == 0, "head_dim", "an even number", dim)
        self.expect(groups > 0 and heads % groups == 0, "num_heads", f"a multiple of {groups} KV heads", heads)
        self.expect(attrs["sliding_window"] >= 0, "sliding_window", "0 (none) or more", attrs["sliding_window"])
        operands = Operands(self, inputs)
        operands.take("draft_requests", ("B",), "int32")
        rows = operands["B"] * attrs["block_size"]
        qkv = operands.take("qkv", (rows, (heads + 2 * groups) * dim), *FLOATS)
        operands.take("q_norm", (dim,), *FLOATS)
        operands.take("k_norm", (dim,), *FLOATS)
        operands.take("context_len", ("R",), "int32")
        operands.take("draft_start", ("R",), "int32")
        operands.take("block_table", ("R", "pages"), "int32")
        pool = operands.take("draft_kv", ("layers", 2, "S", groups, dim), *FLOATS)
        page_size, layers = attrs["page_size"], operands["layers"]
        self.expect(page_size > 0 and operands["S"] % page_size == 0, "draft_kv", f"pages of {page_size}", pool)
        self.expect(0 <= attrs["layer"] < layers, "layer", f"0 .. {layers - 1}", attrs["layer"])
        return [TensorSpec((rows, heads * dim), qkv.dtype)]

    def cost(
        self, attrs: Attrs, inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec], context: int
    ) -> tuple[int, int]:
        """Every block reads its request's context once."""
        qkv, pool = inputs[0], inputs[-1]
        if qkv is None or pool is None:
            return super().cost(attrs, inputs, outputs, context)
        block, window = attrs["block_size"], attrs["sliding_window"]
        seen = min(context, window) if window else context
        blocks = qkv.shape[0] // block
        moved = nbytes((qkv, *outputs)) + blocks * seen * (pool.nbytes // (pool.shape[0] * pool.shape[2]))
        return moved, 4 * outputs[0].numel * (seen + block)

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        import torch

        from plugins.draft_attention.reference import draft_attention

        layer, eps, amplitude = attrs["layer"], attrs["eps"], attrs["rope_amplitude"]
        window, page_size = attrs["sliding_window"], attrs["page_size"]
        inv_freq = torch.from_numpy(inv_freq_of(attrs, attrs["head_dim"]))
        return lambda qkv, q_norm, k_norm, requests, context, start, table, draft_kv: draft_attention(
            qkv,
            q_norm,
            k_norm,
            requests,
            context,
            start,
            table,
            draft_kv[layer],
            inv_freq,
            amplitude,
            eps,
            window,
            page_size,
        )


PLUGIN = DraftAttention(
    name="draft_attention",
    inputs=(
        "qkv",
        "q_norm",
        "k_norm",
        "draft_requests",
        "context_len",
        "draft_start",
        "block_table",
        "draft_kv",
    ),
    outputs=("out",),
    attrs={
        "layer": "int",
        "num_heads": "int",
        "num_kv_heads": "int",
        "head_dim": "int",
        "block_size": "int",
        "sliding_window": "int",
        "page_size": "int",
        "eps": "float",
        **ROPE_ATTRS,
    },
    sharded_attrs=("num_heads", "num_kv_heads"),
    tactics=(REFERENCE, *TACTICS),
)
