"""Costs and the text report: numbers by hand and by the published sizes, totals that add up."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from builder.build import build, make_plans, open_source
from builder.describe import (
    buffer_bytes,
    contexts,
    describe,
    kv_bytes_per_token,
    load_plans,
    phase_arena_bytes,
    shapes,
    total_bytes,
    weight_bytes,
    weight_kind,
)
from builder.errors import BuildError
from builder.report_figures import lifetimes
from builder.roofline import AFTER, BEFORE, SM90, SM120, Cost, hardware_for, phase_cost, plan_costs, step_cost
from plugins.core.engine_file import EngineError
from plugins.core.packing import WeightRecipe
from plugins.core.plan import Arg, Plan, Step, Weight
from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec
from tests.builder.small_engine import IN, OPTIONS, OUT, ROWS, hand_plan, k26_verify_1, small_directories, small_plans


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A splat artifact of the small model, made by the builder."""
    base = tmp_path_factory.mktemp("describe")
    source = open_source(*small_directories(base), OPTIONS, lambda message: None)
    plans = make_plans(source, OPTIONS, lambda message: None)
    build(source, OPTIONS, plans, base / "engine", lambda message: None, lambda done, total, name: None)
    return base / "engine"


@pytest.fixture(scope="module")
def plans(artifact: Path) -> list[Plan]:
    return load_plans(artifact)


# ---- by hand ----


def test_costs_by_hand() -> None:
    plan = hand_plan()
    cost = phase_cost(plan.phases["verify[3]"], 0, SM120)
    gemm_bytes = 2 * (ROWS * IN + OUT * IN + ROWS * OUT)
    assert cost.steps[0].cost.nbytes == gemm_bytes == 4672
    assert cost.steps[0].cost.flops == 2 * ROWS * IN * OUT
    assert cost.steps[0].cost.seconds == pytest.approx(4672 / 1.792e12)
    assert cost.steps[0].cost.bound == "memory"
    # a ring all-reduce: 2 * 3/4 of 3 x 32 x 2 bytes come in, at 63 GB/s
    reduce = cost.steps[1].cost
    assert (reduce.link_bytes, reduce.bound) == (288, "link")
    assert reduce.seconds == reduce.link_s == pytest.approx(288 / 63e9)
    assert cost.total.seconds == pytest.approx(2 * 4672 / 1.792e12 + 288 / 63e9)
    assert cost.total.bound == "memory"  # 5.2 ns against 4.6 ns
    assert {key: value.steps for key, value in cost.by_layer().items()} == {0: 2, 1: 1}
    assert list(cost.by_plugin()) == ["dense_gemm", "all_reduce"]


def test_a_large_product_is_bound_by_arithmetic() -> None:
    wide = TensorSpec((4096, 4096), "bfloat16")
    args = (Arg("arena", "x", 0, wide), Arg("weight", "w", 0, wide))
    attrs = {"activation": "none", "out_dtype": "activation"}
    step = Step("n", "dense_gemm", "reference", attrs, args, (Arg("arena", "y", 0, wide),))
    for hardware in (SM120, SM90):
        cost = step_cost(step, 0, hardware)
        assert cost.bound == "compute"
        assert cost.seconds == pytest.approx(2 * 4096**3 / hardware.flops)


def test_all_gather_brings_the_parts_of_the_others() -> None:
    part, whole = TensorSpec((2, 8), "float32"), TensorSpec((2, 32), "float32")
    step = Step(
        *("n", "all_gather", "reference", {"tp_world": 4}),
        *((Arg("arena", "x", 0, part),), (Arg("arena", "y", 256, whole),)),
    )
    assert step_cost(step, 0, SM120).link_bytes == 3 * 64


def test_hardware_follows_the_arch() -> None:
    assert hardware_for("sm_90a") is SM90
    assert hardware_for("sm_120a") is hardware_for("cpu") is SM120


def test_report_of_the_hand_plan() -> None:
    plan = hand_plan()
    assert kv_bytes_per_token(plan) == {"kv_pool": 576 * 2 * 2}
    assert weight_bytes(plan) == {"attention": (1, 4096)}
    assert buffer_bytes(plan) == {"KV pool": (1, 2 * 48 * 576 * 2), "rows and requests": (1, 384)}
    assert total_bytes(plan) == 4096 + 110_592 + 384 + 768
    assert phase_arena_bytes(plan.phases["verify[3]"]) == 768  # z ends at 512 + 192, rounded up to 256
    text = describe([plan], "verify[3]")
    assert "tp 4, arch sm_120a, bfloat16 activations, bfloat16 KV" in text
    assert "2,304 B (kv_pool)" in text
    assert re.search(r"^verify\[3\] +3 +768 +9\.7 +9\.7 ", text, re.M)
    operands = re.escape("bfloat16[3,32] - - -> bfloat16[3,32]")
    assert re.search(rf"^ +1 +sum +all_reduce +reference .* link +{operands}$", text, re.M)
    assert re.search(r"^attention +1 +4,096 +4\.10 kB +100\.0$", text, re.M)
    assert "a rank fits" in text
    assert contexts(plan) == (0, 100)


def test_a_rank_that_is_too_large_is_named() -> None:
    plan = replace(hand_plan(), arena_bytes=SM120.memory)
    assert re.search(r"^A RANK IS 115\.07 kB TOO LARGE: 102\.64 GB on RTX PRO 6000", describe([plan]), re.M)


def test_unknown_phase_names_those_there_are() -> None:
    with pytest.raises(BuildError, match=r"--phase verify\[9\]: expected one of verify\[3\]"):
        describe([hand_plan()], "verify[9]")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("language_model.model.layers.3.mlp.experts.0.up_proj.weight_packed", "routed experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "dense MLP"),
        ("model.layers.0.self_attn.q_a_layernorm.weight", "attention"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("lm_head.weight", "vocabulary"),
        ("draft:layers.0.self_attn.q_proj.weight", "drafter"),
        ("something", "other weights"),
    ],
)
def test_weight_kinds(source: str, kind: str) -> None:
    assert weight_kind(Weight(TensorSpec((1,), "uint8"), WeightRecipe("p", (source,), ((1,),)))) == kind


# ---- the real model ----


def test_k26_verify_1_is_the_published_roofline() -> None:
    """6.03 GB and 3.37 ms a pass: spec arithmetic over the weights alone, q_a, kv_a and router replicated."""
    plan = k26_verify_1()
    total = plan_costs(plan, 0)["verify[1]"].total
    assert total.bound == "memory"
    assert total.nbytes == pytest.approx(6.03e9, rel=0.05)
    assert total.seconds == pytest.approx(3.37e-3, rel=0.05)
    # the same by formula: 60 x (attention + router + shared + 8 experts) + dense layer + lm_head
    attention = 2 * 7168 * (1536 + 576) + (2 * 1536 * 192 + 2 * 512 * 256) * 8 + 2 * 7168 * 1024
    moe = attention + 2 * 384 * 7168 + 2 * 3 * 7168 * 256 + 8 * 3 * 7168 * 256 * (4 + 16 / 32) / 8
    weights = 60 * moe + attention + 2 * 3 * 7168 * 18432 / 8 + 2 * 7168 * 163840 / 8
    assert weights == pytest.approx(6.03e9, rel=0.002)
    assert weights < total.nbytes < 1.02 * weights


def test_k26_context_costs_its_latents() -> None:
    plan = k26_verify_1()
    low, high = (plan_costs(plan, context)["verify[1]"].total for context in (0, 32_768))
    assert high.nbytes - low.nbytes == 32_768 * 61 * 576 * 2
    assert high.flops - low.flops == 61 * 32_768 * 8 * 2176  # 8 heads x 2 (576 + 512)


def test_k26_memory() -> None:
    """76.2 GB of target weights a rank at tp 8, 70,272 bytes of KV a token."""
    plan = k26_verify_1()
    assert plan.weight_bytes() == pytest.approx(76.2e9, rel=0.005)
    assert weight_bytes(plan)["routed experts"] == (120, 71_345_111_040)
    assert kv_bytes_per_token(plan) == {"kv_pool": 70_272, "draft_kv": 3072}
    assert "a rank fits" in describe([plan])


def test_k26_layers() -> None:
    layers = phase_cost(k26_verify_1().phases["verify[1]"], 0, SM120).by_layer()
    assert list(layers) == [BEFORE, *range(61), AFTER]
    assert len({cost for layer, cost in layers.items() if layer not in (BEFORE, 0, AFTER)}) == 1
    assert layers[30].nbytes == pytest.approx(93.1e6, rel=0.02)  # an MoE layer at one token


@pytest.mark.parametrize(
    ("tokens", "megabytes"),
    [(1, 24.8), (2, 49.0), (4, 96.0), (8, 184.3), (16, 340.1), (32, 582.9), (64, 880.0), (128, 1108.8)],
)
def test_k26_experts_of_a_layer(tokens: int, megabytes: float) -> None:
    """Distinct experts under uniform routing, 384 (1 - (47/48)^T), of 3.0966 MB a rank each."""
    plugin, moved, routes = get_plugin("int4_marlin_gemm"), 0.0, tokens * 8
    for stage, rows, columns in (("gate_up", 512, 7168), ("down", 7168, 256)):
        weight = TensorSpec((384, rows // 32, columns // 32, 576), "uint8")
        x = TensorSpec((tokens if stage == "gate_up" else routes, columns), "bfloat16")
        lists = (TensorSpec((385,), "int32"), TensorSpec((routes,), "int32"))
        inputs: list[TensorSpec | None] = [x, weight, *lists]
        inputs += [None, None] if stage == "gate_up" else [TensorSpec((tokens, 8), "float32"), None]
        attrs = {"stage": stage, "top_k": 8}
        outputs = plugin.infer(attrs, inputs)
        nbytes, flops = plugin.cost(attrs, inputs, outputs, 0)
        activations = sum(spec.nbytes for spec in [*inputs, *outputs] if spec is not None and spec is not weight)
        moved += nbytes - activations
        assert flops == 2 * routes * rows * columns
    assert moved / 1e6 == pytest.approx(megabytes, rel=2e-3)


# ---- the small engine ----


def test_loaded_plans_are_those_that_were_built(plans: list[Plan]) -> None:
    built = small_plans()
    assert [plan.to_json() for plan in plans] == [plan.to_json() for plan in built]


def test_missing_artifact_and_damaged_plan(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no engine here"):
        load_plans(tmp_path)
    copied = tmp_path / "engine"
    copied.mkdir()
    for path in artifact.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    rank = copied / "rank1.engine"
    data = rank.read_bytes()
    rank.write_bytes(data.replace(b'\\"version\\":1', b'\\"version\\":9'))
    with pytest.raises(EngineError, match=r"rank1.engine: plan cannot be read: plan version: expected 1, found 9"):
        load_plans(copied)
    rank.write_bytes(data[:-1])
    with pytest.raises(EngineError, match=r"rank1.engine: expected"):
        load_plans(copied)


def test_totals_are_sums(plans: list[Plan]) -> None:
    for plan in plans:
        assert sum(nbytes for _, nbytes in weight_bytes(plan).values()) == plan.weight_bytes()
        assert sum(count for count, _ in weight_bytes(plan).values()) == len(plan.weights)
        assert sum(nbytes for _, nbytes in buffer_bytes(plan).values()) == plan.buffer_bytes()
        assert max(map(phase_arena_bytes, plan.phases.values())) == plan.arena_bytes
        for cost in plan_costs(plan, 100).values():
            total = sum((step.cost for step in cost.steps), Cost())
            for groups in (cost.by_plugin(), cost.by_layer()):
                parts = sum(groups.values(), Cost())
                assert (parts.steps, parts.nbytes, parts.flops) == (total.steps, total.nbytes, total.flops)
                assert parts.seconds == pytest.approx(total.seconds)
            assert total == cost.total
            assert total.seconds >= total.nbytes / SM120.bandwidth * 0.999


def test_weights_read_by_several_phases_count_once(plans: list[Plan]) -> None:
    plan = plans[0]
    read: Counter[str] = Counter()
    for phase in plan.phases.values():
        read.update({arg.name for step in phase.steps for arg in step.inputs if arg.kind == "weight"})
    assert set(read) == set(plan.weights)
    assert max(read.values()) >= 3  # verify[1], verify[4], prefill
    assert "other weights" not in weight_bytes(plan)


def test_text_report_has_every_phase_and_rank(plans: list[Plan]) -> None:
    text = describe(plans)
    for key, phase in plans[0].phases.items():
        assert re.search(rf"^{re.escape(key)} +{len(phase.steps)} +{phase_arena_bytes(phase):,} ", text, re.M)
    for plan in plans:
        assert re.search(rf"^ +{plan.rank} .* {total_bytes(plan):,}$", text, re.M)
    assert "drafter with blocks of 4 on 2 taps" in text
    assert text.isascii()
    detailed = describe(plans, "verify[4]")
    for index, step in enumerate(plans[0].phases["verify[4]"].steps):
        assert re.search(rf"^ +{index} +{re.escape(step.node)} +{step.plugin} ", detailed, re.M)
        assert shapes(step.inputs) in detailed


def test_tables_are_aligned(plans: list[Plan]) -> None:
    """Every cell of a right-aligned column ends where its title ends."""
    lines = describe(plans).splitlines()
    head = next(line for line in lines if line.startswith("PHASE"))
    end = head.index("arena bytes") + len("arena bytes")
    rows = [line for line in lines if re.match(r"(prefill|verify|draft|append|root)\[", line)]
    assert len(rows) == len(plans[0].phases)
    assert all(line[end - 1].isdigit() and line[end] == " " for line in rows)


def test_layers_of_every_phase(plans: list[Plan]) -> None:
    found = {key: list(cost.by_layer()) for key, cost in plan_costs(plans[0], 0).items()}
    assert found["verify[4]"] == [BEFORE, 0, 1, 2, 3, AFTER]
    assert found["draft[1]"] == [BEFORE, 0, 1, AFTER]
    assert found["append[4]"] == [BEFORE, 0, 1]  # by the weights: its nodes have no names of their own
    assert found["root[2]"] == [BEFORE]


def test_no_two_live_values_share_a_byte(plans: list[Plan]) -> None:
    for phase in plans[0].phases.values():
        values = lifetimes(phase)
        for index in range(len(phase.steps)):
            live = sorted((v.offset, v.offset + v.nbytes) for v in values if v.first <= index <= v.last)
            assert all(end <= start for (_, end), (start, _) in zip(live, live[1:], strict=False))
