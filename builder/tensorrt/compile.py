"""The TensorRT plans of an engine: one per phase and bucket, for SM120, made on any machine.

A plan names steps of the native plan and holds no weights, so all ranks of an engine share it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from builder.errors import BuildError
from builder.tensorrt.network import to_network
from builder.tensorrt.worker import REFUSED
from plugins.core.engine_file import plan_json
from plugins.core.plan import Plan
from plugins.core.tensorrt import load_tensorrt, version_of

ARCHS = ("sm_120a",)  # of those that we build for, the ones that TensorRT for RTX knows
_WORKER = "builder.tensorrt.worker"


def compile_plans(plans: Sequence[Plan], progress: Callable[[str], None]) -> tuple[str, dict[str, bytes]]:
    """(TensorRT's package and version, serialised plan by phase key) for all ranks together.

    Raises `BuildError` naming node, shape and arch for what TensorRT does not take, `TensorRtError` where it is
    missing.
    """
    first = plans[0]
    if first.arch not in ARCHS:
        raise BuildError(f"--tensorrt: expected --arch {' or '.join(ARCHS)}, found {first.arch}: TensorRT has no other")
    version = version_of(load_tensorrt())
    networks = {key: _network(plans, key) for key in first.phases}
    built: dict[str, bytes] = {}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        results = workers.map(lambda key: _compile(first, key, networks[key]), networks)
        for key, data in zip(networks, results, strict=True):
            built[key] = data
            progress(f"TensorRT plan {len(built)} of {len(networks)}: {key}")
    return version, built


def _network(plans: Sequence[Plan], key: str) -> bytes:
    first, *others = [to_network(plan.phases[key]).SerializeToString(deterministic=True) for plan in plans]
    if any(other != first for other in others):
        raise BuildError(f"{key}: the ranks' networks differ: this is a defect of the builder, please report it")
    return first


def _compile(plan: Plan, key: str, network: bytes) -> bytes:
    """The serialised plan, made by a worker process."""
    one = plan_json(replace(plan, phases={key: plan.phases[key]}, weights={}, buffers={})).encode()
    command = [sys.executable, "-m", _WORKER]
    done = subprocess.run(command, input=len(one).to_bytes(8, "little") + one + network, capture_output=True)
    words = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if done.returncode == REFUSED:
        raise BuildError(words[-1])
    if done.returncode != 0:
        raise BuildError(f"{key} for {plan.arch}: TensorRT ended its process ({done.returncode}): {words[-1]}")
    return done.stdout
