"""CUDA tactics of `mla_attention`: absorbed, over splits of the context, then their combination with W_UV; expanded,
segment by segment of the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plugins.core.cuda import ARCHS, MULTIPROCESSORS, float_bits
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

LOG2_E = 1.4426950408889634
TILE = 16  # positions
_CLUSTER = 8
_WARPS = 8
_SEGMENT_HEADS = 262_144  # positions of a segment x heads: 176 MB of keys and values
_NOPE = 128
_EXPAND_ROWS = 128  # positions of a block that expands
_EXPAND_COLUMNS = 64  # of the latent, a stage
_ATTEND_ROWS = 128  # rows of a block that attends
_ATTEND_TILE = 64  # positions
_MOST_SPLITS = 16
_FILLED = 0.85  # of the multiprocessors, over all rounds of blocks: enough not to split further
Inputs = Sequence[TensorSpec | None]


def sizes(attrs: Attrs, inputs: Inputs) -> dict[str, int]:
    """The dimensions that every kernel takes as constants."""
    q, w_uk, w_uv, _, first_row, _, _, table, pool = inputs[:9]
    assert q is not None and w_uk is not None and w_uv is not None and first_row is not None
    assert table is not None and pool is not None
    latent = w_uk.shape[2]
    return {
        "TOKENS": q.shape[0],
        "REQUESTS": first_row.shape[0],
        "HEADS": attrs["num_heads"],
        "C": latent,
        "P": pool.shape[2] - latent,
        "V": w_uv.shape[1],
        "PAGE_SIZE": attrs["page_size"],
        "PAGES": table.shape[1],
        "SLOTS": pool.shape[1],
    }


def refuses_shape(attrs: Attrs, inputs: Inputs) -> str | None:
    """Why neither form can be taken, None if both can."""
    for spec in (*inputs[:3], inputs[8]):
        if spec is None or spec.dtype != "bfloat16":
            return f"takes bfloat16 operands, found {spec}"
    found = sizes(attrs, inputs)
    for name, wanted in (("C", 512), ("P", 64), ("V", 128)):
        if found[name] != wanted:
            return f"{name}: takes {wanted}, found {found[name]}"
    if found["PAGE_SIZE"] % TILE:
        return f"page_size: takes multiples of {TILE}, found {found['PAGE_SIZE']}"
    return None


def _refuses_absorbed(attrs: Attrs, inputs: Inputs) -> str | None:
    if attrs["form"] != "absorbed":
        return f"form: takes 'absorbed', found {attrs['form']!r}"
    return refuses_shape(attrs, inputs)


def _row_tiles(tokens: int, heads: int) -> int:
    """Tiles of 16 query rows in an item."""
    return next((tiles for tiles in (1, 2) if tokens * heads <= 16 * tiles), 4)


def _partials(tokens: int, heads: int, requests: int, blocks: int) -> int:
    """Places for partial results: a block or an item begins at each."""
    return blocks + min(requests, tokens) + -(-tokens * heads // (16 * _row_tiles(tokens, heads)))


def _workspace(attrs: Attrs, inputs: Inputs) -> int:
    """As in verify.cuh, for the chip with the most multiprocessors."""
    found = sizes(attrs, inputs)
    tokens, heads = found["TOKENS"], found["HEADS"]
    places = _partials(tokens, heads, found["REQUESTS"], max(MULTIPROCESSORS.values()))
    return places * 16 * _row_tiles(tokens, heads) * (4 * found["C"] + 8)


def _launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    found = sizes(attrs, inputs)
    tokens, heads, requests, latent = found["TOKENS"], found["HEADS"], found["REQUESTS"], found["C"]
    blocks, tiles = MULTIPROCESSORS[arch], _row_tiles(tokens, heads)
    queries = 16 * tiles
    mask = inputs[9] if len(inputs) > 9 else None
    constants = (
        *found.items(),
        ("QUERIES", queries),
        ("BLOCKS", blocks),
        ("PARTIALS", _partials(tokens, heads, requests, blocks)),
    )
    layer = (attrs["layer"],)
    work = 20 * requests + 4
    stages = 5 if tiles == 1 else 4
    ring = stages * TILE * (2 * (latent + found["P"]) + 16)
    scores = 4 * queries * (TILE + 2) * 4
    smem = ring + scores + 2 * queries * (2 * TILE + 4) + 8 * (stages + 2) + work + 16
    verify = Launch(
        "mla_attention/verify.cu",
        "verify",
        (
            *constants,
            ("MT", tiles),
            ("STAGES", stages),
            ("SCALE", float_bits(attrs["softmax_scale"] * LOG2_E)),
            ("MASKED", int(mask is not None)),
            ("WORDS", 1 if mask is None else mask.shape[1]),
        ),
        (blocks, 1, 1),
        (256, 1, 1),
        smem=smem,
        scalars=layer,
    )
    tile = next(n for n in (1, 2, 4, 8) if n >= min(tokens, 8))
    out = found["V"] // _CLUSTER
    smem = (out + 8) * (latent + 8) * 2 + tile * latent // _CLUSTER * 2 + _WARPS * (latent // _CLUSTER + out * 8) * 4
    combine = Launch(
        "mla_attention/combine.cu",
        "combine",
        (*constants, ("TOKEN_TILE", tile)),
        (_CLUSTER, heads, -(-tokens // tile)),
        (256, 1, 1),
        cluster=(_CLUSTER, 1, 1),
        smem=smem + work + 4 * tile * blocks + 32,
        scalars=layer,
    )
    return verify, combine


def _refuses_expanded(attrs: Attrs, inputs: Inputs) -> str | None:
    if attrs["form"] != "expanded":
        return f"form: takes 'expanded', found {attrs['form']!r}"
    if len(inputs) > 9 and inputs[9] is not None:
        return "mask: takes none in the expanded form"
    if inputs[1] is not None and inputs[1].shape[1] != _NOPE:
        return f"qk_nope_head_dim: takes {_NOPE}, found {inputs[1].shape[1]}"
    return refuses_shape(attrs, inputs)


def _segment(sizes: dict[str, int]) -> int:
    """Positions whose keys and values are built at a time."""
    most = max(_EXPAND_ROWS, _SEGMENT_HEADS // sizes["HEADS"] // _EXPAND_ROWS * _EXPAND_ROWS)
    longest = sizes["PAGES"] * sizes["PAGE_SIZE"]
    return min(most, longest + -longest % _EXPAND_ROWS)


def _position_bytes(sizes: dict[str, int]) -> int:
    """Of a head's key and value, in rows as shared memory wants them."""
    return 2 * (_NOPE + sizes["P"] + 8 + sizes["V"] + 8)


def _expanded_splits(sizes: dict[str, int], multiprocessors: int) -> int:
    """The fewest that keep most of the chip busy, one block a multiprocessor."""
    items = -(-sizes["TOKENS"] // _ATTEND_ROWS) * sizes["HEADS"]

    def filled(splits: int) -> float:
        rounds = items * splits / multiprocessors
        return rounds / math.ceil(rounds)

    choices = range(1, _MOST_SPLITS + 1)
    return next((n for n in choices if filled(n) >= _FILLED), max(choices, key=filled))


def _expanded_workspace(attrs: Attrs, inputs: Inputs) -> int:
    """As in expanded.cuh, for the chip with the most splits."""
    found = sizes(attrs, inputs)
    splits = max(_expanded_splits(found, count) for count in MULTIPROCESSORS.values())
    places = splits * found["TOKENS"] * found["HEADS"]
    return found["HEADS"] * _segment(found) * _position_bytes(found) + places * (4 * found["V"] + 8)


def _expanded_launches(attrs: Attrs, inputs: Inputs, arch: str) -> tuple[Launch, ...]:
    found = sizes(attrs, inputs)
    segment, splits = _segment(found), _expanded_splits(found, MULTIPROCESSORS[arch])
    constants = (*found.items(), ("NOPE", _NOPE), ("SEGMENT", segment), ("SPLITS", splits))
    heads, layer = found["HEADS"], attrs["layer"]
    items = -(-found["TOKENS"] // _ATTEND_ROWS) * heads * splits
    scale = ("SCALE", float_bits(attrs["softmax_scale"] * LOG2_E))
    launches = []
    for index in range(-(-found["PAGES"] * found["PAGE_SIZE"] // segment)):
        grid, scalars = (2 * heads, segment // _EXPAND_ROWS, 1), (layer, index)
        stages = 2 * 2 * _EXPAND_ROWS * (_EXPAND_COLUMNS + 8) * 2
        expand = Launch("mla_attention/expand.cu", "expand", constants, grid, (256, 1, 1), smem=stages, scalars=scalars)
        tiles = 2 * _ATTEND_TILE * _position_bytes(found)
        attend = Launch(
            "mla_attention/attend.cu",
            "attend",
            (*constants, scale),
            (items, 1, 1),
            (256, 1, 1),
            smem=tiles + 64,
            scalars=scalars,
        )
        launches += [expand, attend]
    blocks = -(-found["TOKENS"] * heads // _WARPS)
    merge = Launch(
        "mla_attention/merge.cu", "merge", constants, (blocks, 1, 1), (32 * _WARPS, 1, 1), scalars=(layer, 0)
    )
    return (*launches, merge)


TACTICS = (
    Tactic("splits", ARCHS, _refuses_absorbed, workspace=_workspace, launches=_launches),
    Tactic("segments", ARCHS, _refuses_expanded, workspace=_expanded_workspace, launches=_expanded_launches),
)
