"""Builds the TensorRT plans of one phase: `python -m builder.tensorrt.worker`, run by `compile.py`.

TensorRT orders some things by address, so that only the first build of a process gives the same bytes every time: each
plan is built in a child of its own, forked from a process that has TensorRT loaded and nothing else. And what TensorRT
meets in a plugin's place may end the process.

stdin: the native plan's JSON with that one phase, then ONNX networks; each after its length (8 bytes, little endian).
stdout: the serialised plans in the same form. Where one is refused, stderr has one sentence, and the exit code is
REFUSED.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
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


def pack(parts: Iterable[bytes]) -> bytes:
    """Parts one after the other, each after its length."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """Inverse of `pack`; raises ValueError for data that end too early."""
    parts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    if at != len(data):
        raise ValueError("the data end too early")
    return parts


def _in_child(plan: Plan, network: bytes) -> bytes | int:
    """`compile_network` in a child process: the plan, or how the child ended. Sentences go to stderr."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(compile_network(plan, network))
        except (BuildError, TensorRtError) as error:
            print(" ".join(str(error).split()), file=sys.stderr, flush=True)
            os._exit(REFUSED)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return data if code == 0 else code


def main() -> int:
    text, *networks = unpack(sys.stdin.buffer.read())
    plan = Plan.from_json(json.loads(text))
    load_tensorrt()
    for network in networks:
        result = _in_child(plan, network)
        if isinstance(result, int):
            return result if result > 0 else 128 - result
        sys.stdout.buffer.write(pack([result]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
