"""The TensorRT executor on a device of host memory: whole decoding, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder.tensorrt.network import to_network
from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.engine import Engine, EngineError, load_engine
from engine_runtime.executor.cpu import CpuExecutor
from engine_runtime.executor.cuda import CudaExecutor
from engine_runtime.executor.tensorrt import TensorRtExecutor, check_tensorrt
from engine_runtime.executor.weights import weight_source
from engine_runtime.runtime import Runtime
from plugins.core.plan import Step
from plugins.core.tensorrt import TensorRtError, version_of
from tests.fake_tensorrt import FakeTensorRt
from tests.runtime.fake_device import FakeDevice, ReferenceSteps
from tests.runtime.test_cuda_executor import run_all


class ReferenceTensorRtExecutor(ReferenceSteps, TensorRtExecutor):
    """The TensorRT executor, with references in place of the plugins' kernels."""

    def __init__(self, engine: Engine, trt: FakeTensorRt, device: FakeDevice) -> None:
        self.fake = device
        self.enqueued: list[str] = []
        super().__init__(engine, trt, weight_source(engine), device)

    def _start(self, step: Step, addresses, stream: int) -> None:
        self.enqueued.append(step.node)
        super()._start(step, addresses, stream)


def with_networks(path: Path, trt: FakeTensorRt) -> Engine:
    engine = load_engine(path, 0, map_weights=False)
    engine.plan.settings["tensorrt"] = version_of(trt)
    networks = {key: to_network(phase).SerializeToString() for key, phase in engine.plan.phases.items()}
    return replace(engine, tensorrt=networks)


@pytest.mark.parametrize("speculation", [PLAIN, Speculation("tree", 9)])
def test_decoding_is_that_of_the_cpu_executor(engine_path: Path, speculation: Speculation) -> None:
    engine = load_engine(engine_path, 0)
    expected = run_all(CpuExecutor(engine.plan, engine.weights), speculation, None)
    device = FakeDevice()
    trt = FakeTensorRt(device.do)
    executor = ReferenceTensorRtExecutor(with_networks(engine_path, trt), trt, device)
    assert run_all(executor, speculation, None) == expected
    plugins = [step.node for step in engine.plan.phases["verify[16]"].steps if step.plugin not in ("rms_norm",)]
    assert set(executor.enqueued) & set(plugins)


def test_the_arena_holds_what_tensorrt_needs(engine_path: Path) -> None:
    device = FakeDevice()
    trt = FakeTensorRt(device.do)
    engine = with_networks(engine_path, trt)
    executor = ReferenceTensorRtExecutor(engine, trt, device)
    # the fake puts no two tensors in one place, so it needs more than the plan
    assert executor._arena_bytes() > engine.plan.arena_bytes == CudaExecutor._arena_bytes(executor)


def refusal(engine: Engine, trt: object) -> str:
    with pytest.raises(EngineError) as found:
        check_tensorrt(engine, lambda: trt)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_it_is_not_built_for_is_refused_with_one_sentence(engine_path: Path) -> None:
    trt = FakeTensorRt(lambda work: work())
    plain = load_engine(engine_path, 0, map_weights=False)
    assert "built without TensorRT plans for cpu (they exist for sm_120a alone): rebuild" in refusal(plain, trt)
    engine = with_networks(engine_path, trt)
    assert check_tensorrt(engine, lambda: trt) is trt
    engine.plan.settings["tensorrt"] = "tensorrt_fake 1.1"
    assert "need tensorrt_fake 1.1, this machine has tensorrt_fake 1.0: install" in refusal(engine, trt)
    engine = replace(with_networks(engine_path, trt), tensorrt={"verify[1]": b""})
    assert "no TensorRT plan of append" in refusal(engine, trt)

    def absent() -> None:
        raise TensorRtError("TensorRT is not installed")

    with pytest.raises(EngineError, match=r"need tensorrt_fake 1\.0: TensorRT is not installed"):
        check_tensorrt(engine, absent)


def test_a_plan_that_does_not_load_is_refused(engine_path: Path) -> None:
    device = FakeDevice()
    trt = FakeTensorRt(device.do)
    engine = with_networks(engine_path, trt)
    bad = replace(engine, tensorrt={**engine.tensorrt, "verify[4]": b"bad"})
    with pytest.raises(EngineError, match=r"verify\[4\]: TensorRT cannot load its plan here: not a plan: rebuild"):
        ReferenceTensorRtExecutor(bad, trt, device)


def test_a_plan_of_another_engine_is_refused(engine_path: Path) -> None:
    device = FakeDevice()
    trt = FakeTensorRt(device.do)
    engine = with_networks(engine_path, trt)
    other = {**engine.tensorrt, "verify[4]": engine.tensorrt["verify[4]"].replace(b"verify[4]", b"verify[9]")}
    with pytest.raises(TensorRtError, match=r"verify\[9\], node .*no such step in the native plan"):
        ReferenceTensorRtExecutor(replace(engine, tensorrt=other), trt, device)


def test_an_engine_for_the_cpu_has_none(engine_path: Path) -> None:
    with pytest.raises(EngineError, match="built for the CPU: TensorRT plans exist for sm_120a alone"):
        Runtime.open(engine_path, tensorrt=True)
