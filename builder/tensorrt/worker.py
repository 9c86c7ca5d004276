"""Builds one TensorRT plan: `python -m builder.tensorrt.worker`, run by `compile.py`, one process a plan.

TensorRT orders some things by address, so that only the first build of a process gives the same bytes every time; and
what it meets in a plugin's place may end the process.

stdin: length of the native plan's JSON (8 bytes, little endian), that JSON with one phase, then the ONNX network.
stdout: the serialised plan, or nothing: then stderr has one sentence, and the exit code is REFUSED.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from builder.errors import BuildError
from plugins.core.plan import Phase, Plan
from plugins.core.tensorrt import TensorRtError, load_tensorrt, plugins_of

REFUSED = 3  # the exit code that says so, with the sentence on stderr
_SHOWN = 3  # messages of TensorRT in an error


def compile_network(plan: Plan, network: bytes) -> bytes:
    """The serialised TensorRT plan of the one phase of `plan`; raises `BuildError`, `TensorRtError`."""
    trt = load_tensorrt()
    (phase,) = plan.phases.values()
    messages: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc,name-defined]
        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(message)

    log = Log()
    builder = trt.Builder(log)
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.max_aux_streams = 0  # one stream: that of the graph
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # else a capture would meet an allocation
    with plugins_of(trt, plan, [phase.key], _never):
        parser = trt.OnnxParser(definition, log)
        if not parser.parse(network):
            raise BuildError(f"{phase.key} for {plan.arch}: TensorRT does not take {_refusals(parser, phase)}")
        result = builder.build_serialized_network(definition, config)
    if result is None:
        raise BuildError(f"{phase.key} for {plan.arch}: TensorRT cannot build it: {'; '.join(messages[:_SHOWN])}")
    return bytes(result)


def _refusals(parser: Any, phase: Phase) -> str:
    """The parser's errors, each with its node and what goes into that node."""
    steps = {step.node: step for step in phase.steps}
    texts = []
    for error in [parser.get_error(i) for i in range(min(parser.num_errors, _SHOWN))]:
        step = steps.get(error.node_name().partition("/")[0])
        specs = [] if step is None else [str(arg.spec) for arg in step.inputs if arg.spec is not None]
        texts.append(f"node {error.node_name()} ({error.node_operator()}) of {', '.join(specs)}: {error.desc()}")
    return "; ".join(texts)


def _never(step: Any, addresses: Sequence[int], stream: int) -> None:
    raise TensorRtError(f"node {step.node}: TensorRT ran a plugin while it built")


def main() -> int:
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    plan = Plan.from_json(json.loads(sys.stdin.buffer.read(size)))
    try:
        built = compile_network(plan, sys.stdin.buffer.read())
    except (BuildError, TensorRtError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
