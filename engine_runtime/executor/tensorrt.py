"""The TensorRT executor: the passes of an engine as TensorRT plans, in the graphs and on the memory of the CUDA
executor.

TensorRT orders the steps and computes what lies between the plugins; the plugins start our kernels. Weights, KV pool
and persistent buffers are bound by name, scratch lies in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine_runtime.engine import Engine
from engine_runtime.executor.collectives import Collectives
from engine_runtime.executor.cuda import CudaExecutor, Progress
from engine_runtime.executor.device import Device
from engine_runtime.executor.weights import WeightSource
from plugins.core.engine_file import EngineError
from plugins.core.plan import Plan, Step
from plugins.core.tensorrt import DONE, TensorRtError, bound_to, load_tensorrt, plugins_of, version_of

_REBUILD = "rebuild with `python build.py ... --arch sm_120a --tensorrt`"


def check_tensorrt(engine: Engine, find: Callable[[], Any] = load_tensorrt) -> Any:
    """This machine's TensorRT module, if it is the one that `engine` has plans of; raises `EngineError`."""
    plan = engine.plan
    built = plan.settings.get("tensorrt")
    if built is None:
        raise EngineError(
            f"{engine.path}: built without TensorRT plans for {plan.arch} (they exist for sm_120a alone): {_REBUILD}"
        )
    try:
        trt = find()
    except TensorRtError as error:
        raise EngineError(f"{engine.path}: its TensorRT plans need {built}: {error}") from None
    if version_of(trt) != built:
        raise EngineError(
            f"{engine.path}: its TensorRT plans need {built}, this machine has {version_of(trt)}: install that, or "
            f"{_REBUILD}"
        )
    missing = sorted(set(plan.phases) - set(engine.tensorrt))
    if missing:
        raise EngineError(f"{engine.path}: no TensorRT plan of {', '.join(missing)}: {_REBUILD}")
    return trt


class TensorRtExecutor(CudaExecutor):
    """As `CudaExecutor`, with the plans of `engine` on the module `trt` (see `check_tensorrt`).

    Raises `EngineError` for a plan that TensorRT cannot load on this device.
    """

    def __init__(
        self,
        engine: Engine,
        trt: Any,
        weights: WeightSource,
        device: Device,
        collectives: Collectives | None = None,
        progress: Progress = lambda fraction, what: None,
    ) -> None:
        self._trt = trt
        self._messages: list[str] = []
        self._log = _logger(trt, self._messages)
        self._runtime = trt.Runtime(self._log)
        self._contexts: dict[str, Any] = {}
        self._engines = self._deserialize(engine.plan, engine.tensorrt)
        super().__init__(engine.plan, engine.cubins, weights, device, collectives, progress)

    def _deserialize(self, plan: Plan, data: Mapping[str, bytes]) -> dict[str, Any]:
        engines = {}
        for key in plan.phases:
            with plugins_of(self._trt, plan, [key], self._start):
                engines[key] = self._runtime.deserialize_cuda_engine(data[key])
            if engines[key] is None:
                raise EngineError(f"{key}: TensorRT cannot load its plan here: {'; '.join(self._messages)}: {_REBUILD}")
        return engines

    def _arena_bytes(self) -> int:
        """One scratch for all: passes follow each other."""
        return max(self.plan.arena_bytes, _DONE_BYTES + max(e.device_memory_size_v2 for e in self._engines.values()))

    def _prepare(self, key: str) -> None:
        """Bind the plan of `key`, and run it once: TensorRT for RTX compiles its kernels at the first run, which must
        not be a captured one. Nothing is active, so the pass changes nothing that a request could see."""
        trt, engine = self._trt, self._engines[key]
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise EngineError(f"{key}: TensorRT makes no execution context: {'; '.join(self._messages)}")
        context.set_device_memory(self._arena + _DONE_BYTES, engine.device_memory_size_v2)
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            arg = bound_to(name)
            address = self._arena if arg is None else self._address(arg)
            if not context.set_tensor_address(name, address):
                raise EngineError(f"{key}: TensorRT refuses the address of {name}: {'; '.join(self._messages)}")
        self._contexts[key] = context
        self._execute(key)
        self.synchronize()
        if not context.is_stream_capturable(int(self.device.stream)):
            raise EngineError(f"{key}: its TensorRT plan cannot be captured into a CUDA graph: {_REBUILD}")

    def _enqueue_phase(self, key: str) -> None:
        self._execute(key)
        self._mirror.fetch(key)

    def _execute(self, key: str) -> None:
        if not self._contexts[key].execute_async_v3(int(self.device.stream)):
            raise EngineError(f"{key}: TensorRT did not run: {'; '.join(self._messages)}")

    def _start(self, step: Step, addresses: Sequence[int], stream: int) -> None:
        """What a plugin does: its step on TensorRT's addresses, on the device's stream, which is TensorRT's."""
        try:
            self._enqueue(self._bound(step, addresses))
        except Exception as error:  # TensorRT would keep it to itself
            self._messages.append(f"node {step.node}: {error}")
            raise


_DONE_BYTES = 256  # at the arena's start: "done" outputs are never written
assert DONE.nbytes <= _DONE_BYTES


def _logger(trt: Any, messages: list[str]) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc,name-defined]
        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(message)

    return Log()
