"""One operator on a CUDA device, from torch tensors: its tactic's kernels as a plan would start them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plugins.core.cuda import compile_launch
from plugins.core.kernel import Image, Kernel
from plugins.core.plugin import Launch, Tactic, get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.torch_dtypes import TORCH_DTYPES

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_IMAGES: dict[str, Image] = {}
_KERNELS: dict[Launch, Kernel] = {}


def arch() -> str:
    """The build architecture of the device here."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def spec_of(tensor: torch.Tensor | None) -> TensorSpec | None:
    return None if tensor is None else TensorSpec(tuple(tensor.shape), NAMES[tensor.dtype])


def kernel_of(launch: Launch) -> Kernel:
    if launch not in _KERNELS:
        if launch.image not in _IMAGES:
            _IMAGES[launch.image] = Image(compile_launch(launch, arch()))
        _KERNELS[launch] = Kernel(launch, _IMAGES[launch.image])
    return _KERNELS[launch]


def tactic_for(name: str, attrs: dict[str, Any], specs: Sequence[TensorSpec | None], target: str) -> Tactic:
    """The first tactic that takes the operands, as the builder chooses."""
    fitting = (t for t in get_plugin(name).tactics if target in t.archs and t.refuses(attrs, specs) is None)
    return next(fitting)


class Operator:
    """An operator for operands of fixed shapes; `launches` replaces those of the tactic."""

    def __init__(
        self,
        name: str,
        attrs: dict[str, Any],
        inputs: Sequence[torch.Tensor | None],
        launches: tuple[Launch, ...] | None = None,
    ) -> None:
        specs = [spec_of(tensor) for tensor in inputs]
        tactic = tactic_for(name, attrs, specs, arch())
        assert tactic.launches is not None
        self.launches = launches or tactic.launches(attrs, specs, arch())
        self.kernels = [kernel_of(launch) for launch in self.launches]
        self.outputs = [
            torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="cuda")
            for spec in get_plugin(name).infer(attrs, specs)
        ]
        size = tactic.workspace(attrs, specs) if tactic.workspace is not None else 0
        self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
        self.inputs = list(inputs)
        # an absent operand at the end is an argument too
        count = len(get_plugin(name).inputs)
        self.inputs += [None] * (count - len(self.inputs))

    def start(self) -> None:
        """Start the kernels on torch's current stream, on the operands given at the start."""
        operands = [*self.inputs, *self.outputs, self.workspace]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in operands]
        stream = torch.cuda.current_stream().cuda_stream
        for kernel in self.kernels:
            kernel.start(addresses, stream)

    def run(self) -> list[torch.Tensor]:
        """Poison outputs and workspace, start, wait; the outputs as copies."""
        for tensor in [*self.outputs, *([] if self.workspace is None else [self.workspace])]:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, or -1
        self.start()
        torch.cuda.synchronize()
        return [tensor.clone() for tensor in self.outputs]
