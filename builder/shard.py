"""Tensor parallelism: one rank's graph from the exported one."""

from __future__ import annotations

from dataclasses import replace

from builder.graph import DOMAIN, STATE, WEIGHT, Graph
from plugins.core.packing import WeightRecipe
from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec


def shard(graph: Graph, recipes: dict[str, WeightRecipe], buffers: dict[str, TensorSpec], tp: int, rank: int) -> Graph:
    """Give weights and buffers the shapes of `rank`, divide head counts, set ranks, and infer every shape again.

    `buffers` are the rank's persistent buffers; a graph input keeps its own row count (axis 0) where it reads only
    the first rows of one.
    """
    nodes = []
    for node in graph.nodes:
        attrs = dict(node.attrs)
        if node.domain == DOMAIN:
            for name in get_plugin(node.op).sharded_attrs:
                if attrs[name] % tp:
                    raise PluginError(f"node {node.name}: {name} = {attrs[name]} cannot be split over {tp} ranks")
                attrs[name] //= tp
            for name, value in (("tp_world", tp), ("tp_rank", rank)):
                if name in attrs:
                    attrs[name] = value
        nodes.append(replace(node, attrs=attrs))
    specs = {}
    for name in graph.inputs(WEIGHT):
        specs[name] = recipes[name.removeprefix(WEIGHT)].spec(tp)
    for name in graph.inputs(STATE):
        full = buffers[name.removeprefix(STATE)]
        specs[name] = TensorSpec((graph.specs[name].shape[0], *full.shape[1:]), full.dtype)
    result = Graph(graph.name, nodes, specs, dict(graph.outputs))
    result.infer()
    return result
