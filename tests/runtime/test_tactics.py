"""Timing what lies between the plugins, natively and as TensorRT plans, on a device of host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builder.errors import BuildError
from builder.options import BuildOptions
from builder.tensorrt.compile import read_tactics
from builder.tensorrt.network import segments, to_network
from engine_runtime.engine import load_engine
from engine_runtime.executor.weights import weight_source
from engine_runtime.tactics import measure, tensorrt_steps
from plugins.core.tensorrt import glue_kind, is_glue, segment_key
from tests.fake_tensorrt import FakeTensorRt
from tests.runtime.fake_device import FakeDevice, ReferenceExecutor, memory


@pytest.fixture
def fake(engine_path: Path):  # type: ignore[no-untyped-def]
    device = FakeDevice()
    trt = FakeTensorRt(device.do)
    engine = load_engine(engine_path, 0, map_weights=False)
    plans = {
        segment_key(key, kind): model.SerializeToString()
        for key, phase in engine.plan.phases.items()
        for kind, model in segments(phase).items()
    }
    executor = ReferenceExecutor(engine.plan, weight_source(engine), device)
    return executor, replace(engine, tensorrt=plans), trt.Runtime(None), device


def test_every_kind_of_every_phase_is_timed(fake) -> None:  # type: ignore[no-untyped-def]
    executor, engine, runtime, device = fake
    blocks, lines = len(device._blocks), []
    times = measure(executor, runtime, None, engine, lines.append)
    assert len(device._blocks) == blocks  # scratch was given back
    assert list(times) == list(engine.plan.phases) and not times["root[4]"]
    for key, phase in engine.plan.phases.items():
        assert set(times[key]) == {glue_kind(step) for step in phase.steps if is_glue(step)}, key
        for found in times[key].values():  # a step is one piece of work on this device, whoever does it
            assert found == pytest.approx({"native_us": 1.0, "tensorrt_us": 1.0})
    assert len(lines) == sum(map(len, times.values())) > 20


def test_both_compute_the_same(fake) -> None:  # type: ignore[no-untyped-def]
    """The segment of a step on the step's own addresses gives what the step gives."""
    executor, engine, runtime, device = fake
    bounds = [b for b in executor.start_steps("verify[4]") if b.step.attrs.get("activation") == "silu_mul"]
    bound = bounds[0]
    x, _, y, _ = bound.addresses
    size, spec = bound.step.inputs[0].spec.nbytes, bound.step.outputs[0].spec
    values = np.random.default_rng(0).standard_normal(size // 4).astype(np.float32)
    results = []
    data = engine.tensorrt[segment_key("verify[4]", glue_kind(bound.step))]
    with tensorrt_steps(executor, runtime, None, data, [bound]) as run:
        for go in (lambda: executor.start_step(bound), run):
            memory(x, size).view(np.float32)[:] = values
            memory(y, spec.nbytes)[:] = 0xFF
            go()
            executor.synchronize()
            results.append(memory(y, spec.nbytes).view(np.float32).copy())
    assert np.abs(results[0]).max() > 0 and np.allclose(*results, rtol=1e-5, atol=1e-6)


def test_the_builder_keeps_what_is_not_slower(fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, engine, _, _ = fake
    phase = engine.plan.phases["verify[4]"]
    kinds = list(segments(phase))
    times = {kind: {"native_us": 2.0, "tensorrt_us": 1.0 + index % 2} for index, kind in enumerate(kinds)}
    path = tmp_path / "tactics.json"
    path.write_text(json.dumps({"tensorrt": "tensorrt_fake 1.0", "phases": {"verify[4]": times}}))
    native = read_tactics(path, "tensorrt_fake 1.0")["verify[4]"]
    assert native == frozenset(kinds[1::2])
    plugins = {node.name for node in to_network(phase, native).graph.node if node.domain == "k2"}
    for step in phase.steps:
        assert (step.node in plugins) == (not is_glue(step) or glue_kind(step) in native)


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tactics.json"
    with pytest.raises(BuildError, match="cannot be read"):
        read_tactics(path, "x 1")
    path.write_text(json.dumps({"tensorrt": "x 2", "phases": {}}))
    with pytest.raises(BuildError, match="measured with x 2, this is x 1: measure again"):
        read_tactics(path, "x 1")
    for text in ("[]", "{", '{"tensorrt": "x 1", "phases": {"verify[4]": {"a": 3}}}'):
        path.write_text(text)
        with pytest.raises(BuildError, match="not a table of tactics"):
            read_tactics(path, "x 1")
    with pytest.raises(BuildError, match="expected --tensorrt with it"):
        BuildOptions(tactics=path)
