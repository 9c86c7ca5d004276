"""CUDA tactic of `draft_attention`: heads, attention over splits of the context, and their merge."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS, MULTIPROCESSORS, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec
from plugins.draft_kv_append.tactics import rope_constants

Inputs = Sequence[TensorSpec | None]
LOG2_E = 1.4426950408889634
_TILE = 64  # keys
_WARPS = 4  # of the first and the last part
_MOST_SPLITS = 64
_MOST_QUERIES = 128  # a warp of 16 rows each


def _sizes(attrs: Attrs, inputs: Inputs) -> dict[str, int]:
    requests, table, pool = inputs[3], inputs[6], inputs[7]
    assert requests is not None and table is not None and pool is not None
    return {
        "BLOCKS": requests.shape[0],
        "BLOCK": attrs["block_size"],
        "HEADS": attrs["num_heads"],
        "GROUPS": attrs["num_kv_heads"],
        "DIM": attrs["head_dim"],
        "PAGES": table.shape[1],
        "PAGE_SIZE": attrs["page_size"],
        "SLOTS": pool.shape[2],
        "WINDOW": attrs["sliding_window"],
    }


def _queries(sizes: dict[str, int]) -> int:
    return sizes["HEADS"] // sizes["GROUPS"] * sizes["BLOCK"]


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    for spec in (*inputs[:3], inputs[7]):
        if spec is None or spec.dtype != "bfloat16":
            return f"takes bfloat16 operands, found {spec}"
    sizes = _sizes(attrs, inputs)
    if sizes["DIM"] % 16 or sizes["DIM"] > 128:
        return f"head_dim: takes multiples of 16 up to 128, found {sizes['DIM']}"
    if _queries(sizes) > _MOST_QUERIES:
        return f"takes up to {_MOST_QUERIES} query rows a KV head, found {_queries(sizes)}"
    if sizes["BLOCK"] > _TILE:
        return f"block_size: takes up to {_TILE}, found {sizes['BLOCK']}"
    return None


def _splits(sizes: dict[str, int], multiprocessors: int) -> int:
    """So many that all multiprocessors have one."""
    return max(1, min(_MOST_SPLITS, -(-multiprocessors // (sizes["BLOCKS"] * sizes["GROUPS"]))))


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """As in block.cuh, for the chip with the most multiprocessors."""
    sizes = _sizes(attrs, inputs)
    rows = sizes["BLOCKS"] * sizes["BLOCK"] * (sizes["HEADS"] + sizes["GROUPS"]) * sizes["DIM"]
    places = sizes["BLOCKS"] * sizes["GROUPS"] * _splits(sizes, max(MULTIPROCESSORS.values()))
    return 2 * rows + places * _queries(sizes) * (4 * sizes["DIM"] + 8)


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    sizes = _sizes(attrs, inputs)
    splits, warps = _splits(sizes, MULTIPROCESSORS[arch]), -(-_queries(sizes) // 16)
    constants = (*sizes.items(), ("SPLITS", splits))
    layer, rows, threads = (attrs["layer"],), sizes["BLOCKS"] * sizes["BLOCK"], (32 * _WARPS, 1, 1)
    scale = float_bits(LOG2_E * sizes["DIM"] ** -0.5)
    own = -(-rows * (sizes["HEADS"] + sizes["GROUPS"]) // _WARPS)
    return (
        Launch(
            "draft_attention/heads.cu",
            "heads",
            (*constants, *rope_constants(attrs)),
            (own, 1, 1),
            threads,
            scalars=layer,
        ),
        Launch(
            "draft_attention/attend.cu",
            "attend",
            (*constants, ("WARPS", warps), ("SCALE", scale)),
            (splits, sizes["GROUPS"], sizes["BLOCKS"]),
            (32 * warps, 1, 1),
            smem=2 * 2 * _TILE * (sizes["DIM"] + 8) * 2,
            scalars=layer,
        ),
        Launch(
            "draft_attention/merge.cu",
            "merge",
            constants,
            (-(-rows * sizes["HEADS"] // _WARPS), 1, 1),
            threads,
            scalars=layer,
        ),
    )


TACTICS = (Tactic("splits", ARCHS, refuses=_refuses, workspace=_workspace, launches=_launches),)
