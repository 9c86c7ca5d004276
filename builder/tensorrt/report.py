"""Native and TensorRT plans side by side, for `build.py inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from builder.describe import phase_arena_bytes, table
from builder.tensorrt.program import read_program
from plugins.core.container import decode_header, map_file
from plugins.core.engine_file import TENSORRT, engine_name
from plugins.core.plan import Phase, Plan


def tensorrt_plans(artifact: Path) -> dict[str, bytes]:
    """Serialised TensorRT plans of an artifact by phase key (all ranks share them); empty where it has none."""
    data = map_file(artifact / engine_name(0))
    entries = decode_header(data).tensors.items()
    return {key.removeprefix(TENSORRT): data[e.start : e.end] for key, e in entries if key.startswith(TENSORRT)}


def side_by_side(plan: Plan, built: Mapping[str, bytes]) -> str:
    """A table with a line for each phase: what the native plan starts and holds, and what TensorRT's does.

    Launches are kernels; a product or a fused region of TensorRT counts as one, since it chooses them when it loads.
    """
    layers = plan.settings["model"]["num_layers"]
    columns = [("PHASE", "<"), *[(name, ">") for name in ("steps", "launches", "a layer", "arena bytes")]]
    columns += [("TensorRT", ">"), *[(name, ">") for name in ("plugins", "products", "fused", "launches", "a layer")]]
    columns += [(name, ">") for name in ("scratch", "programs", "streams", "capturable")]
    rows = []
    for key, phase in plan.phases.items():
        native = sum(_launches(phase).values())
        cells: list[object] = [key, len(phase.steps), native, _a_layer(phase, native, layers)]
        cells += [f"{phase_arena_bytes(phase):,}", f"{len(built[key]):,} B"]
        program = read_program(built[key])
        if program is None:
            rows.append([*cells, *["?"] * 9])
            continue
        plugins = program.plugins()
        others = len(program.operations) - len(plugins)
        products = sum(operation.kind == "fully_connected" for operation in program.operations)
        launches = others + sum(_launches(phase)[node] for node in plugins)
        cells += [len(plugins), products, others - products, launches, _a_layer(phase, launches, layers)]
        cells += [f"{program.scratch:,}", program.programs, program.streams, "yes" if program.capturable else "no"]
        rows.append(cells)
    notes = f"TensorRT plans by {plan.settings['tensorrt']}, read from their text; ?: a text that is not known\n"
    return f"{table(columns, rows)}\n{notes}built only: no TensorRT plan of this project has run on an SM120 GPU"


def _launches(phase: Phase) -> dict[str, int]:
    """Kernels of every step by node; a collective counts as one."""
    return {step.node: len(step.launches) + (step.tactic == "nccl") for step in phase.steps}


def _a_layer(phase: Phase, launches: int, layers: int) -> str:
    return f"{launches / layers:.1f}" if phase.name in ("verify", "prefill") else "-"
