"""Kernel images in engine files: every launch once, under the name its step asks for, the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from builder.kernels import compile_images
from builder.writer import Staging
from plugins.core.plan import Arg, Phase, Plan, Step
from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec
from tests.builder.small_engine import hand_plan


def plan_with_kernels() -> Plan:
    """verify[3]: the same router twice."""
    specs = [
        TensorSpec((3, 64), "bfloat16"),
        TensorSpec((16, 64), "bfloat16"),
        TensorSpec((16,), "float32"),
        TensorSpec((3,), "int32"),
    ]
    attrs = {"top_k": 4, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    tactic = next(t for t in get_plugin("moe_route").tactics if "sm_120a" in t.archs)
    assert tactic.launches is not None
    launches = tactic.launches(attrs, specs, "sm_120a")
    inputs = tuple(Arg("buffer", f"input{i}", 0, spec) for i, spec in enumerate(specs))
    steps = tuple(
        Step(name, "moe_route", tactic.name, attrs, inputs, (), launches=launches) for name in ("first", "second")
    )
    plan = hand_plan()
    plan.phases = {"verify[3]": Phase("verify", 3, steps)}
    return plan


def test_images_are_compiled_once_and_land_in_the_engine(tmp_path: Path) -> None:
    plan = plan_with_kernels()
    messages: list[str] = []
    images = compile_images([plan, plan], False, messages.append)
    wanted = {launch.image for step in plan.phases["verify[3]"].steps for launch in step.launches}
    assert list(images) == sorted(wanted) and len(messages) == len(wanted) == 2
    files = []
    for name in ("a", "b"):
        with Staging(tmp_path / name) as staging:
            staging.add_engines([plan], "print", images)
            files.append(staging.directory / "rank0.engine")
    assert files[0].read_bytes() == files[1].read_bytes()
    stored = load_file(files[0])
    assert {name: bytes(stored[name]) for name in wanted} == images
    assert Plan.from_json(plan.to_json()) == plan


def test_reference_steps_have_no_image() -> None:
    assert compile_images([hand_plan()], False, pytest.fail) == {}
