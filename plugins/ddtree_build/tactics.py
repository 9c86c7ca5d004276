"""CUDA tactic of `ddtree_build`: a block for each request's tree, then one for the rows of all."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

Inputs = Sequence[TensorSpec | None]
_TREE_THREADS, _ROWS_THREADS = 512, 256
_MOST_DEPTH = 16  # ranks of a path are packed into two words of 8 depths
_MOST_TOP_K = 64
_MOST_STAGED = 76_000  # bytes, beside 24 KB of the tree's own


def _shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    names = (
        *("candidates", "draft_requests", "active", "anchor", "context_len", "block_table", "tree_budget"),
        *("tree_cost", "calibration", "tree_width", "tokens", "positions", "row_request", "row_parent"),
        *("row_slot", "mask"),
    )
    return {name: spec.shape for name, spec in zip(names, inputs, strict=False) if spec is not None}


def _refuses(attrs: Attrs, inputs: Inputs) -> str | None:
    if attrs["draft_depth"] > _MOST_DEPTH:
        return f"draft_depth: expected up to {_MOST_DEPTH}, found {attrs['draft_depth']}"
    if attrs["top_k"] > _MOST_TOP_K:
        return f"top_k: expected up to {_MOST_TOP_K}, found {attrs['top_k']}"
    if _staged(attrs) > _MOST_STAGED:
        return f"the candidates of {attrs['tp_world']} ranks do not fit in {_MOST_STAGED} B of shared memory"
    return None


def _staged(attrs: Attrs) -> int:
    """Bytes of a block's candidates of all ranks."""
    return int(4 * attrs["draft_depth"] * attrs["tp_world"] * (2 * attrs["top_k"] + 1))


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """`Plan` of tree.cuh for every request: a count (and 4 bytes to the next 8), five integers and a double a node."""
    shapes = _shapes(inputs)
    requests, nodes = shapes["active"][0], shapes["mask"][0]
    return requests * (-(-(4 + 20 * nodes) // 8) * 8 + 8 * nodes)


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    shapes = _shapes(inputs)
    requests = shapes["active"][0]
    constants = (
        ("REQUESTS", requests),
        ("BLOCKS", shapes["draft_requests"][0] if "candidates" in shapes else 0),
        ("DEPTH", max(attrs["draft_depth"], 1)),
        ("TOP_K", max(attrs["top_k"], 1)),
        ("WORLD", attrs["tp_world"]),
        ("NODES", shapes["mask"][0]),
        ("COSTS", shapes["tree_cost"][1]),
        ("PAGES", shapes["block_table"][1]),
        ("PAGE_SIZE", attrs["page_size"]),
    )
    rows = (*constants, ("ROWS", shapes["tokens"][0]), ("WORDS", shapes["mask"][1]))
    return (
        Launch(
            "ddtree_build/tree.cu",
            "tree",
            constants,
            (requests, 1, 1),
            (_TREE_THREADS, 1, 1),
            smem=_staged(attrs) if "candidates" in shapes else 0,
        ),
        Launch("ddtree_build/rows.cu", "rows", rows, (1, 1, 1), (_ROWS_THREADS, 1, 1)),
    )


TACTICS = (Tactic("best_first", ARCHS, refuses=_refuses, workspace=_workspace, launches=_launches),)
