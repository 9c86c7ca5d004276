"""Graph rewrites that save launches and passes over memory: collectives with their neighbours."""

from __future__ import annotations

from dataclasses import replace

from builder.graph import DOMAIN, Graph, Node


def fuse(graph: Graph) -> Graph:
    """Apply all rewrites; the result computes the same values with fewer nodes."""
    return _drop_identities(_fuse_add_norm(graph))


def _fuse_add_norm(graph: Graph) -> Graph:
    """all_reduce(y), x + that, rms_norm of the sum -> one all_reduce node with outputs (sum, normed)."""
    users = graph.consumers()
    replaced: dict[str, Node] = {}  # name of the rms_norm node -> the fused node
    dropped: set[str] = set()
    for node in graph.nodes:
        if node.op != "all_reduce" or len(users[node.outputs[0]]) != 1:
            continue
        add = users[node.outputs[0]][0]
        if add.op != "Add":
            continue
        norm = next((user for user in users.get(add.outputs[0], []) if user.op == "rms_norm"), None)
        if norm is None:
            continue
        residual = next(name for name in add.inputs if name != node.outputs[0])
        attrs = {**node.attrs, "eps": norm.attrs["eps"]}
        inputs = (node.inputs[0], residual, norm.inputs[1])
        outputs = (add.outputs[0], norm.outputs[0])
        replaced[add.name] = Node(norm.name, DOMAIN, "all_reduce", inputs, outputs, attrs)
        dropped |= {node.name, norm.name}
    nodes = [replaced.get(node.name, node) for node in graph.nodes if node.name not in dropped]
    return replace(graph, nodes=nodes)


def _drop_identities(graph: Graph) -> Graph:
    """A collective of one rank is its input (except where it carries the fused addition and norm)."""
    alias: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        inputs = tuple(alias.get(name, name) for name in node.inputs)
        collective = node.op in ("all_reduce", "all_gather") and node.attrs.get("tp_world") == 1
        if collective and len(node.outputs) == 1:
            alias[node.outputs[0]] = inputs[0]
        else:
            nodes.append(replace(node, inputs=inputs))
    outputs = {alias.get(value, value): buffer for value, buffer in graph.outputs.items()}
    return replace(graph, nodes=nodes, outputs=outputs)
