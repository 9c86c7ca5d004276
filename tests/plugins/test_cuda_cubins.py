"""What the compiled kernels ask of the chip, at the shapes of K2.6 on 8 ranks: read from the cubins, no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest

from builder.kernels import check_fit
from plugins.core.cuda import compile_launch, read_resources
from plugins.core.plugin import Launch, PluginError, get_plugin
from plugins.core.spec import TensorSpec

EXPERTS, TOP_K, HIDDEN, INTER = 384, 8, 7168, 256
RESERVED = 1024  # bytes of shared memory that the system takes of every block


def nodes(tokens: int) -> list[tuple[str, dict[str, Any], list[TensorSpec | None]]]:
    """Every matrix of a layer, and the router."""

    def act(columns: int, rows: int = tokens) -> TensorSpec:
        return TensorSpec((rows, columns), "bfloat16")

    routes = tokens * TOP_K
    lists = [TensorSpec((EXPERTS + 1,), "int32"), TensorSpec((routes,), "int32")]
    gate_up = TensorSpec((EXPERTS, INTER // 16, HIDDEN // 32, 576), "uint8")
    down = TensorSpec((EXPERTS, HIDDEN // 32, INTER // 32, 576), "uint8")
    factors = TensorSpec((tokens, TOP_K), "float32")
    router = [act(HIDDEN), act(HIDDEN, EXPERTS), TensorSpec((EXPERTS,), "float32"), TensorSpec((tokens,), "int32")]
    found: list[tuple[str, dict[str, Any], list[TensorSpec | None]]] = [
        ("moe_route", {"top_k": TOP_K, "routed_scaling_factor": 2.827, "norm_topk_prob": True}, [*router]),
        ("int4_marlin_gemm", {"stage": "gate_up", "top_k": TOP_K}, [act(HIDDEN), gate_up, *lists]),
        (
            "int4_marlin_gemm",
            {"stage": "down", "top_k": TOP_K},
            [act(INTER, routes), down, *lists, factors, act(HIDDEN)],
        ),
    ]
    dense = {"activation": "none", "out_dtype": "activation"}
    for columns, rows in ((7168, 2112), (1536, 1536), (1024, 7168), (256, 7168)):
        found.append(("dense_gemm", dense, [act(columns), act(columns, rows)]))
    silu = {"activation": "silu_mul", "out_dtype": "activation"}
    found.append(("dense_gemm", silu, [act(HIDDEN), act(HIDDEN, 2 * INTER)]))
    logits = {"activation": "none", "out_dtype": "float32"}
    found.append(("dense_gemm", logits, [act(HIDDEN), act(HIDDEN, 20_480)]))
    return found


def launches(tokens: int, arch: str) -> list[Launch]:
    """Of the first tactic that takes each node, as the builder chooses."""
    found = []
    for name, attrs, specs in nodes(tokens):
        fitting = (t for t in get_plugin(name).tactics if arch in t.archs and t.refuses(attrs, specs) is None)
        tactic = next(fitting)
        assert tactic.launches is not None
        found += tactic.launches(attrs, specs, arch)
    return found


@pytest.mark.parametrize(("arch", "tokens"), [("sm_120a", 8), ("sm_120a", 128), ("sm_120a", 4096), ("sm_90a", 32)])
def test_kernels_fit_and_do_not_spill(arch: str, tokens: int) -> None:
    for launch in launches(tokens, arch):
        cubin = compile_launch(launch, arch)
        resources = read_resources(cubin)[launch.kernel]
        check_fit(launch, cubin)
        assert resources.stack == 0, launch.image
        assert resources.shared <= RESERVED, launch.image
        blocks = dict(launch.constants).get("MIN_BLOCKS", 1)
        assert blocks * resources.max_threads * resources.registers <= 65_536, launch.image


def test_compiling_is_reproducible() -> None:
    launch = launches(8, "sm_120a")[1]
    assert compile_launch(launch, "sm_120a") == compile_launch(launch, "sm_120a")


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    launch = launches(8, "sm_120a")[1]
    cubin = compile_launch(launch, "sm_120a")
    greedy = Launch(launch.source, launch.kernel, launch.constants, launch.grid, launch.block, smem=101_377)
    with pytest.raises(PluginError, match="up to 101376 B of shared memory, found 101377"):
        check_fit(greedy, cubin)
    wide = Launch(launch.source, launch.kernel, launch.constants, launch.grid, (2048, 1, 1))
    with pytest.raises(PluginError, match="2048 threads"):
        check_fit(wide, cubin)


def test_a_source_that_does_not_compile_is_named() -> None:
    launch = launches(8, "sm_120a")[1]
    broken = Launch(launch.source, launch.kernel, launch.constants[1:], launch.grid, launch.block)
    with pytest.raises(PluginError, match="moe_route/select.cu for sm_120a"):
        compile_launch(broken, "sm_120a")


def test_not_a_cubin() -> None:
    with pytest.raises(ValueError, match="ELF"):
        read_resources(b"PTX")
