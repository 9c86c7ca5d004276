"""The drafter's operators on the device against float64."""

from __future__ import annotations

import pytest
import torch

from tests.plugins.gpu.references import bf16, check, ints
from tests.plugins.gpu.test_mla import ROPE

pytestmark = pytest.mark.gpu
PAGE, LAYERS = 64, 2
HEADS = [(8, 1, 128), (4, 4, 128), (8, 2, 64), (16, 1, 128)]


@pytest.mark.parametrize(("heads", "groups", "dim"), HEADS)
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_append(rows: int, heads: int, groups: int, dim: int) -> None:
    attrs = {"layer": 1, "num_kv_heads": groups, "head_dim": dim, "eps": 1e-5, **ROPE, "rope_amplitude": 1.4158883}
    slots = torch.randperm(3 * PAGE)[:rows].int().cuda()
    positions = torch.randint(0, 262_144, (rows,), dtype=torch.int32, device="cuda")
    pool = bf16(LAYERS, 2, 3 * PAGE, groups, dim)
    check("draft_kv_append", attrs, [bf16(rows, 2 * groups * dim), bf16(dim), positions, slots, pool], device="cpu")


@pytest.mark.parametrize(("heads", "groups", "dim"), HEADS)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 200, 5000])
def test_block(context: int, window: int, heads: int, groups: int, dim: int) -> None:
    block = 8
    attrs = {
        "layer": 1,
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": dim,
        "block_size": block,
        "sliding_window": window,
        "page_size": PAGE,
        "eps": 1e-5,
        **ROPE,
        "rope_amplitude": 1.4158883,
    }
    pages = -(-6000 // PAGE)
    table = (torch.randperm(3 * pages).int() + 1).view(3, pages).cuda()
    pool = bf16(LAYERS, 2, (3 * pages + 1) * PAGE, groups, dim)
    lengths, starts = ints([40, context, 130]), ints([0, context // 3, 200])
    requests = ints([1, -1, 2])
    qkv = bf16(3 * block, (heads + 2 * groups) * dim)
    inputs = [qkv, bf16(dim), bf16(dim), requests, lengths, starts, table, pool]
    (found,) = check("draft_attention", attrs, inputs, 8e-3, "cpu")
    assert not found[block : 2 * block].any()
