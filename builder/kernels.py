"""The kernel images of an engine: every launch of the plans, compiled once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from plugins.core.cuda import MAX_SHARED_BYTES, REGISTERS, SYSTEM_SHARED_BYTES, compile_launch, read_resources
from plugins.core.plan import Plan
from plugins.core.plugin import Launch, PluginError
from plugins.core.spec import TensorSpec
from plugins.core.splat import splat_launch


def compile_images(plans: Iterable[Plan], splat: bool, progress: Callable[[str], None]) -> dict[str, bytes]:
    """Cubins by the name under which steps ask for them (`Launch.image`), in the order of the names.

    splat: also what fills weights synthetically. Raises `PluginError` for a kernel that does not compile or does not
    fit the chip.
    """
    launches: dict[str, tuple[Launch, str]] = {}
    for plan in plans:
        if splat and plan.arch != "cpu":
            launch = splat_launch("", TensorSpec((1,), "float32"))
            launches.setdefault(launch.image, (launch, plan.arch))
        for phase in plan.phases.values():
            for step in phase.steps:
                for launch in step.launches:
                    launches.setdefault(launch.image, (launch, plan.arch))

    def image(name: str) -> bytes:
        launch, arch = launches[name]
        cubin = compile_launch(launch, arch)
        check_fit(launch, cubin)
        return cubin

    images = {}
    with ThreadPoolExecutor(os.cpu_count()) as compilers:  # NVRTC compiles programs side by side
        for name, cubin in zip(sorted(launches), compilers.map(image, sorted(launches)), strict=True):
            images[name] = cubin
            progress(f"compiled kernel {len(images)} of {len(launches)}: {launches[name][0].source}")
    return images


def check_fit(launch: Launch, cubin: bytes) -> None:
    """Raise `PluginError` unless one block of `launch` can run on every chip the engine is made for."""
    resources = read_resources(cubin)[launch.kernel]
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    shared = launch.smem + max(resources.shared - SYSTEM_SHARED_BYTES, 0)
    if shared > MAX_SHARED_BYTES:
        raise PluginError(f"{launch.image}: expected up to {MAX_SHARED_BYTES} B of shared memory, found {shared}")
    if threads > resources.max_threads or threads * resources.registers > REGISTERS:
        raise PluginError(
            f"{launch.image}: {threads} threads of {resources.registers} registers do not fit "
            f"{resources.max_threads} threads and {REGISTERS} registers"
        )
