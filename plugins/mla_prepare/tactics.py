"""CUDA tactic of `mla_prepare`: norms and KV write, q_b, then absorption and rotation."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.rope import inv_freq_of
from plugins.core.spec import TensorSpec
from plugins.dense_gemm.tactics import TILE, choose_cut, gemm_launch

Inputs = Sequence[TensorSpec | None]
_COLUMNS = 64  # of the latent, of a block that absorbs
_PAD = 8


def _sizes(attrs: Attrs, inputs: Inputs) -> dict[str, int]:
    qkv_a, q_a_norm, kv_a_norm, _, _, _, _, pool = inputs
    assert qkv_a is not None and q_a_norm is not None and kv_a_norm is not None and pool is not None
    return {
        "TOKENS": qkv_a.shape[0],
        "Q": q_a_norm.shape[0],
        "C": kv_a_norm.shape[0],
        "P": attrs["qk_rope_head_dim"],
        "NOPE": attrs["qk_nope_head_dim"],
        "HEADS": attrs["num_heads"],
        "SLOTS": pool.shape[1],
    }


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    for spec in (*inputs[:5], inputs[7]):
        if spec is None or spec.dtype != "bfloat16":
            return f"takes bfloat16 operands, found {spec}"
    sizes = _sizes(attrs, inputs)
    for name, step in (("Q", TILE), ("C", _COLUMNS), ("P", 8), ("NOPE", 16)):
        if sizes[name] % step:
            return f"{name}: takes multiples of {step}, found {sizes[name]}"
    return None


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """As in prepare.cuh."""
    sizes = _sizes(attrs, inputs)
    q_row = sizes["HEADS"] * (sizes["NOPE"] + sizes["P"])
    return sizes["TOKENS"] * (2 * sizes["Q"] + 2 * q_row + 4 * sizes["P"])


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    sizes = _sizes(attrs, inputs)
    constants = tuple(sizes.items())
    tokens, heads, nope = sizes["TOKENS"], sizes["HEADS"], sizes["NOPE"]
    layer = (attrs["layer"],)
    frequencies = ",".join(f"{float_bits(value)}u" for value in inv_freq_of(attrs, sizes["P"]).tolist())
    rope = (
        ("EPS", float_bits(attrs["eps"])),
        ("AMPLITUDE", float_bits(attrs["rope_amplitude"])),
        ("INV_FREQ", frequencies),
    )
    norms = Launch("mla_prepare/norms.cu", "norms", (*constants, *rope), (tokens, 2, 1), (256, 1, 1), scalars=layer)
    rows, columns = heads * (nope + sizes["P"]), sizes["Q"] // TILE
    cut = choose_cut(tokens, rows, columns, arch)
    q_b = gemm_launch(tokens, rows, columns, cut, entry=("mla_prepare/q_b.cu", "q_b_rows"))
    q_b = Launch(
        q_b.source,
        q_b.kernel,
        (*q_b.constants, *constants[1:]),
        q_b.grid,
        q_b.block,
        q_b.cluster,
        q_b.smem,
        scalars=layer,
    )
    if attrs["form"] == "expanded":
        grid = (-(-tokens * rows // 2 // 256), 1, 1)
        last = Launch("mla_prepare/rotate.cu", "rotate", constants, grid, (256, 1, 1), scalars=layer)
    else:
        tiles = 1 if tokens <= 16 else 2 if tokens <= 32 else 4
        grid = (sizes["C"] // _COLUMNS + 1, heads, -(-tokens // (16 * tiles)))
        smem = 2 * (nope * (_COLUMNS + _PAD) + 16 * tiles * (nope + _PAD))
        last = Launch(
            "mla_prepare/absorb.cu",
            "absorb",
            (*constants, ("TOKEN_TILES", tiles)),
            grid,
            (128, 1, 1),
            smem=smem,
            scalars=layer,
        )
    return norms, q_b, last


TACTICS = (Tactic("three_kernels", ARCHS, _refuses, workspace=_workspace, launches=_launches),)
