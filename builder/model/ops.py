"""Plugin operators as `torch.ops.k2.*`, with shape inference only: the model definition is traced, never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plugins.core.plugin import ATTR_KINDS, PLUGIN_NAMES, Plugin, get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.torch_dtypes import TORCH_DTYPES

SPEC_DTYPES = {value: key for key, value in TORCH_DTYPES.items()}


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """TensorSpec of a torch tensor."""
    return TensorSpec(tuple(tensor.shape), SPEC_DTYPES[tensor.dtype])


def empty(spec: TensorSpec) -> torch.Tensor:
    """Meta tensor of `spec`."""
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")


def required_outputs(plugin: Plugin) -> list[str]:
    """Outputs of the operator as the model uses it; "?" outputs appear only after fusion."""
    return [name for name in plugin.outputs if not name.endswith("?")]


def _schema(plugin: Plugin) -> str:
    operands = []
    for index, name in enumerate(plugin.inputs):
        alias = f"({chr(ord('a') + index)}!)" if name in plugin.mutates else ""
        optional = "?" if name.endswith("?") else ""
        operands.append(f"Tensor{alias}{optional} {name.removesuffix('?')}")
    attrs = [f"{kind} {name}" for name, kind in plugin.attrs.items()]
    results = ", ".join("Tensor" for _ in required_outputs(plugin))
    return f"{plugin.name}({', '.join(operands + attrs)}) -> ({results})"


def _fake(plugin: Plugin) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        operands, values = args[: len(plugin.inputs)], args[len(plugin.inputs) :]
        attrs = dict(zip(plugin.attrs, values, strict=True))
        specs = [None if operand is None else spec_of(operand) for operand in operands]
        results = tuple(empty(spec) for spec in plugin.infer(attrs, specs))
        return results[0] if len(results) == 1 else results if results else None

    return fake


_LIBRARY: torch.library.Library | None = None


def register() -> None:
    """Define every plugin operator in the torch library "k2" (once per process)."""
    global _LIBRARY
    if _LIBRARY is not None:
        return
    _LIBRARY = torch.library.Library("k2", "DEF")
    for name in PLUGIN_NAMES:
        plugin = get_plugin(name)
        _LIBRARY.define(_schema(plugin))
        torch.library.register_fake(f"k2::{name}", _fake(plugin), lib=_LIBRARY)


def call(name: str, *operands: torch.Tensor | None, **attrs: Any) -> Any:
    """Apply operator `name`; `operands` in the plugin's order (trailing absent ones may be left out)."""
    plugin = get_plugin(name)
    padded = list(operands) + [None] * (len(plugin.inputs) - len(operands))
    values = [ATTR_KINDS[kind](attrs.pop(key)) for key, kind in plugin.attrs.items()]
    if attrs:
        raise TypeError(f"{name} has no attribute {sorted(attrs)}")
    return getattr(torch.ops.k2, name)(*padded, *values)
