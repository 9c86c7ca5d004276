"""Times of a pass by operator and layer."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine_runtime import profile as module
from engine_runtime.budget import PLAIN
from engine_runtime.generation import GenerationRequest
from engine_runtime.profile import StepTime, picture, report, totals
from engine_runtime.runtime import Runtime
from engine_runtime.sampling import SamplingParams
from plugins.core.plugin import get_plugin

STEPS = [
    StepTime("embed", None, 1e-6, 1000, 0),
    StepTime("mla_attention absorbed", 0, 3e-6, 6_000_000, 9_000_000),
    StepTime("int4_marlin_gemm down", 0, 4e-6, 8_000_000, 0),
    StepTime("mla_attention absorbed", 1, 5e-6, 10_000_000, 15_000_000),
]


def test_sums_and_rates() -> None:
    groups = totals(STEPS, lambda step: step.name)
    assert list(groups) == ["embed", "mla_attention absorbed", "int4_marlin_gemm down"]
    mla = groups["mla_attention absorbed"]
    assert (mla.steps, mla.nbytes, mla.flops) == (2, 16_000_000, 24_000_000)
    assert mla.bandwidth == pytest.approx(2e12) and mla.rate == pytest.approx(3e12)
    assert module.Total(0, 0.0, 5, 5).bandwidth == 0


def test_the_report_has_the_slowest_first_and_the_layers_in_order() -> None:
    by_name, by_layer = report("verify[8]", 4096, STEPS).split("\n\n")
    assert by_name.splitlines()[0].startswith("verify[8] @4,096")
    assert [line.split()[0] for line in by_name.splitlines()[1:]] == [
        "mla_attention",
        "int4_marlin_gemm",
        "embed",
        "all",
    ]
    cells = by_name.splitlines()[1].split()
    assert cells[2:] == ["2", "8.0", "61.5", "16.00", "2000.0", "0.024", "3.00"]
    assert [line.split()[:3] for line in by_layer.splitlines()[1:]] == [
        ["-", "1", "1.0"],
        ["0", "2", "7.0"],
        ["1", "1", "5.0"],
        ["all", "4", "13.0"],
    ]


def test_the_picture_is_well_formed_and_to_scale() -> None:
    root = ElementTree.fromstring(picture("verify[8]", 4096, STEPS))
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if len(bar)]
    assert [bar[0].text for bar in bars] == [
        "layer -, embed: 1.0 us",
        "layer 0, mla_attention absorbed: 3.0 us",
        "layer 0, int4_marlin_gemm down: 4.0 us",
        "layer 1, mla_attention absorbed: 5.0 us",
    ]
    assert float(bars[2].get("height")) / float(bars[0].get("height")) == pytest.approx(4, rel=0.01)  # type: ignore[arg-type]


def test_a_profile_of_an_engine_leaves_it_usable(engine_path: Path) -> None:
    request = GenerationRequest((3, 1, 4, 1, 5), SamplingParams(max_tokens=6, stop_ids=()), PLAIN)
    with Runtime.open(engine_path) as runtime:
        before = runtime.generate([request])[0].tokens
        steps = runtime.profile("verify[4]", 7)
        phase = runtime._rank.executor.plan.phases["verify[4]"]
        assert len(steps) == len(phase.steps) and all(step.seconds > 0 for step in steps)
        assert [step.name.split()[0] for step in steps] == [step.plugin for step in phase.steps]
        assert {step.layer for step in steps} >= {None, 0, 1}
        attention = next(i for i, step in enumerate(phase.steps) if step.plugin == "mla_attention")
        specs = [arg.spec for arg in phase.steps[attention].inputs]
        outputs = [arg.spec for arg in phase.steps[attention].outputs]
        cost = get_plugin("mla_attention").cost(phase.steps[attention].attrs, specs, outputs, 7)  # type: ignore[arg-type]
        assert (steps[attention].nbytes, steps[attention].flops) == cost
        assert runtime.generate([request])[0].tokens == before
        for phase_key, context in (("verify[5]", 0), ("draft[1]", 0), ("verify[4]", 192), ("verify[4]", -1)):
            with pytest.raises(ValueError, match="expected"):
                runtime.profile(phase_key, context)
        runtime.submit(request)
        with pytest.raises(ValueError, match="no request is running"):
            runtime.profile("verify[4]", 0)
