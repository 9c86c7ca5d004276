"""An operator on the device beside its reference in float64, on the same operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plugins.core.plugin import get_plugin
from tests.plugins.gpu.device import Operator
from tests.plugins.gpu.moe_data import relative_error

ROUNDING = 4e-3  # relative error that one or two roundings to bfloat16 may cause
Operand = torch.Tensor | None


def reference(name: str, attrs: dict[str, Any], inputs: Sequence[Operand], device: str = "cuda") -> list[torch.Tensor]:
    """Outputs, then the mutated operands, computed from copies of `inputs` with bfloat16 as float64 on `device`."""
    plugin = get_plugin(name)
    with torch.device(device):
        wide = [
            None if x is None else (x.double() if x.dtype == torch.bfloat16 else x.clone()).to(device) for x in inputs
        ]
        results = plugin.reference(attrs, None)(*wide)  # type: ignore[arg-type]
    outputs = [results] if isinstance(results, torch.Tensor) else list(results or ())
    names = [operand.removesuffix("?") for operand in plugin.inputs]
    mutated = [x for operand, x in zip(names, wide, strict=False) if operand in plugin.mutates and x is not None]
    return outputs + mutated


def on_device(name: str, attrs: dict[str, Any], inputs: Sequence[Operand]) -> list[torch.Tensor]:
    """Outputs, then the mutated operands, of the kernels on copies of `inputs`: equal bit for bit in two runs."""
    plugin = get_plugin(name)
    runs = []
    for _ in range(2):
        mine = [None if x is None else x.clone() for x in inputs]
        outputs = Operator(name, attrs, mine).run()
        names = [operand.removesuffix("?") for operand in plugin.inputs]
        mutated = [x for operand, x in zip(names, mine, strict=False) if operand in plugin.mutates and x is not None]
        runs.append(outputs + mutated)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
    return runs[0]


def check(
    name: str, attrs: dict[str, Any], inputs: Sequence[Operand], tolerance: float = ROUNDING, device: str = "cuda"
) -> list[torch.Tensor]:
    """Compare: floats by relative error, integers exactly. Gives what the device computed."""
    found = on_device(name, attrs, inputs)
    expected = reference(name, attrs, inputs, device)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        if one.dtype.is_floating_point:
            if other.norm() == 0:
                assert not one.any(), (name, index)
            else:
                assert relative_error(one.cpu(), other.cpu().double()) < tolerance, (name, index)
        else:
            assert torch.equal(one.cpu(), other.cpu().to(one.dtype)), (name, index)
    return found


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def ints(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")
