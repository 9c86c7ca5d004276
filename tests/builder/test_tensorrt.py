"""TensorRT plans of real TensorRT for RTX: whole ranks of K2.6 for SM120, built here, with no GPU."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import torch

from builder.build import build, make_plans, open_source
from builder.errors import BuildError
from builder.options import BuildOptions
from builder.pipeline import build_plans
from builder.tensorrt import glue
from builder.tensorrt.compile import compile_plans
from builder.tensorrt.glue import lower
from builder.tensorrt.network import to_network
from builder.tensorrt.program import read_program
from builder.tensorrt.report import side_by_side
from engine_runtime.engine import EngineError, load_engine
from engine_runtime.executor.cpu import SingleRank
from engine_runtime.executor.tensorrt import TensorRtExecutor, check_tensorrt
from engine_runtime.executor.weights import weight_source
from plugins.core.plan import Arg, Phase, Plan, Step
from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.tensorrt import (
    TensorRtError,
    fields,
    glue_kind,
    is_glue,
    load_tensorrt,
    plugins_of,
    shown,
    step_calls,
    version_of,
)
from tests.fake_tensorrt import Desc, FakeTensorRt
from tests.full_size import k26_config, k26_draft_config
from tests.runtime.fake_device import FakeDevice

LAYERS = 61
NANO = Path(__file__).parents[2] / "artifacts" / "k2-nano"


@pytest.fixture(scope="module")
def trt() -> Any:
    try:
        return load_tensorrt()
    except TensorRtError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def k26_plan() -> Plan:
    """Rank 0 of 8, all layers: two verify buckets, both prefill chunks, the drafter's passes."""
    options = BuildOptions(tp=8, arch="sm_120a", splat=True, verify_buckets=(8, 32), kv_tokens=262_144)
    plan = build_plans(k26_config(), k26_draft_config(), options)[0]
    kept = ("verify[8]", "verify[32]", "prefill[4096]", "draft[1]", "append[8]")
    return replace(plan, phases={key: plan.phases[key] for key in kept})


def small_plan(**options: Any) -> Plan:
    """Two layers, two ranks' worth of nothing else left out."""
    config = replace(k26_config(), num_hidden_layers=2)
    return build_plans(config, None, BuildOptions(splat=True, verify_buckets=(4,), kv_tokens=262_144, **options))[0]


@pytest.fixture(scope="module")
def verify() -> tuple[Plan, Phase]:
    plan = small_plan(tp=8, arch="sm_120a")
    return plan, plan.phases["verify[4]"]


def test_a_whole_rank_builds_in_seconds_and_twice_the_same(trt: Any, k26_plan: Plan) -> None:
    peaks: dict[int, int] = {}
    with watched_memory(peaks):
        start = time.monotonic()
        _, built = compile_plans([k26_plan], lambda message: None)
        seconds = time.monotonic() - start
    again = replace(k26_plan, phases={key: k26_plan.phases[key] for key in ("prefill[4096]", "verify[8]")})
    for key, data in compile_plans([again], lambda message: None)[1].items():
        assert data == built[key], key
    assert seconds < 120 and len(peaks) > len(k26_plan.phases) and max(peaks.values()) < 2e9
    assert sum(map(len, built.values())) < 20e6
    for key, phase in k26_plan.phases.items():
        program = read_program(built[key])
        assert program is not None
        assert (program.programs, program.streams, program.capturable) == (1, 1, True)
        assert program.accelerators == "sm120" and 0 < program.scratch < 1e9
        assert program.plugins() == [step.node for step in phase.steps if not is_glue(step)], key
    kinds = Counter(operation.kind for operation in read_program(built["verify[8]"]).operations)  # type: ignore[union-attr]
    # a layer: qkv_a, o, gate_up, down; SiLU of each MLP, and the first norm, the others being in all_reduce
    assert kinds["fully_connected"] == 4 * LAYERS and kinds["function"] == LAYERS + 1


@contextmanager
def watched_memory(peaks: dict[int, int]) -> Iterator[None]:
    """Largest resident bytes of every worker process that lives while the block runs, by process id."""
    done = Event()

    def watch() -> None:
        while not done.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "builder.tensorrt.worker" in process.cmdline():
                        peaks[process.pid] = max(peaks.get(process.pid, 0), process.memory_info().rss)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def test_an_engine_holds_the_plans_beside_the_native_ones(trt: Any, tmp_path: Path) -> None:
    options = BuildOptions(arch="sm_120a", prefill_chunk=64, verify_buckets=(4,), tensorrt=True)
    source = open_source(NANO / "checkpoint", NANO / "draft", options, lambda message: None)
    plans = make_plans(source, options, lambda message: None)
    build(source, options, plans, tmp_path / "engine", lambda message: None, lambda *progress: None)
    engine = load_engine(tmp_path / "engine", 0)
    assert engine.plan.settings["tensorrt"] == version_of(trt)
    assert {key for key in engine.tensorrt if "/" not in key} == set(engine.plan.phases)
    kinds = {glue_kind(step) for step in engine.plan.phases["verify[4]"].steps if is_glue(step)}
    assert {key.partition("/")[2] for key in engine.tensorrt if key.startswith("verify[4]/")} == kinds
    assert not any(name.startswith("tensorrt:") for name in engine.cubins) and engine.cubins
    assert all(read_program(data) is not None for data in engine.tensorrt.values())
    if not torch.cuda.is_available():  # TensorRT itself says why it does not load them here
        streamed = load_engine(tmp_path / "engine", 0, map_weights=False)
        with pytest.raises(EngineError, match=r"TensorRT cannot load its plan here: .*CUDA driver.*: rebuild with"):
            TensorRtExecutor(streamed, check_tensorrt(streamed), weight_source(streamed), FakeDevice())  # type: ignore[arg-type]


# ---- errors ----


def test_another_arch_is_refused() -> None:
    with pytest.raises(BuildError, match="--tensorrt: expected --arch sm_120a, found sm_90a"):
        compile_plans([small_plan(tp=8, arch="sm_90a")], lambda message: None)


def test_a_missing_plugin_is_named(verify: tuple[Plan, Phase]) -> None:
    _, phase = verify
    steps = (replace(phase.steps[0], plugin="embeddings"), *phase.steps[1:])
    with pytest.raises(BuildError, match=r"verify\[4\], node target.embed: embeddings is no plugin.*moe_route"):
        to_network(Phase("verify", 4, steps))


def test_a_layer_that_tensorrt_lacks_is_named(
    trt: Any, verify: tuple[Plan, Phase], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(step: Step, inputs: Any, output: str) -> Any:
        return [onnx.helper.make_node("RmsNormOfNobody", inputs, [output], name=f"{step.node}/0")], []

    monkeypatch.setitem(glue._LOWERINGS, "rms_norm", unknown)
    wanted = r"verify\[4\] for sm_120a: .*node target.layers.0.rms_norm/0 \(RmsNormOfNobody\) of bfloat16\[4,7168\]"
    with pytest.raises(BuildError, match=wanted):
        compile_plans([replace(verify[0], phases={"verify[4]": verify[1]})], lambda message: None)


def test_a_wrong_dtype_is_named(trt: Any, verify: tuple[Plan, Phase]) -> None:
    """A product of bfloat16 and int32: TensorRT's own words, with the node, its shapes and the arch."""
    plan, phase = verify
    index = next(i for i, step in enumerate(phase.steps) if is_glue(step) and step.plugin == "dense_gemm")
    step = phase.steps[index]
    spec = step.inputs[0].spec
    assert spec is not None
    wrong = replace(step.inputs[1], spec=TensorSpec(step.inputs[1].spec.shape, "int32"))  # type: ignore[union-attr]
    bad = replace(step, inputs=(step.inputs[0], wrong))
    broken = Phase("verify", 4, (*phase.steps[:index], bad, *phase.steps[index + 1 :]))
    original, glue._Nodes.weight = glue._Nodes.weight, lambda self, name: name  # type: ignore[method-assign]
    try:
        with pytest.raises(BuildError, match=r"verify\[4\] for sm_120a.*dense_gemm"):
            compile_plans([replace(plan, phases={"verify[4]": broken})], lambda message: None)
    finally:
        glue._Nodes.weight = original  # type: ignore[method-assign]


def test_bytes_that_are_no_words_are_refused() -> None:
    assert shown(TensorSpec((3, 8), "uint8")) == TensorSpec((3, 2), "int32")
    assert shown(TensorSpec((3, 5), "uint32")) == TensorSpec((3, 5), "int32")
    with pytest.raises(TensorRtError, match=r"uint8\[3,5\]: expected rows of whole 4-byte words"):
        shown(TensorSpec((3, 5), "uint8"))


# ---- the order of the steps ----


def reached(phase: Phase) -> dict[str, set[str]]:
    """For every step, the steps that operands and waits make it come after."""
    calls, written, before = step_calls(phase), {}, {}
    for step in phase.steps:
        direct = {written[arg.kind, arg.name] for arg in step.inputs if (arg.kind, arg.name) in written}
        direct |= set(calls[step.node].waits_for)
        before[step.node] = direct.union(*(before[node] for node in direct))
        written.update({(arg.kind, arg.name): step.node for arg in step.outputs})
    return before


def test_steps_that_share_a_buffer_keep_their_order() -> None:
    config, draft = replace(k26_config(), num_hidden_layers=2), replace(k26_draft_config(), target_layer_ids=(0, 1))
    options = BuildOptions(tp=8, arch="sm_120a", splat=True, verify_buckets=(8,), kv_tokens=262_144)
    for phase in build_plans(config, draft, options)[0].phases.values():
        before, seen = reached(phase), {}
        for step in phase.steps:
            plugin = get_plugin(step.plugin)
            for name, arg in zip(plugin.inputs, step.inputs, strict=False):
                if arg.kind == "buffer":
                    writes = name.removesuffix("?") in plugin.mutates
                    for other, wrote in seen.get(arg.name, []):
                        assert not (writes or wrote) or other == step.node or other in before[step.node], arg.name
                    seen.setdefault(arg.name, []).append((step.node, writes))
            for arg in step.outputs:
                if arg.kind == "buffer":
                    seen.setdefault(arg.name, []).append((step.node, True))


def test_only_what_nobody_reads_says_that_it_is_done(verify: tuple[Plan, Phase]) -> None:
    calls = step_calls(verify[1])
    assert [node for node, call in calls.items() if call.done] == ["ddtree_accept", "kv_compact"]
    assert calls["kv_compact"].waits_for == ("ddtree_accept",)


# ---- the life of a plugin ----


@pytest.mark.parametrize("real", [True, False], ids=["TensorRT for RTX", "a module in Python"])
def test_a_plugin_through_its_life(request: pytest.FixtureRequest, verify: tuple[Plan, Phase], real: bool) -> None:
    trt = request.getfixturevalue("trt") if real else FakeTensorRt(lambda work: work())
    plan, phase = verify
    step = next(one for one in phase.steps if one.plugin == "moe_route")
    specs = [[shown(arg.spec) for arg in args if arg.spec is not None] for args in (step.inputs, step.outputs)]
    inputs, outputs = specs
    started: list[tuple[Step, tuple[int, ...], int]] = []
    with plugins_of(trt, plan, [phase.key], lambda *call: started.append(call)):
        creator, when = creator_of(trt, "moe_route")
        made = creator.create_plugin(step.node, fields(trt, phase.key, step.node), when)
    assert not started
    plugin = made.clone()
    assert (plugin.plugin_name, plugin.plugin_namespace, plugin.plugin_version) == ("moe_route", "k2", "1")
    assert plugin.get_capability_interface(None) is plugin and plugin.num_outputs == 4
    types = [getattr(trt, spec.dtype) for spec in inputs]
    assert plugin.get_output_data_types(types) == [trt.float32, trt.int32, trt.int32, trt.int32]
    if isinstance(trt, FakeTensorRt):
        check_shapes(plugin, inputs, outputs)
    assert plugin.get_workspace_size([], []) == step.workspace.spec.nbytes > 0  # type: ignore[union-attr]
    assert plugin.get_valid_tactics() == []
    assert {field.name for field in plugin.get_fields_to_serialize()} == {"phase", "node"}
    running = plugin.attach_to_context(None)
    running.enqueue([], [], [1, 2, 3, 4], [5, 6, 7, 8], 9, 77)
    assert started == [(step, (1, 2, 3, 4, 5, 6, 7, 8, 9), 77)]


def check_shapes(plugin: Any, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
    """What TensorRT's own classes do not let a test make."""
    shapes = plugin.get_output_shapes([], [], SimpleNamespace(constant=lambda size: size))
    assert [tuple(shape) for shape in shapes] == [spec.shape for spec in outputs]
    told = [Desc(spec.dtype, spec.shape) for spec in (*inputs, *outputs)]
    count = len(inputs)
    assert all(plugin.supports_format_combination(i, told, count) for i in range(len(told)))
    plugin.configure_plugin(told[:count], told[count:])
    for wrong in (Desc("float32", inputs[1].shape), Desc("bfloat16", inputs[1].shape, "vectorised")):
        assert not plugin.supports_format_combination(1, [told[0], wrong, *told[2:]], count)
    for tell in (plugin.configure_plugin, plugin.on_shape_change):
        with pytest.raises(TensorRtError, match=r"verify\[4\], node .* \(moe_route\): inputs: expected .*7168.*gives"):
            tell([told[0], Desc("bfloat16", (1, 2)), *told[2:count]], told[count:])
        with pytest.raises(TensorRtError, match=r"\(moe_route\): outputs: expected"):
            tell(told[:count], told[count:-1])


def creator_of(trt: Any, name: str) -> tuple[Any, Any]:
    """(creator of the operator, the phase to tell it)."""
    if isinstance(trt, FakeTensorRt):
        return trt.creators[name], None
    return trt.get_plugin_registry().get_creator(name, "1", "k2"), trt.TensorRTPhase.BUILD


def test_a_step_that_is_not_in_the_plan_is_named_though_tensorrt_swallows_it(verify: tuple[Plan, Phase]) -> None:
    trt = FakeTensorRt(lambda work: work())
    with (
        pytest.raises(TensorRtError, match=r"verify\[4\], node nobody: no such step in the native plan"),
        plugins_of(trt, verify[0], ["verify[4]"], lambda *call: None),
        suppress(TensorRtError),
    ):
        trt.creators["embed"].create_plugin("x", fields(trt, "verify[4]", "nobody"), None)


def test_absent_operands_are_zero(verify: tuple[Plan, Phase]) -> None:
    _, phase = verify
    step = next(one for one in phase.steps if one.plugin == "int4_marlin_gemm" and one.attrs["stage"] == "gate_up")
    call = step_calls(phase)[step.node]
    assert [arg.kind for arg in step.inputs] == ["arena", "weight", "arena", "arena", "none", "none"]
    assert call.addresses([1, 2, 3, 4], [5], 6) == (1, 2, 3, 4, 0, 0, 5, 0)  # and no workspace


# ---- what lies between the plugins ----


def random_value(spec: TensorSpec, rng: np.random.Generator) -> torch.Tensor:
    value = torch.from_numpy(rng.standard_normal(spec.shape, np.float32))
    return value.bfloat16() if spec.dtype == "bfloat16" else value


def test_onnx_operators_equal_the_references() -> None:
    """Every kind of step that TensorRT computes itself, in float32 by onnxruntime, which has no bfloat16 products."""
    plan = small_plan(tp=8, arch="cpu", max_context=1024)
    steps = [step for phase in plan.phases.values() for step in phase.steps if phase.bucket <= 32 and is_glue(step)]
    kinds = {(step.plugin, json.dumps(step.attrs), tuple(str(arg.spec) for arg in step.inputs)): step for step in steps}
    assert {step.plugin for step in steps} == {"rms_norm", "dense_gemm"} and len(kinds) >= 6
    rng = np.random.default_rng(11)
    for step in kinds.values():
        x, weight = (random_value(arg.spec, rng) for arg in step.inputs)  # type: ignore[arg-type]
        if step.plugin == "dense_gemm":
            weight = (weight.float() * weight.shape[1] ** -0.5).bfloat16()
        nodes, constants = lower(step, ("x", "weight"), "y")
        kind = {torch.float32: onnx.TensorProto.FLOAT, torch.bfloat16: onnx.TensorProto.BFLOAT16}
        inputs = [
            onnx.helper.make_tensor_value_info(name, kind[value.dtype], value.shape)
            for name, value in (("x", x), ("weight", weight))
        ]
        output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, step.outputs[0].spec.shape)  # type: ignore[union-attr]
        graph = onnx.helper.make_graph(nodes, "glue", inputs, [output], constants)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = {
            "x": onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()),
            "weight": onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                weight.view(torch.uint16).numpy(), onnx.TensorProto.BFLOAT16
            ),
        }
        (found,) = (value.numpy() for value in session.run_with_ort_values(None, values))
        plugin = get_plugin(step.plugin)
        prepared = plugin.prepare(step.attrs, "weight", weight, torch.float64)
        expected = plugin.reference(step.attrs, SingleRank())(x.double(), prepared.double())
        scale = float(expected.abs().max())
        assert np.abs(found - expected.numpy()).max() < 3e-6 * scale, (step.node, step.attrs)


def test_another_text_than_a_plan_reads_as_unknown() -> None:
    assert read_program(b"") is None and read_program(b"gvtr" + bytes(1000)) is None


def test_buffers_are_read_where_they_were_written(verify: tuple[Plan, Phase]) -> None:
    network = to_network(verify[1])
    by_name = {node.name: node for node in network.graph.node}
    assert by_name["all_gather"].output[0] == by_name["sample"].input[0] == "result:logits"
    assert "buffer:kv_pool" in [value.name for value in network.graph.input]
    assert Arg("buffer", "logits").name not in [value.name for value in network.graph.input]


def test_both_plans_are_shown_side_by_side(verify: tuple[Plan, Phase]) -> None:
    plan, phase = verify
    one = replace(plan, phases={"verify[4]": phase}, settings={**plan.settings, "tensorrt": "tensorrt_fake 1.0"})
    text = b"gvtr header {\n  version = 5\n  n_streams = 1\n  region = { name=devmem size=4096 alignment=1 }\n"
    text += b"  stream_capturable=1\n  accelerators={sm120 }\nmain {\n"
    text += b'  custom_layer={ name="a_U1" output={} layers="[ONNX Layer: target.embed]" }\n'
    text += b'  fully_connected={ name="b" layers="[ONNX Layer: b/0.Gemm]" }\n'
    text += b'  function={ name=c layers="[ONNX Layer: c]" }\n'
    shown_line = side_by_side(one, {"verify[4]": text}).splitlines()[2].split()
    kernels = sum(len(step.launches) + (step.tactic == "nccl") for step in phase.steps)
    assert shown_line[:4] == ["verify[4]", str(len(phase.steps)), str(kernels), f"{kernels / 2:.1f}"]
    assert shown_line[5:] == [str(len(text)), "B", "1", "1", "1", "3", "1.5", "4,096", "1", "1", "yes"]
    assert side_by_side(one, {"verify[4]": b"?"}).splitlines()[2].split()[7:] == ["?"] * 9
