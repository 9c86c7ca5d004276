"""The TensorRT plans of an engine: one per phase and bucket, for SM120, made on any machine.

A plan names steps of the native plan and holds no weights, so all ranks of an engine share it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from builder.errors import BuildError
from builder.tensorrt.network import segments, to_network
from builder.tensorrt.worker import REFUSED, pack, unpack
from plugins.core.engine_file import plan_json
from plugins.core.plan import Plan
from plugins.core.tensorrt import load_tensorrt, segment_key, version_of

ARCHS = ("sm_120a",)  # of those that we build for, the ones that TensorRT for RTX knows
_WORKER = "builder.tensorrt.worker"


def compile_plans(
    plans: Sequence[Plan], progress: Callable[[str], None], tactics: Path | None = None
) -> tuple[str, dict[str, bytes]]:
    """(TensorRT's package and version, serialised plans by phase and by segment: `segment_key`) for all ranks together.

    tactics: what `python -m engine_runtime tactics` has written; glue that our kernels do faster stays with them.
    Raises `BuildError` naming node, shape and arch for what TensorRT does not take, `TensorRtError` where it is
    missing.
    """
    first = plans[0]
    if first.arch not in ARCHS:
        raise BuildError(f"--tensorrt: expected --arch {' or '.join(ARCHS)}, found {first.arch}: TensorRT has no other")
    version = version_of(load_tensorrt())
    native = {} if tactics is None else read_tactics(tactics, version)
    networks = {key: _networks(plans, key, native.get(key, frozenset())) for key in first.phases}
    built: dict[str, bytes] = {}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        results = workers.map(lambda key: _compile(first, key, networks[key]), networks)
        for index, (key, found) in enumerate(zip(networks, results, strict=True), 1):
            built |= found
            progress(f"TensorRT plan {index} of {len(networks)}: {key}")
    return version, built


def read_tactics(path: Path, version: str) -> dict[str, frozenset[str]]:
    """Phase -> kinds of glue that our kernels compute at least as fast; raises `BuildError` for a file of another kind
    or of another version of TensorRT."""
    again = "measure again with `python -m engine_runtime tactics`"
    try:
        value = json.loads(path.read_text())
        if value["tensorrt"] != version:
            raise BuildError(f"{path}: measured with {value['tensorrt']}, this is {version}: {again}")
        return {
            key: frozenset(kind for kind, times in kinds.items() if times["native_us"] <= times["tensorrt_us"])
            for key, kinds in value["phases"].items()
        }
    except OSError as error:
        raise BuildError(f"--tactics {path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path}: not a table of tactics ({type(error).__name__}: {error}): {again}") from None


def _networks(plans: Sequence[Plan], key: str, native: frozenset[str]) -> dict[str, bytes]:
    """The phase's network and those of its segments, by name."""
    first, *others = [to_network(plan.phases[key], native).SerializeToString(deterministic=True) for plan in plans]
    if any(other != first for other in others):
        raise BuildError(f"{key}: the ranks' networks differ: this is a defect of the builder, please report it")
    parts = segments(plans[0].phases[key]).items()
    return {key: first} | {segment_key(key, kind): m.SerializeToString(deterministic=True) for kind, m in parts}


def _compile(plan: Plan, key: str, networks: dict[str, bytes]) -> dict[str, bytes]:
    """The serialised plans, made by a worker process."""
    one = plan_json(replace(plan, phases={key: plan.phases[key]}, weights={}, buffers={})).encode()
    command = [sys.executable, "-m", _WORKER]
    done = subprocess.run(command, input=pack([one, *networks.values()]), capture_output=True)
    words = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if done.returncode == REFUSED:
        raise BuildError(words[-1])
    if done.returncode != 0:
        raise BuildError(f"{key} for {plan.arch}: TensorRT ended its process ({done.returncode}): {words[-1]}")
    return dict(zip(networks, unpack(done.stdout), strict=True))
