"""The CUDA executor on a device of host memory: buffers, weights, room, and whole decoding as on the CPU executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.decoder import Decoder
from engine_runtime.engine import EngineError, load_engine
from engine_runtime.executor import Executor
from engine_runtime.executor.collectives import StandIn
from engine_runtime.executor.cpu import CpuExecutor
from engine_runtime.executor.cuda import open_device
from engine_runtime.executor.device import Device
from engine_runtime.executor.mirror import Mirror
from engine_runtime.executor.weights import FileWeights, weight_source
from engine_runtime.generation import GenerationRequest
from engine_runtime.sampling import SamplingParams
from plugins.core.kernel import CudaError
from plugins.core.spec import TensorSpec
from tests.runtime.fake_device import FakeDevice, ReferenceExecutor


def open_fake(path: Path, room: int = 1 << 32) -> ReferenceExecutor:
    engine = load_engine(path, 0, map_weights=False)
    return ReferenceExecutor(engine.plan, weight_source(engine), FakeDevice(room))


def run_all(executor: Executor, speculation: Speculation, logprobs: int | None) -> list[tuple]:
    """Tokens and log probabilities of a mix of requests."""
    decoder = Decoder(executor)
    rng = np.random.default_rng(5)
    for seed in range(6):
        prompt = tuple(rng.integers(0, 500, rng.integers(1, 60)).tolist())
        params = SamplingParams(
            temperature=0.8 * (seed % 2), seed=seed, max_tokens=12, stop_ids=(), presence_penalty=float(seed == 3)
        )
        decoder.submit(GenerationRequest(prompt, params, speculation, logprobs=logprobs))
    found: dict[int, list] = {}
    while decoder.busy:
        for event in decoder.step():
            found.setdefault(event.request, []).append((event.output.tokens, event.output.logprobs))
    return [
        (tuple(token for tokens, _ in found[i] for token in tokens), [lp for _, lp in found[i]]) for i in sorted(found)
    ]


@pytest.mark.parametrize("speculation", [PLAIN, Speculation("tree", 9)])
def test_decoding_is_that_of_the_cpu_executor(engine_path: Path, speculation: Speculation) -> None:
    engine = load_engine(engine_path, 0)
    expected = run_all(CpuExecutor(engine.plan, engine.weights), speculation, 2)
    executor = open_fake(engine_path)
    assert run_all(executor, speculation, 2) == expected
    assert all(len(tokens) == 12 for tokens, _ in expected)


def test_weights_arrive_as_they_are_in_the_file(engine_path: Path) -> None:
    engine = load_engine(engine_path, 0)
    streamed = load_engine(engine_path, 0, map_weights=False)
    assert not streamed.weights and streamed.weights_file is not None
    device, fractions = FakeDevice(), []
    addresses = FileWeights(streamed.weights_file).upload(device, {}, fractions.append)  # type: ignore[arg-type]
    assert list(addresses) == list(engine.weights) and fractions[-1] == 1.0
    for name, expected in engine.weights.items():
        assert addresses[name] % 256 == 0
        assert np.array_equal(device.fetched(addresses[name], expected), expected), name


def test_a_flipped_bit_is_found_while_reading(engine_path: Path, tmp_path: Path) -> None:
    streamed = load_engine(engine_path, 0, map_weights=False)
    assert streamed.weights_file is not None
    data = bytearray(streamed.weights_file.path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "rank0.weights").write_bytes(data)
    file = replace(streamed.weights_file, path=tmp_path / "rank0.weights")
    with pytest.raises(EngineError, match="content differs from what was built.*rebuild with"):
        FileWeights(file).upload(FakeDevice(), {}, lambda fraction: None)  # type: ignore[arg-type]
    unchecked = replace(file, digest=None)
    FileWeights(unchecked).upload(FakeDevice(), {}, lambda fraction: None)  # type: ignore[arg-type]
    (tmp_path / "rank0.weights").write_bytes(data[:-1])
    with pytest.raises(EngineError, match="ends too early"):
        FileWeights(unchecked).upload(FakeDevice(), {}, lambda fraction: None)  # type: ignore[arg-type]


def test_an_engine_that_does_not_fit_is_refused_with_the_numbers(engine_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"needs 0\.\d\d GB \(weights 0\.\d\d, KV 0\.\d\d, .*0\.00 of 0\.00 GB are free"
    ):
        open_fake(engine_path, room=1000)


def test_an_engine_for_another_gpu_is_refused(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what refuses TensorRT plans on an H200: they are for sm_120a alone."""
    plan = replace(load_engine(engine_path, 0).plan, arch="sm_120a")
    monkeypatch.setattr("engine_runtime.executor.cuda.device_arch", lambda ordinal: "sm_90a")
    with pytest.raises(EngineError, match="built for sm_120a, device 0 is sm_90a: rebuild with `again`"):
        open_device(plan, 0, "again")


def test_large_buffers_are_read_and_written_by_rows(engine_path: Path) -> None:
    executor = open_fake(engine_path)
    counts = executor.plan.buffers["token_counts"]
    executor.write("token_counts", np.arange(counts.shape[1]), 2)
    executor.write("token_counts", 7, slice(0, 1))
    assert np.array_equal(executor.read("token_counts", 2), np.arange(counts.shape[1]))
    whole = executor.read("token_counts")
    assert whole.shape == counts.shape and (whole[0] == 7).all() and not whole[1].any()
    with pytest.raises(IndexError, match="token_counts: rows"):
        executor.read("token_counts", counts.shape[0])


@pytest.fixture
def mirror() -> Iterator[tuple[Mirror, FakeDevice]]:
    device = FakeDevice()
    specs = {name: TensorSpec((8,), "int32") for name in ("host", "both", "result", "also host")}
    yield Mirror(device, specs, {"pass": {"both", "result"}}), device  # type: ignore[arg-type]


def device_values(mirror: Mirror, device: FakeDevice, name: str) -> np.ndarray:
    return device.fetched(mirror.address(name), np.empty(8, np.int32))


def test_host_writes_go_up_in_one_copy(mirror: tuple[Mirror, FakeDevice]) -> None:
    image, device = mirror
    image.write("host", 3, slice(None))
    image.write("also host", 4, 2)
    image.flush()
    assert device.uploads == 1
    image.flush()
    assert device.uploads == 1
    image.write("host", 9, slice(None))  # waits for the copy, which must not see it
    assert (device_values(image, device, "host") == 3).all()
    assert device_values(image, device, "also host").tolist() == [0, 0, 4, 0, 0, 0, 0, 0]


def test_host_writes_do_not_undo_what_a_pass_has_written(mirror: tuple[Mirror, FakeDevice]) -> None:
    image, device = mirror
    graph = device.capture(
        lambda: (
            device.fill(image.address("both"), 1, 32),
            device.fill(image.address("result"), 2, 32),
            image.fetch("pass"),
        )
    )
    device.replay(graph)
    image.ran("pass")
    image.write("both", 5, 0)
    image.write("host", 6, 0)
    image.flush()
    assert device_values(image, device, "both").tolist() == [5, *[0x01010101] * 7]
    assert (image.read("result") == 0x02020202).all()
    with pytest.raises(ValueError, match="read-only"):
        image.read("result")[0] = 1


def test_a_stand_in_gathers_its_own_values() -> None:
    device = FakeDevice()
    source, target = device.allocate(32), device.allocate(96)
    device.fill(source, 7, 32)
    StandIn(3).run("all_gather", source, target, TensorSpec((8,), "float32"), device)  # type: ignore[arg-type]
    assert (device.fetched(target, np.empty(96, np.uint8)) == 7).all()


def test_the_fake_has_what_the_device_has() -> None:
    used = {name for name in vars(FakeDevice) if not name.startswith("_")}
    assert used - {"do", "fetched", "name", "stream"} <= set(vars(Device))


def test_decoding_allocates_nothing(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = open_fake(engine_path)

    def refuse(*args: object) -> None:
        raise AssertionError("memory, events and graphs are made at load alone")

    for name in ("allocate", "pinned", "event", "capture"):
        monkeypatch.setattr(FakeDevice, name, refuse)
    rng = np.random.default_rng(7)
    decoder = Decoder(executor)
    for seed in range(12):
        params = SamplingParams(temperature=0.5, seed=seed, max_tokens=40, stop_ids=())
        decoder.submit(GenerationRequest(tuple(rng.integers(0, 500, 20).tolist()), params, Speculation("tree", 9)))
    steps = 0
    while decoder.busy:
        decoder.step()
        steps += 1
    assert steps > 60 and len(executor.fake._queue) < 500


def test_work_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_runtime.executor import device as module

    busy = (module.driver.CUresult.CUDA_ERROR_NOT_READY,)
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(module, "_SPIN_SECONDS", 0.01)
    monkeypatch.setattr(module.driver, "cuEventQuery", lambda event: busy)
    stuck = SimpleNamespace(name="fake GPU")
    with pytest.raises(module.DeviceTimeout, match=r"fake GPU: a pass has not ended within 0\.05 seconds"):
        Device.wait(stuck, None)  # type: ignore[arg-type]
    failed = (module.driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    monkeypatch.setattr(module.driver, "cuEventQuery", lambda event: failed)
    with pytest.raises(CudaError, match="cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"):
        Device.wait(stuck, None)  # type: ignore[arg-type]
