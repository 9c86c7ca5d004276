"""The operators as TensorRT plugins: one IPluginV3 class for all of them, on the steps of the native plan.

A node of the graph that TensorRT is given (builder/tensorrt) carries the names of its phase and step. The plugin
finds the step in the native plan that lies in the same engine file, so attributes, shapes, workspace and kernels have
one source, and `enqueue` starts the very kernels that the native executor starts.

An operator writes some of its inputs in place (the KV pool). TensorRT's contract calls inputs constant; these are
inputs of the network, which TensorRT never moves, copies or reuses. The outputs named "done" are not written: they
only tell TensorRT which steps must wait for which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from plugins.core.plan import Arg, Phase, Plan, Step, pair
from plugins.core.plugin import PLUGIN_NAMES, PluginError, get_plugin
from plugins.core.spec import TensorSpec

NAMESPACE, VERSION = "k2", "1"
DONE = TensorSpec((1,), "int32")
PACKAGES = ("tensorrt", "tensorrt_rtx_bindings")  # the first that is installed is taken
_WORD = 4  # bytes: uint8 tensors are shown to TensorRT as int32 words, and uint32 ones as int32

Start = Callable[[Step, Sequence[int], int], None]


class TensorRtError(PluginError):
    """TensorRT that is missing, of another version, or that refuses a network."""


@dataclass(frozen=True)
class StepCall:
    """A step as a plugin sees it. waits_for: steps whose "done" it takes, after its present inputs; `done`: it gives
    one itself, after its present outputs."""

    phase: str
    step: Step
    waits_for: tuple[str, ...]
    done: bool

    def inputs(self) -> list[TensorSpec]:
        return [arg.spec for arg in self.step.inputs if arg.spec is not None] + [DONE] * len(self.waits_for)

    def outputs(self) -> list[TensorSpec]:
        return [arg.spec for arg in self.step.outputs if arg.spec is not None] + [DONE] * self.done

    def addresses(self, inputs: Sequence[int], outputs: Sequence[int], workspace: int) -> tuple[int, ...]:
        """TensorRT's addresses in the order of the kernels' arguments (`Tactic.launches`), 0 for what is absent."""
        plugin = get_plugin(self.step.plugin)
        found: list[int] = []
        for names, args, given in (
            (plugin.inputs, self.step.inputs, iter(inputs)),
            (plugin.outputs, self.step.outputs, iter(outputs)),
        ):
            found += [0 if arg.spec is None else next(given) for _, arg in pair(names, args)]
        return (*found, workspace if self.step.workspace.spec is not None else 0)

    def __str__(self) -> str:
        return f"{self.phase}, node {self.step.node} ({self.step.plugin})"


def step_calls(phase: Phase) -> dict[str, StepCall]:
    """Every step of `phase` by node name, with the waits that make TensorRT keep the plan's order: a step that shares a
    persistent buffer with an earlier one, of which either writes it, waits for it, unless its operands imply that."""
    before: list[int] = []  # bit set of the steps that each step comes after
    values: dict[tuple[str, str], int] = {}  # value, or buffer that is a step's output -> the step that writes it
    touched: dict[str, list[tuple[int, bool]]] = {}  # buffer -> (step, writes it), in order
    waits: list[tuple[int, ...]] = []
    for index, step in enumerate(phase.steps):
        reached = 0
        for arg in step.inputs:
            source = values.get((arg.kind, arg.name))
            if source is not None:
                reached |= before[source] | 1 << source
        found = []
        uses = _buffers(step)
        for other in sorted(
            {i for name, writes in uses.items() for i, wrote in touched.get(name, ()) if writes or wrote}, reverse=True
        ):
            if not reached >> other & 1:
                found.append(other)
                reached |= before[other] | 1 << other
        for name, writes in uses.items():
            touched.setdefault(name, []).append((index, writes))
        values.update({(arg.kind, arg.name): index for arg in step.outputs})
        waits.append(tuple(sorted(found)))
        before.append(reached)
    waited = {i for one in waits for i in one}
    return {
        step.node: StepCall(
            phase.key,
            step,
            tuple(phase.steps[i].node for i in wait),
            index in waited or not any(arg.spec for arg in step.outputs),
        )
        for index, (step, wait) in enumerate(zip(phase.steps, waits, strict=True))
    }


def _buffers(step: Step) -> dict[str, bool]:
    """Persistent buffers that a step uses, and whether it writes them."""
    plugin = get_plugin(step.plugin)
    uses = {arg.name: False for arg in step.inputs if arg.kind == "buffer"}
    uses.update({arg.name: True for n, arg in pair(plugin.inputs, step.inputs) if n in plugin.mutates and arg.name})
    uses.update({arg.name: True for arg in step.outputs if arg.kind == "buffer"})
    return uses


def is_glue(step: Step) -> bool:
    """Whether TensorRT may compute `step` itself: on weights and values alone, in a way that ONNX operators express."""
    if any(arg.kind == "buffer" for arg in (*step.inputs, *step.outputs)):
        return False
    # logits keep the float32 sums of bfloat16 products: no ONNX operator does
    return step.plugin == "rms_norm" or (step.plugin == "dense_gemm" and step.attrs["out_dtype"] == "activation")


def glue_kind(step: Step) -> str:
    """What glue steps of equal work share, e.g. "dense_gemm silu_mul 512x7168"."""
    weight, activation = step.inputs[1].spec, step.attrs.get("activation", "none")
    assert weight is not None
    shape = "x".join(map(str, weight.shape))
    return f"{step.plugin} {shape}" if activation == "none" else f"{step.plugin} {activation} {shape}"


def segment_key(phase: str, kind: str) -> str:
    """Name of the TensorRT plan of one glue step (inputs x and weight, output y), which exists to be timed."""
    return f"{phase}/{kind}"


def shown(spec: TensorSpec) -> TensorSpec:
    """How TensorRT is told of a tensor: the dtypes that it lacks as int32 words of the same bytes."""
    if spec.dtype == "uint32":
        return TensorSpec(spec.shape, "int32")
    if spec.dtype != "uint8":
        return spec
    *rows, columns = spec.shape
    if columns % _WORD:
        raise TensorRtError(f"{spec}: expected rows of whole {_WORD}-byte words, which TensorRT can be shown as int32")
    return TensorSpec((*rows, columns // _WORD), "int32")


def input_name(arg: Arg) -> str:
    """Name of the network input of a weight or a persistent buffer."""
    return f"{arg.kind}:{arg.name}"


def output_name(buffer: str) -> str:
    """Name of the network output that goes to a persistent buffer."""
    return f"result:{buffer}"


def done_name(node: str) -> str:
    """Name of the "done" of a step."""
    return f"done:{node}"


def bound_to(name: str) -> Arg | None:
    """What a network input or output is bound to; None for a "done"."""
    kind, _, what = name.partition(":")
    return {"weight": Arg("weight", what), "buffer": Arg("buffer", what), "result": Arg("buffer", what)}.get(kind)


def load_tensorrt() -> Any:
    """The TensorRT module: `tensorrt` where it is installed, else TensorRT for RTX. Raises `TensorRtError`."""
    for name in PACKAGES:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        if name != "tensorrt":
            _name_library(Path(import_module("tensorrt_rtx_libs").__file__ or "").parent)
        return module
    raise TensorRtError(f"TensorRT is not installed ({' or '.join(PACKAGES)}): pip install 'k2-engine[tensorrt]'")


def version_of(trt: Any) -> str:
    """Package and version, which must be the same at build and at load."""
    return f"{trt.__name__} {trt.__version__}"


def _name_library(folder: Path) -> None:
    """A link with the unversioned name under which TensorRT for RTX looks for itself when it meets a plugin, and
    without which it ends the process."""
    link, target = folder / "libtensorrt_rtx.so", "libtensorrt_rtx.so.1"
    if sys.platform != "linux" or link.exists():
        return
    try:
        link.symlink_to(target)
    except FileExistsError:  # another process was faster
        return
    except OSError as error:
        raise TensorRtError(
            f"{link}: cannot be made ({error.strerror}), and TensorRT for RTX needs it: run `ln -s {target} {link}` "
            "as the owner of that folder"
        ) from None


@dataclass
class _Bound:
    """What plugins find while TensorRT parses or loads: the steps, how they are started, and what went wrong."""

    calls: dict[tuple[str, str], StepCall]
    start: Start
    errors: list[TensorRtError]


_bound: list[_Bound] = []


@contextmanager
def plugins_of(trt: Any, plan: Plan, phases: Sequence[str], start: Start) -> Iterator[None]:
    """While the block runs, plugins that TensorRT makes are steps of `phases` of `plan`; `start(step, addresses,
    stream)` is what they do when TensorRT enqueues them, then and later.

    TensorRT swallows exceptions of Python plugins: the first one is raised when the block ends.
    """
    _register(trt)
    calls = {(key, node): call for key in phases for node, call in step_calls(plan.phases[key]).items()}
    bound = _Bound(calls, start, [])
    _bound.append(bound)
    try:
        yield
    except Exception as error:
        if bound.errors:
            raise bound.errors[0] from error
        raise
    finally:
        _bound.remove(bound)
    if bound.errors:
        raise bound.errors[0]


def make_plugin(trt: Any, phase: str, node: str) -> Any:
    """The IPluginV3 of one step of the plan that `plugins_of` has bound."""
    if not _bound:
        raise TensorRtError(f"{phase}, node {node}: a plugin was asked for with no plan bound")
    bound = _bound[-1]
    call = bound.calls.get((phase, node))
    if call is None:
        raise TensorRtError(f"{phase}, node {node}: no such step in the native plan: rebuild the engine")
    return _classes(trt)[0](call, bound)


@cache
def _register(trt: Any) -> None:
    """Creators of all operators, once in a process."""
    registry = trt.get_plugin_registry()
    for name in PLUGIN_NAMES:
        registry.register_creator(_classes(trt)[1](name), NAMESPACE)


@cache
def _classes(trt: Any) -> tuple[Any, Any]:
    """(plugin class, creator class): their bases exist only in TensorRT's module."""
    dtypes = {"float32": trt.float32, "bfloat16": trt.bfloat16, "int32": trt.int32, "int64": trt.int64}

    def told(spec: TensorSpec) -> tuple[Any, tuple[int, ...]]:
        return dtypes[shown(spec).dtype], shown(spec).shape

    class StepPlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore
        """One step, for its whole life: built, cloned, shapes told, enqueued."""

        def __init__(self, call: StepCall, bound: _Bound) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3OneCore.__init__(self)
            trt.IPluginV3OneBuild.__init__(self)
            trt.IPluginV3OneRuntime.__init__(self)
            self.call, self.bound = call, bound
            self.plugin_name, self.plugin_namespace, self.plugin_version = call.step.plugin, NAMESPACE, VERSION
            self.num_outputs = len(call.outputs())
            self.timing_cache_id = ""

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            return StepPlugin(self.call, self.bound)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            return [told(spec)[0] for spec in self.call.outputs()]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
            shapes = []
            for spec in self.call.outputs():
                dims = told(spec)[1]
                found = trt.DimsExprs(len(dims))
                for axis, size in enumerate(dims):
                    found[axis] = builder.constant(size)
                shapes.append(found)
            return shapes

        def supports_format_combination(self, pos: int, described: Sequence[Any], num_inputs: int) -> bool:
            specs = [*self.call.inputs(), *self.call.outputs()]
            found = described[pos].desc
            return bool(found.format == trt.TensorFormat.LINEAR and found.type == told(specs[pos])[0])

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._check([one.desc for one in inputs], [one.desc for one in outputs])

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            self._check(inputs, outputs)

        def _check(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            for side, specs, found in (
                ("input", self.call.inputs(), inputs),
                ("output", self.call.outputs(), outputs),
            ):
                given = [(one.type, tuple(one.dims)) for one in found]
                wanted = [told(spec) for spec in specs]
                if given == wanted:
                    continue
                error = TensorRtError(f"{self.call}: {side}s: expected {wanted}, TensorRT gives {given}")
                self.bound.errors.append(error)
                raise error

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            workspace = self.call.step.workspace.spec
            return 0 if workspace is None else workspace.nbytes

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            pass

        def get_fields_to_serialize(self) -> Any:
            return fields(trt, self.call.phase, self.call.step.node)

        def enqueue(
            self,
            input_desc: Sequence[Any],
            output_desc: Sequence[Any],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            self.bound.start(self.call.step, self.call.addresses(inputs, outputs, workspace), stream)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc,name-defined]
        """Makes plugins of one operator."""

        def __init__(self, name: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = name, NAMESPACE, VERSION
            self.field_names = fields(trt, "", "")

        def create_plugin(self, name: str, collection: Any, phase: Any) -> Any:
            given = {field.name: bytes(field.data).rstrip(b"\0").decode() for field in collection}
            try:
                return make_plugin(trt, given["phase"], given["node"])
            except TensorRtError as error:
                if _bound:
                    _bound[-1].errors.append(error)
                raise

    return StepPlugin, Creator


def fields(trt: Any, phase: str, node: str) -> Any:
    """What a plugin keeps of itself in a TensorRT plan, as a PluginFieldCollection."""
    return _kept_fields(trt, phase, node)[0]


@cache
def _kept_fields(trt: Any, phase: str, node: str) -> tuple[Any, ...]:
    """Kept for good: fields point to their data and do not hold it, and TensorRT reads them much later."""
    data = {"phase": phase.encode(), "node": node.encode()}
    kept = [trt.PluginField(name, text, trt.PluginFieldType.CHAR) for name, text in data.items()]
    return trt.PluginFieldCollection(kept), kept, data
