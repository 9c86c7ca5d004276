"""What compiled kernels ask of the chip, for whole plans of K2.6 on 8 ranks: read from the cubins, no GPU needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from builder.kernels import check_fit
from builder.options import VERIFY_BUCKETS, BuildOptions
from builder.pipeline import build_plans
from plugins.core.cuda import compile_launch, read_resources
from plugins.core.plugin import Launch, PluginError
from tests.full_size import k26_config, k26_draft_config

# bytes of stack a thread: of calls in the serial parts of a step; and of four spilled registers, on the H200 alone
STACK = {("sm_120a", "ddtree_build/tree.cu"): 32, ("sm_90a", "ddtree_build/tree.cu"): 32}
STACK |= {("sm_120a", "sample/draw.cu"): 8, ("sm_90a", "int4_marlin_gemm/prefill.cu"): 16}


def launches(arch: str, buckets: tuple[int, ...]) -> list[Launch]:
    """Every kernel of every phase of rank 0, once: a layer of each kind has those of all 61, and so has the drafter."""
    config = replace(k26_config(), num_hidden_layers=2)
    draft = replace(k26_draft_config(), target_layer_ids=(0, 1))
    options = BuildOptions(tp=8, arch=arch, splat=True, verify_buckets=buckets, kv_tokens=262_144)
    plan = build_plans(config, draft, options)[0]
    steps = [step for phase in plan.phases.values() for step in phase.steps]
    return list({launch.image: launch for step in steps for launch in step.launches}.values())


@pytest.mark.parametrize(("arch", "buckets"), [("sm_120a", VERIFY_BUCKETS), ("sm_90a", (8, 64))])
def test_kernels_of_a_plan_fit_and_do_not_spill(arch: str, buckets: tuple[int, ...]) -> None:
    found = launches(arch, buckets)
    assert len({launch.source for launch in found}) > 30
    with ThreadPoolExecutor(2) as compilers:
        cubins = list(compilers.map(lambda launch: compile_launch(launch, arch), found))
    for launch, cubin in zip(found, cubins, strict=True):
        check_fit(launch, cubin)
        resources = read_resources(cubin)[launch.kernel]
        assert resources.stack <= STACK.get((arch, launch.source), 0), launch.image
        blocks = dict(launch.constants).get("MIN_BLOCKS", 1)
        assert blocks * resources.max_threads * resources.registers <= 65_536, launch.image


@pytest.fixture(scope="module")
def launch() -> Launch:
    return next(one for one in launches("sm_120a", (8,)) if one.source == "moe_route/select.cu")


def test_compiling_is_reproducible(launch: Launch) -> None:
    assert compile_launch(launch, "sm_120a") == compile_launch(launch, "sm_120a")


def test_a_kernel_that_does_not_fit_is_refused(launch: Launch) -> None:
    cubin = compile_launch(launch, "sm_120a")
    greedy = Launch(launch.source, launch.kernel, launch.constants, launch.grid, launch.block, smem=101_377)
    with pytest.raises(PluginError, match="up to 101376 B of shared memory, found 101377"):
        check_fit(greedy, cubin)
    wide = Launch(launch.source, launch.kernel, launch.constants, launch.grid, (2048, 1, 1))
    with pytest.raises(PluginError, match="2048 threads"):
        check_fit(wide, cubin)


def test_a_source_that_does_not_compile_is_named(launch: Launch) -> None:
    broken = Launch(launch.source, launch.kernel, launch.constants[1:], launch.grid, launch.block)
    with pytest.raises(PluginError, match="moe_route/select.cu for sm_120a"):
        compile_launch(broken, "sm_120a")


def test_not_a_cubin() -> None:
    with pytest.raises(ValueError, match="ELF"):
        read_resources(b"PTX")
