"""From rank graphs to a plan: a tactic for every node and an address for every value."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from functools import lru_cache

from builder.errors import BuildError
from builder.graph import DOMAIN, STATE, WEIGHT, Graph, Node
from plugins.core.plan import ARENA_ALIGNMENT, NO_ARG, Arg, Phase, Step
from plugins.core.plugin import Tactic, get_plugin
from plugins.core.spec import TensorSpec


@dataclass(frozen=True)
class Interval:
    """A value's place in time: from the step that writes it to the last step that reads it, both included."""

    name: str
    nbytes: int
    first: int
    last: int


def choose_tactic(graph: Graph, node: Node, arch: str) -> Tactic:
    """The first tactic of the node's plugin that runs on `arch` and takes its shapes.

    Raises `BuildError` naming the node and every reason: a kernel that cannot take a shape fails here, not at run time.
    """
    if node.domain != DOMAIN:
        raise BuildError(f"{graph.name}, node {node.name}: ONNX operator {node.op} was not fused into a plugin")
    reasons = []
    for tactic in get_plugin(node.op).tactics:
        if arch not in tactic.archs:
            reasons.append(f"{tactic.name} is for {'/'.join(tactic.archs)}")
            continue
        refusal = tactic.refuses(node.attrs, graph.input_specs(node))
        if refusal is None:
            return tactic
        reasons.append(f"{tactic.name}: {refusal}")
    raise BuildError(f"{graph.name}, node {node.name}: no tactic of {node.op} for {arch} ({'; '.join(reasons)})")


@lru_cache(maxsize=64)  # the ranks of a pass share their intervals
def assign_offsets(intervals: tuple[Interval, ...]) -> tuple[dict[str, int], int]:
    """Arena offset in bytes of every interval, and the arena's size.

    Greedy by size (Pisarchyk and Lee 2020): the largest value first, each at the lowest gap that no value alive at the
    same time occupies. Ties by name, so that the plan is reproducible.
    """
    placed: list[tuple[int, int, int, int]] = []  # start, end, first, last; ascending
    offsets: dict[str, int] = {}
    size = 0
    for interval in sorted(intervals, key=lambda i: (-i.nbytes, i.first, i.name)):
        length = _align(interval.nbytes)
        start = 0
        for other_start, other_end, other_first, other_last in placed:
            if other_last < interval.first or interval.last < other_first:
                continue
            if start + length <= other_start:
                break
            start = max(start, other_end)
        insort(placed, (start, start + length, interval.first, interval.last))
        offsets[interval.name] = start
        size = max(size, start + length)
    return offsets, size


def plan_phase(graph: Graph, name: str, bucket: int, arch: str) -> tuple[Phase, int]:
    """Steps of one pass and the arena bytes they need."""
    tactics = [choose_tactic(graph, node, arch) for node in graph.nodes]
    scratch = {}
    for node, tactic in zip(graph.nodes, tactics, strict=True):
        if tactic.workspace is not None:
            scratch[node.name] = tactic.workspace(node.attrs, graph.input_specs(node))
    offsets, arena = assign_offsets(tuple(_intervals(graph, scratch)))

    def arg(value: str) -> Arg:
        if not value:
            return NO_ARG
        spec = graph.specs[value]
        if value.startswith(WEIGHT):
            return Arg("weight", value.removeprefix(WEIGHT), 0, spec)
        if value.startswith(STATE):
            return Arg("buffer", value.removeprefix(STATE), 0, spec)
        if value in graph.outputs:
            return Arg("buffer", graph.outputs[value], 0, spec)
        return Arg("arena", value, offsets[value], spec)

    steps = []
    for node, tactic in zip(graph.nodes, tactics, strict=True):
        workspace = NO_ARG
        if scratch.get(node.name):
            key = _scratch_name(node.name)
            workspace = Arg("arena", key, offsets[key], TensorSpec((scratch[node.name],), "uint8"))
        step = Step(
            node=node.name,
            plugin=node.op,
            tactic=tactic.name,
            attrs=node.attrs,
            inputs=tuple(arg(value) for value in node.inputs),
            outputs=tuple(arg(value) for value in node.outputs),
            workspace=workspace,
            launches=() if tactic.launches is None else tactic.launches(node.attrs, graph.input_specs(node), arch),
        )
        steps.append(step)
    return Phase(name, bucket, tuple(steps)), arena


def _intervals(graph: Graph, scratch: dict[str, int]) -> list[Interval]:
    first = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    last = dict(first)
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            if name in last:
                last[name] = i
    values = [name for name in first if name not in graph.outputs]
    intervals = [Interval(name, graph.specs[name].nbytes, first[name], last[name]) for name in values]
    for i, node in enumerate(graph.nodes):
        if scratch.get(node.name):
            intervals.append(Interval(_scratch_name(node.name), scratch[node.name], i, i))
    return intervals


def _scratch_name(node: str) -> str:
    return f"{node}:workspace"


def _align(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
