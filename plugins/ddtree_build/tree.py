"""The draft tree: the most probable prefixes under a drafter (DDTree, arXiv 2604.12989), as plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# expand(depth, parent_token) -> (token, log weight) of a node's children at `depth` (1 .. D), by descending
# weight; finite and not above 0, tokens distinct. A drafter with conditional heads uses the parent's token.
Expand = Callable[[int, int], Sequence[tuple[int, float]]]


@dataclass
class Tree:
    """Nodes in the order in which they were chosen; node 0 is the root. `parent` is a node, -1 for the root.

    rank: place among the children that `Expand` gives. log_weight: log path probability, 0 for the root.
    """

    token: list[int]
    parent: list[int]
    depth: list[int]
    rank: list[int]
    log_weight: list[float]

    @staticmethod
    def of_root(token: int) -> Tree:
        return Tree([token], [-1], [0], [0], [0.0])

    def __len__(self) -> int:
        """Nodes beside the root."""
        return len(self.token) - 1


def unary(log_probs: np.ndarray, tokens: np.ndarray) -> Expand:
    """`Expand` of a drafter whose depths are independent: log_probs, tokens [D, K], descending along K.

    Entries that are not finite never enter a tree.
    """
    options = [
        [pair for pair, finite in zip(zip(ids, weights, strict=True), usable, strict=True) if finite]
        for ids, weights, usable in zip(
            tokens.tolist(), log_probs.tolist(), np.isfinite(log_probs).tolist(), strict=True
        )
    ]
    return lambda depth, _: options[depth - 1] if depth <= len(options) else ()


def best_first_tree(root_token: int, expand: Expand, budget: int) -> Tree:
    """The `budget` best prefixes by (weight descending, tuple of ranks ascending), or all if there are fewer.

    A child weighs no more than its parent, and its rank tuple sorts after its parent's, so the heap gives
    the nodes in exactly that order and the tree is closed under prefixes. Weights add in float64, parent
    plus child.
    """
    tree = Tree.of_root(root_token)
    ranks: list[tuple[int, ...]] = [()]
    options: list[Sequence[tuple[int, float]]] = []
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def offer(parent: int, rank: int) -> None:
        if rank < len(options[parent]):
            weight = tree.log_weight[parent] + options[parent][rank][1]
            heapq.heappush(heap, (-weight, (*ranks[parent], rank), parent))

    while len(tree) < budget:
        node = len(tree)
        options.append(expand(tree.depth[node] + 1, tree.token[node]))
        offer(node, 0)
        if not heap:
            break
        weight, path, parent = heapq.heappop(heap)
        tree.token.append(options[parent][path[-1]][0])
        tree.parent.append(parent)
        tree.depth.append(len(path))
        tree.rank.append(path[-1])
        tree.log_weight.append(-weight)
        ranks.append(path)
        offer(parent, path[-1] + 1)
    return tree


def worthwhile_nodes(log_weights: Sequence[float], cost: np.ndarray) -> int:
    """The n that maximises (1 + sum of the first n weights) / cost[n], smallest first (CaDDTree, arXiv
    2606.01813).

    log_weights: of the nodes in order, without the root. cost [N]: cost of a step with n nodes; n <= N - 1.
    An entry that is not positive is not eligible. All n are compared, since on a mixture of experts cost is
    not convex.
    """
    count = min(len(log_weights), len(cost) - 1)
    tokens = np.ones(count + 1)
    tokens[1:] += np.exp(log_weights[:count]).cumsum()
    price = cost[: count + 1].astype(np.float64)
    return int(np.argmax(np.divide(tokens, price, out=np.full(count + 1, -1.0), where=price > 0)))


def spine_first(tree: Tree, count: int) -> list[int]:
    """Nodes 0 .. count in the order of rows: root, the chain of best children, then the rest as chosen.

    Accepting the spine then needs no move of KV entries. Parents stay before children.
    """
    spine = [0]
    for node in range(1, count + 1):
        if tree.parent[node] == spine[-1] and tree.rank[node] == 0:
            spine.append(node)
    on_spine = set(spine)
    return spine + [node for node in range(1, count + 1) if node not in on_spine]
