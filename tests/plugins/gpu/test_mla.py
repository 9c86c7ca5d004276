"""Latent attention on the device against float64: lengths, trees, several requests, shards, padding."""

from __future__ import annotations

import random

import pytest
import torch

from tests.plugins.gpu.device import Operator
from tests.plugins.gpu.moe_data import relative_error
from tests.plugins.gpu.references import bf16, check, ints, reference

pytestmark = pytest.mark.gpu
ROPE = {
    "rope_theta": 50000.0,
    "rope_factor": 64.0,
    "rope_original_max": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_amplitude": 1.0,
}
PAGE, LAYERS = 64, 2
SCALE = 0.1446796


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize(("heads", "q_rank"), [(8, 1536), (64, 1536), (1, 1536), (4, 128)])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 128, 300])
def test_prepare(tokens: int, heads: int, q_rank: int, form: str) -> None:
    attrs = {"layer": 1, "num_heads": heads, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "eps": 1e-6}
    slots = 5 * PAGE
    where = torch.randperm(slots - 1, device="cuda")[:tokens].int() + 1
    positions = torch.randint(0, 262_144, (tokens,), device="cuda", dtype=torch.int32)
    inputs = [
        bf16(tokens, q_rank + 576),
        bf16(q_rank),
        bf16(512),
        bf16(heads * 192, q_rank, scale=q_rank**-0.5),
        bf16(heads, 128, 512, scale=0.1),
        positions,
        where,
        torch.full((LAYERS, slots, 576), 3.0, device="cuda").bfloat16(),
    ]
    check("mla_prepare", {**attrs, "form": form, **ROPE}, inputs, 6e-3, "cpu")


class Pass:
    """A pass over requests of (context, rows): a shuffled pool of poisoned pages, with the tokens' latents in place."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        heads: int,
        tree: str = "random",
        padding: int = 0,
        form: str = "absorbed",
        extra_pages: int = 2,
    ) -> None:
        pages = [-(-(context + rows) // PAGE) for context, rows in requests]
        width = max(max(pages), 1) + extra_pages
        order = torch.randperm(sum(pages)).tolist()
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        # what lies past a request's end is another's: NaN here
        pool = torch.full((LAYERS, (sum(pages) + 1) * PAGE, 576), float("nan"), device="cuda", dtype=torch.bfloat16)
        first, owner = 0, []
        firsts = []
        total = sum(rows for _, rows in requests) + padding
        mask = torch.zeros(total, 4, dtype=torch.int64)
        for request, (context, rows) in enumerate(requests):
            firsts.append(first)
            for page in range(pages[request]):
                table[request, page] = order.pop() + 1
            count = context + rows
            if count:
                position = torch.arange(count)
                slot = table[request, position // PAGE].long() * PAGE + position % PAGE
                pool[1, slot.cuda()] = bf16(count, 576)
            for row in range(rows if form == "absorbed" else 0):
                parent = {"chain": row - 1, "star": 0, "random": random.randrange(row) if row else -1}[tree]
                if row:
                    mask[first + row] = mask[first + parent]
                mask[first + row, row // 32] |= 1 << row % 32
            owner += [request] * rows
            first += rows
        self.tokens = total
        self.inputs = [
            bf16(total, heads, 576 if form == "absorbed" else 192),
            bf16(heads, 128, 512, scale=0.05),
            bf16(heads, 128, 512, scale=0.05),
            ints(owner + [-1] * padding),
            ints(firsts),
            ints([rows for _, rows in requests]),
            ints([context for context, _ in requests]),
            table.cuda(),
            pool,
            mask.cuda().to(torch.uint32) if form == "absorbed" else None,
        ]
        self.attrs = {"layer": 1, "num_heads": heads, "softmax_scale": SCALE, "page_size": PAGE, "form": form}


def compare(given: Pass, tolerance: float = 6e-3) -> torch.Tensor:
    operator = Operator("mla_attention", given.attrs, given.inputs)
    (found,), (again,) = operator.run(), operator.run()
    assert torch.equal(found.view(torch.uint8), again.view(torch.uint8))
    (expected,) = reference("mla_attention", given.attrs, given.inputs)
    if expected.norm():
        assert relative_error(found, expected) < tolerance
    rows = (found.double() - expected).norm(dim=1)
    assert (rows <= 4 * tolerance * expected.norm(dim=1).clamp(min=1e-30)).all()  # no row hides behind the others
    return found


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 12, 16, 24, 32, 33, 64, 100, 128])
@pytest.mark.parametrize("context", [0, 1, 31, 63, 64, 65, 4096])
def test_one_request(tokens: int, context: int) -> None:
    compare(Pass([(context, tokens)], 8))


@pytest.mark.parametrize("heads", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_shards(heads: int, tokens: int) -> None:
    compare(Pass([(1000, tokens)], heads))


@pytest.mark.parametrize("tree", ["chain", "star", "random"])
def test_trees(tree: str) -> None:
    compare(Pass([(777, 64)], 8, tree))


@pytest.mark.parametrize("context", [32_768, 200_000])
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_long_contexts(tokens: int, context: int) -> None:
    compare(Pass([(context, tokens)], 8))


def test_mixed_requests() -> None:
    compare(Pass([(0, 1), (5000, 17), (64, 0), (63, 5), (1, 1), (12_345, 40)], 8, padding=13))
    compare(Pass([(4096, 1)] * 8, 8))
    compare(Pass([(0, 0), (100, 3), (0, 0)], 4, padding=1))


def test_only_padding_gives_zeros() -> None:
    assert not compare(Pass([(100, 0), (0, 0)], 8, padding=5)).any()


@pytest.mark.parametrize(("context", "tokens"), [(0, 1), (0, 128), (1000, 100), (70, 33)])
def test_without_a_mask_it_is_causal(context: int, tokens: int) -> None:
    given = Pass([(context, tokens)], 8, "chain")
    (masked,) = Operator("mla_attention", given.attrs, given.inputs).run()
    given.inputs[9] = None
    assert torch.equal(compare(given), masked)


@pytest.mark.parametrize("tokens", [1, 64, 127, 128, 129, 171, 300, 1000, 4096])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 4096])
def test_expanded(tokens: int, context: int) -> None:
    compare(Pass([(context, tokens)], 8, form="expanded"))


@pytest.mark.parametrize(
    ("heads", "tokens", "context"), [(1, 300, 500), (4, 200, 0), (16, 700, 20_000), (64, 300, 9000)]
)
def test_expanded_shards(heads: int, tokens: int, context: int) -> None:
    compare(Pass([(context, tokens)], heads, form="expanded"))


@pytest.mark.parametrize(("tokens", "context"), [(1000, 32_000), (300, 32_700), (256, 100_000), (200, 200_000)])
def test_expanded_over_several_segments(tokens: int, context: int) -> None:
    compare(Pass([(context, tokens)], 8, form="expanded"))


def test_expanded_with_padding_and_empty_segments() -> None:
    compare(Pass([(50, 0), (1000, 300), (9, 0)], 8, padding=213, form="expanded", extra_pages=2000))
    assert not compare(Pass([(50, 0), (0, 0)], 8, padding=256, form="expanded")).any()


def test_expanded_equals_absorbed() -> None:
    expanded = Pass([(3000, 120)], 8, "chain", form="expanded")
    nope = expanded.inputs[0][..., :128].double()
    latent = torch.einsum("thn,hnc->thc", nope, expanded.inputs[1].double()).bfloat16()
    absorbed = [torch.cat([latent, expanded.inputs[0][..., 128:]], -1), *expanded.inputs[1:]]
    (found,) = Operator("mla_attention", expanded.attrs, expanded.inputs).run()
    (other,) = Operator("mla_attention", {**expanded.attrs, "form": "absorbed"}, absorbed).run()
    assert relative_error(found, other.double()) < 1e-2


@pytest.mark.parametrize("path", [[0, 1, 2], [0, 2, 5], [0, 3, 1, 7, 6, 5, 4, 2], [0]])
def test_compaction(path: list[int]) -> None:
    pool, row_slot = bf16(61, 4 * PAGE, 576), torch.randperm(4 * PAGE)[:40].int().cuda()
    paths = torch.full((2, 8), -1, dtype=torch.int32)
    paths[0, : len(path)] = torch.tensor(path)
    paths[1, :3] = torch.tensor([20, 25, 23])
    check("kv_compact", {}, [paths.cuda(), ints([len(path), 3]), ints([0, 20]), row_slot, pool], 1e-12)
