"""Checking a node's operands in `infer`: presence, dtype and shape, with sizes bound to axis names."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.plugin import Plugin, PluginError
from plugins.core.spec import TensorSpec

FLOATS = ("float32", "bfloat16")


class Operands:
    """The inputs of one node by name; `take` checks one and binds its axes, `self[axis]` is a bound size.

    Raises `PluginError` naming operator, operand, expected and found.
    """

    def __init__(self, plugin: Plugin, inputs: Sequence[TensorSpec | None], **sizes: int) -> None:
        """`sizes`: axes known from attributes. Operands beyond `inputs` are absent."""
        if len(inputs) > len(plugin.inputs):
            raise PluginError(f"{plugin.name}: expected at most {len(plugin.inputs)} operands, found {len(inputs)}")
        self._plugin = plugin
        self._specs = dict(zip((name.rstrip("?") for name in plugin.inputs), inputs, strict=False))
        self._sizes = dict(sizes)

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def has(self, name: str) -> bool:
        return self._specs.get(name) is not None

    def refuse(self, name: str, reason: str) -> None:
        """The operand `name` must be absent, for `reason`."""
        self._plugin.expect(not self.has(name), name, f"no operand ({reason})", self._specs.get(name))

    def take(self, name: str, axes: Sequence[str | int], *dtypes: str) -> TensorSpec:
        """The spec of `name`, which must be present, of one of `dtypes` and of shape `axes`.

        An axis is a size, a name (bound by its first use) or ">=name": a buffer at least as long as the
        bound axis, of which the operator uses the first part.
        """
        spec = self._specs.get(name)
        fits = spec is not None and spec.dtype in dtypes and len(spec.shape) == len(axes)
        if spec is not None and fits:
            for axis, size in zip(axes, spec.shape, strict=True):
                if isinstance(axis, int):
                    fits = fits and size == axis
                elif axis.startswith(">="):
                    fits = fits and size >= self._sizes[axis[2:]]
                else:
                    fits = fits and size == self._sizes.setdefault(axis, size)
        if spec is None or not fits:
            names = [str(axis).removeprefix(">=") for axis in axes]
            known = ", ".join(f"{axis}={self._sizes[axis]}" for axis in names if axis in self._sizes)
            expected = f"{' or '.join(dtypes)} [{', '.join(map(str, axes))}]" + (f" with {known}" if known else "")
            raise PluginError(f"{self._plugin.name}: {name}: expected {expected}, found {spec or 'nothing'}")
        return spec


def nbytes(specs: Sequence[TensorSpec | None]) -> int:
    """Bytes of the operands that are present."""
    return sum(spec.nbytes for spec in specs if spec is not None)
