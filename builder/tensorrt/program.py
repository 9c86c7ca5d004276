"""What is inside a TensorRT plan: its operations in order, memory regions and streams.

The format is private. What is read here was found in plans of TensorRT for RTX 1.7.1 (version 5 of its program): a
text in the plan. A plan of another kind reads as "unknown", never as something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPERATION = re.compile(rb'\n  (custom_layer|fully_connected|function|runtime_fusion|[a-z_]+)=\{ name="?([^" ]+)[^\n]*')
_LAYERS = re.compile(rb'layers="([^"]*)"')
_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_REGION = re.compile(rb"\n  region = \{ name=(\S+) size=(\d+)")
KINDS = ("custom_layer", "fully_connected", "function", "runtime_fusion", "comm_allreduce")


@dataclass(frozen=True)
class Operation:
    """One launch of a program (a plugin's may be several kernels). `layers`: the ONNX nodes that it computes."""

    kind: str
    name: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """`programs`: how many a plan has; more than one is a graph that TensorRT has cut. scratch: bytes."""

    programs: int
    streams: int
    capturable: bool
    accelerators: str
    scratch: int
    operations: tuple[Operation, ...]

    def plugins(self) -> list[str]:
        """Nodes that are plugins, in the order in which they run."""
        return [op.layers[0] for op in self.operations if op.kind == "custom_layer"]


def read_program(plan: bytes) -> Program | None:
    """The program of a serialised plan; None where its text is not as expected."""
    starts = [match.start() for match in re.finditer(rb"header \{\n  version = ", plan)]
    found = {
        name: re.search(pattern, plan)
        for name, pattern in (
            ("streams", rb"\n  n_streams = (\d+)"),
            ("capturable", rb"\n  stream_capturable=(\d)"),
            ("accelerators", rb"\n  accelerators=\{([^}]*)\}"),
        )
    }
    if not starts or None in found.values():
        return None
    values = {name: match[1].decode().strip() for name, match in found.items() if match is not None}
    regions = {name: int(size) for name, size in _REGION.findall(plan)}
    operations = []
    for match in _OPERATION.finditer(plan):
        kind = match[1].decode()
        if kind not in KINDS:
            continue
        layers = _LAYERS.search(match[0])
        names = () if layers is None else tuple(_LAYER.findall(layers[1].decode()))
        operations.append(Operation(kind, match[2].decode(), names))
    return Program(
        len(starts),
        int(values["streams"]),
        values["capturable"] == "1",
        values["accelerators"],
        regions.get(b"devmem", 0),
        tuple(operations),
    )
