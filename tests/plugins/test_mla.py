"""`mla_prepare`, `mla_attention` and `kv_compact` against transformers' DeepseekV3Attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.packing import WeightRecipe, get_packer
from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec
from tests.plugins.mla_harness import (
    HEADS,
    HIDDEN,
    LATENT,
    LAYER,
    LAYERS,
    NOPE,
    PAGE,
    PAGES,
    Q_RANK,
    REQUESTS,
    ROPE,
    VALUE,
    Engine,
    Oracle,
    Rows,
    attrs,
    path_to,
    random_tree,
)

FORMS = ("absorbed", "expanded")
SLOTS = (REQUESTS * PAGES + 1) * PAGE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 2e-6)])
def test_prefill_and_decode_agree_with_transformers(form: str, dtype: torch.dtype, tolerance: float) -> None:
    """transformers norms in float32 even for float64 inputs, hence the second tolerance."""
    oracle = Oracle(dtype)
    engine = Engine(oracle, form, dtype)
    lengths, chunks = {0: 13, 2: 1, 3: 31}, {0: (5,), 2: (), 3: (16, 9)}
    text = {request: torch.randn(length, HIDDEN, dtype=dtype) for request, length in lengths.items()}
    expected = {request: oracle.run(x) for request, x in text.items()}

    done = dict.fromkeys(lengths, 0)
    for request, sizes in chunks.items():
        for size in sizes:
            out = engine.prefill(request, text[request][done[request] :][:size], padding=3)
            torch.testing.assert_close(out, expected[request][done[request] :][:size], atol=tolerance, rtol=1e-4)
            done[request] += size
    while any(done[request] < lengths[request] for request in lengths):
        work = {
            request: Rows(text[request][done[request] :][: 1 + request])
            for request in lengths
            if done[request] < lengths[request]
        }
        for request, out in engine.run(work, masked=True, padding=2).items():
            span = slice(done[request], done[request] + len(out))
            torch.testing.assert_close(out, expected[request][span], atol=tolerance, rtol=1e-4)
            done[request] += len(out)
            engine.context[request] += len(out)
    assert engine.pool[1 - LAYER].isnan().all()  # only the layer's own entries are written
    assert engine.pool[LAYER].isnan().any()


def test_rotary_positions_far_out_agree_with_transformers() -> None:
    oracle = Oracle(torch.float32)
    x = torch.randn(3, HIDDEN)
    q_b, norms = oracle.layer.q_b_proj.weight, (torch.ones(Q_RANK), torch.ones(LATENT))
    qkv_a = torch.cat((oracle.layer.q_a_proj(x), oracle.layer.kv_a_proj_with_mqa(x)), dim=1)
    positions, slots = torch.tensor([0, 4095, 261_000]), torch.tensor([1, 2, 3])
    pool = torch.zeros(LAYERS, PAGE, LATENT + ROPE)
    w_uk = torch.randn(HEADS, NOPE, LATENT)
    prepare = get_plugin("mla_prepare").reference(attrs("expanded"), None)  # type: ignore[arg-type]
    prepare(qkv_a, *norms, q_b, w_uk, positions.int(), slots.int(), pool)
    cos, sin = oracle.rotary(x[None], positions[None])
    pairs = qkv_a[:, -ROPE:].view(3, -1, 2)
    half = ROPE // 2
    a, b = pairs[..., 0], pairs[..., 1]
    c, s = cos[0, :, :half], sin[0, :, :half]
    rotated = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(1)
    torch.testing.assert_close(pool[LAYER, 1:, LATENT:], rotated, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_absorbed_and_expanded_agree(dtype: torch.dtype, tolerance: float) -> None:
    oracle = Oracle(dtype)
    text = torch.randn(17, HIDDEN, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    _, tree = random_tree(9, generator)
    tree.x = tree.x.to(dtype)
    results = []
    for form in FORMS:
        engine = Engine(oracle, form, dtype)
        prefill = engine.prefill(1, text)
        results.append(torch.cat((prefill, engine.run({1: tree}, masked=True)[1])))
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_tree_rows_equal_their_paths_run_as_chains(form: str, seed: int) -> None:
    """A batch of unequal trees; every row against its root-to-node path alone, in another paging."""
    dtype, generator = torch.float64, torch.Generator().manual_seed(seed)
    oracle = Oracle(dtype, seed)
    engine = Engine(oracle, form, dtype, seed)
    lengths = {0: 6, 1: 0, 3: 11}
    text = {r: torch.randn(n, HIDDEN, dtype=dtype, generator=generator) for r, n in lengths.items()}
    trees = {r: random_tree(nodes, generator) for r, nodes in zip(lengths, (33, 0, 7), strict=True)}
    for request, x in text.items():
        engine.prefill(request, x)
    out = engine.run({r: rows for r, (_, rows) in trees.items()}, masked=True, padding=1)
    for request, (parents, rows) in trees.items():
        for node in range(len(parents)):
            chain = torch.cat((text[request], rows.x[path_to(node, parents)]))
            alone = Engine(oracle, form, dtype, seed=100 + node).prefill(2, chain)
            torch.testing.assert_close(out[request][node], alone[-1], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_decoding_after_compaction_equals_decoding_after_prefill(seed: int) -> None:
    dtype, generator = torch.float64, torch.Generator().manual_seed(seed)
    oracle = Oracle(dtype, seed)
    engine = Engine(oracle, "absorbed", dtype, seed)
    text = {r: torch.randn(4 + r, HIDDEN, dtype=dtype, generator=generator) for r in (0, 1, 3)}
    trees = {r: random_tree(12, generator) for r in text}
    for request, x in text.items():
        engine.prefill(request, x)
    engine.run({r: rows for r, (_, rows) in trees.items()}, masked=True)

    path_rows = torch.full((REQUESTS, 13), -1, dtype=torch.int32)
    emitted = torch.zeros(REQUESTS, dtype=torch.int32)
    for request, (parents, rows) in trees.items():
        path = path_to(12 - request, parents)
        path_rows[request, : len(path)] = torch.tensor(path) + engine.first_row[request]
        emitted[request] = len(path)
        text[request] = torch.cat((text[request], rows.x[path]))
    assert (path_rows[:, 1:] - path_rows[:, :-1]).max() > 1  # something has to move
    compact = get_plugin("kv_compact").reference({}, None)  # type: ignore[arg-type]
    compact(path_rows, emitted, engine.first_row, engine.row_slot, engine.pool)
    engine.context += emitted
    for request, x in text.items():
        latest = torch.randn(1, HIDDEN, dtype=dtype, generator=generator)
        out = engine.run({request: Rows(latest)}, masked=True)[request]
        alone = Engine(oracle, "absorbed", dtype).prefill(request, torch.cat((x, latest)))
        torch.testing.assert_close(out, alone[-1:], atol=1e-10, rtol=1e-10)


def test_compaction_reads_before_it_writes_in_every_layer() -> None:
    pool = torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)
    before = pool.clone()
    slots = torch.tensor([7, 3, 5, 1, 2, 6], dtype=torch.int32)
    # request 0 keeps rows 0 2 3 of 0..3; request 1 takes no part; request 2 keeps both of its rows
    path = torch.tensor([[0, 2, 3, -1], [-1] * 4, [4, 5, -1, -1]], dtype=torch.int32)
    compact = get_plugin("kv_compact").reference({}, None)  # type: ignore[arg-type]
    first = torch.tensor([0, 0, 4], dtype=torch.int32)
    compact(path, torch.tensor([3, 0, 2], dtype=torch.int32), first, slots, pool)
    moved = before.clone()
    moved[:, 3], moved[:, 5] = before[:, 5], before[:, 1]
    assert torch.equal(pool, moved)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing_and_empty_passes_are_zero(form: str) -> None:
    oracle = Oracle(torch.float32)
    engine = Engine(oracle, form, torch.float32)
    visible = torch.tensor([[True, False], [False, False]])
    out = engine.run({2: Rows(torch.randn(2, HIDDEN), visible=visible)}, masked=True)[2]
    assert out[0].any() and not out[1].any()
    assert engine.run({}, masked=True, padding=4) == {}
    assert engine.run({}, masked=False, padding=4) == {}


def test_bfloat16_rounds_close_to_float32() -> None:
    oracle, text = Oracle(torch.float32), torch.randn(9, HIDDEN)
    exact = Engine(oracle, "absorbed", torch.float32).prefill(0, text)
    oracle.layer.bfloat16()
    rounded = Engine(oracle, "absorbed", torch.bfloat16).prefill(0, text.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.05 * float(exact.std()), rtol=0.1)


def specs(form: str = "absorbed", rows: int = 5) -> tuple[list, list]:
    """Operands of mla_prepare and of mla_attention that fit."""

    def f32(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "float32")

    def i32(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "int32")

    pool, w_uk = f32(LAYERS, SLOTS, LATENT + ROPE), TensorSpec((HEADS, NOPE, LATENT), "bfloat16")
    prepare = [
        f32(rows, Q_RANK + LATENT + ROPE),
        f32(Q_RANK),
        f32(LATENT),
        f32(HEADS * (NOPE + ROPE), Q_RANK),
    ]
    prepare += [w_uk, i32(64), i32(rows), pool]
    q = f32(rows, HEADS, (LATENT if form == "absorbed" else NOPE) + ROPE)
    per_request = [i32(REQUESTS)] * 3
    attend = [q, w_uk, TensorSpec((HEADS, VALUE, LATENT), "bfloat16"), i32(rows), *per_request]
    attend += [i32(REQUESTS, PAGES), pool, TensorSpec((40, 2), "uint32")]
    return prepare, attend


@pytest.mark.parametrize("form", FORMS)
def test_infer_gives_the_shapes(form: str) -> None:
    prepare, attend = specs(form)
    assert get_plugin("mla_prepare").infer(attrs(form), prepare) == [attend[0]]
    out = TensorSpec((5, HEADS * VALUE), "float32")
    assert get_plugin("mla_attention").infer(attrs(form), attend) == [out]
    assert get_plugin("mla_attention").infer(attrs(form), [*attend[:-1], None]) == [out]


@pytest.mark.parametrize(
    ("operator", "operand", "spec", "attribute"),
    [
        ("mla_prepare", "qkv_a", TensorSpec((5, 47), "float32"), {}),
        ("mla_prepare", "q_b", TensorSpec((60, Q_RANK), "float32"), {}),
        ("mla_prepare", "kv_pool", TensorSpec((LAYERS, SLOTS, LATENT), "float32"), {}),
        ("mla_prepare", "row_slot", TensorSpec((4,), "int32"), {}),
        ("mla_prepare", "positions", None, {}),
        ("mla_prepare", "layer", ..., {"layer": 2}),
        ("mla_prepare", "form", ..., {"form": "naive"}),
        ("mla_attention", "q", TensorSpec((5, HEADS, NOPE + ROPE), "float32"), {}),
        ("mla_attention", "mask", TensorSpec((40, 2), "int32"), {}),
        ("mla_attention", "mask", TensorSpec((4, 2), "uint32"), {}),
        ("mla_attention", "block_table", TensorSpec((3, PAGES), "int32"), {}),
        ("mla_attention", "kv_pool", ..., {"page_size": 5}),
        ("mla_attention", "w_uk", ..., {"num_heads": 8}),
    ],
)
def test_infer_refuses(operator: str, operand: str, spec: object, attribute: dict) -> None:
    plugin, inputs = get_plugin(operator), specs()[operator == "mla_attention"]
    if spec is not ...:
        inputs[[name.rstrip("?") for name in plugin.inputs].index(operand)] = spec
    with pytest.raises(PluginError, match=f"{operator}: {operand}: expected .*, found"):
        plugin.infer(attrs("absorbed") | attribute, inputs)


def test_cost_counts_each_requests_latents_once() -> None:
    plugin, (_, inputs) = get_plugin("mla_attention"), specs(rows=8)
    outputs = plugin.infer(attrs("absorbed"), inputs)
    (near, near_flops), (far, far_flops) = (
        plugin.cost(attrs("absorbed"), inputs, outputs, context) for context in (1000, 3000)
    )
    assert far - near == 2000 * REQUESTS * (LATENT + ROPE) * 4
    assert far_flops - near_flops == 2000 * 8 * HEADS * 2 * (2 * LATENT + ROPE)
    prefill = plugin.cost(attrs("absorbed"), [*inputs[:-1], None], outputs, 1000)[0]
    assert near - prefill == (REQUESTS - 1) * 1000 * (LATENT + ROPE) * 4


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packer_splits_kv_b_by_head(tp: int) -> None:
    packer = get_packer("mla_attention")
    source = np.random.default_rng(0).integers(0, 1 << 16, (HEADS * (NOPE + VALUE), LATENT), np.uint16)
    heads = source.reshape(HEADS, NOPE + VALUE, LATENT)
    sizes = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    for part, expected in (("uk", heads[:, :NOPE]), ("uv", heads[:, NOPE:])):
        recipe = WeightRecipe("mla_attention", ("kv_b",), (source.shape,), {"part": part, **sizes})
        own = HEADS // tp
        assert recipe.spec(tp) == TensorSpec((own, *expected.shape[1:]), "bfloat16")
        for rank in range(tp):
            pieces = list(packer.pack(recipe, lambda name: source, tp, rank))
            packed = np.concatenate(pieces)
            assert packed.shape == recipe.spec(tp).shape and all(p.flags.c_contiguous for p in pieces)
            (rows,) = packer.unpack(recipe, packed, tp)
            np.testing.assert_array_equal(rows, expected[rank * own : (rank + 1) * own].reshape(-1, LATENT))


@pytest.mark.parametrize("change", [{"part": "w"}, {"num_heads": 3}, {"tp": 3}])
def test_packer_refuses(change: dict) -> None:
    options = {"part": "uk", "num_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE} | change
    tp = options.pop("tp", 1)
    recipe = WeightRecipe("mla_attention", ("kv_b",), ((HEADS * (NOPE + VALUE), LATENT),), options)
    with pytest.raises(PluginError, match="mla_attention: .*expected .*, found"):
        recipe.spec(tp)
