"""Reference of `ddtree_build`, on numpy views of the buffers."""

from __future__ import annotations

import numpy as np

from plugins.ddtree_build.tree import Tree, best_first_tree, spine_first, unary, worthwhile_nodes


def merge_candidates(candidates: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(log probabilities float64 [N, K], ids int32 [N, K]) over the whole vocabulary, from every rank's part.

    candidates float32 [N, world (2 K + 1)]: per rank K logits, K ids (int32 bits) and the logsumexp of its
    columns. The best K by (logit descending, id ascending); log probability = logit - logsumexp of the
    ranks' logsumexps.
    """
    parts = candidates.reshape(candidates.shape[0], -1, 2 * top_k + 1)
    logits = parts[:, :, :top_k].reshape(len(parts), -1).astype(np.float64)
    ids = np.ascontiguousarray(parts[:, :, top_k:-1]).view(np.int32).reshape(len(parts), -1)
    if parts.shape[1] > 1:  # one rank's candidates are in order already
        order = np.lexsort((ids, -logits), axis=1)[:, :top_k]
        logits, ids = np.take_along_axis(logits, order, 1), np.take_along_axis(ids, order, 1)
    with np.errstate(invalid="ignore"):  # NaN, -inf - -inf: not finite, so never in a tree
        total = np.logaddexp.reduce(parts[:, :, -1].astype(np.float64), axis=1, keepdims=True)
        return logits - total, ids


def ddtree_build(
    candidates: np.ndarray | None,
    draft_requests: np.ndarray,
    active: np.ndarray,
    anchor: np.ndarray,
    context_len: np.ndarray,
    block_table: np.ndarray,
    tree_budget: np.ndarray,
    tree_cost: np.ndarray,
    calibration: np.ndarray,
    tree_width: np.ndarray,
    tokens: np.ndarray,
    positions: np.ndarray,
    row_request: np.ndarray,
    row_parent: np.ndarray,
    row_slot: np.ndarray,
    mask: np.ndarray,
    row_log_weight: np.ndarray,
    first_row: np.ndarray,
    request_rows: np.ndarray,
    num_rows: np.ndarray,
    *,
    draft_depth: int,
    top_k: int,
    page_size: int,
) -> None:
    """Build every active request's tree and write all row buffers, padding included.

    candidates float32 [B D, world (2 K + 1)] (`merge_candidates`); block b is that of request
    draft_requests[b]. Weight of a candidate: min(q * calibration[r, depth - 1], 1), q its probability;
    row_log_weight is the log of the product along the path. Candidates of zero weight never enter. A tree
    has at most tree_budget nodes (and those that the cost rule chooses), is cut to the positions that the
    block table reaches, and, in request order, to the rows left in mask.shape[0] once every active request
    has its root. Buffers are those of `plugins.core.state`.
    """
    requests = np.flatnonzero(active).tolist()
    spare = len(mask) - len(requests)
    reach = block_table.shape[1] * page_size
    blocks = {}
    if candidates is not None:
        blocks = {request: block for block, request in enumerate(draft_requests.tolist()) if request >= 0}
        log_probs, ids = merge_candidates(candidates, top_k)

    first_row[:], request_rows[:] = 0, 0
    out_tokens: list[int] = []
    out_positions: list[int] = []
    out_parents: list[int] = []
    out_weights: list[float] = []
    out_masks: list[int] = []
    owners: list[int] = []
    addresses: list[int] = []
    for request in requests:
        context, first, count = int(context_len[request]), len(out_tokens), 0
        if request in blocks:
            depths = slice(blocks[request] * draft_depth, (blocks[request] + 1) * draft_depth)
            width = int(tree_width[request]) or top_k
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = np.log(calibration[request, :draft_depth, None].astype(np.float64))
            weights = np.minimum(log_probs[depths, :width] + factor, 0.0)
            expand = unary(weights, ids[depths, :width])
            budget = min(int(tree_budget[request]), len(mask) - 1, reach - context - 1)
            tree = best_first_tree(int(anchor[request]), expand, budget)
            cost = tree_cost[request]
            count = worthwhile_nodes(tree.log_weight[1:], cost) if cost.any() else len(tree)
            count = min(count, spare)
            spare -= count
        else:
            tree = Tree.of_root(int(anchor[request]))
        first_row[request], request_rows[request] = first, count + 1

        row_of: dict[int, int] = {}
        for row, node in enumerate(spine_first(tree, count), start=first):
            row_of[node] = row
            parent = row_of.get(tree.parent[node], -1)
            out_tokens.append(tree.token[node])
            out_positions.append(context + tree.depth[node])
            out_parents.append(parent)
            out_weights.append(tree.log_weight[node])
            out_masks.append((out_masks[parent] if parent >= 0 else 0) | 1 << (row - first))
        owners += [request] * (count + 1)
        addresses += range(context, context + count + 1)

    used = len(out_tokens)
    num_rows[0] = used
    address = np.array(addresses, dtype=np.int64)
    slots = block_table[np.array(owners, dtype=np.int64), address // page_size] * page_size + address % page_size
    for buffer, values, padding in (
        (tokens, out_tokens, 0),
        (positions, out_positions, 0),
        (row_request, owners, -1),
        (row_parent, out_parents, -1),
        (row_slot, slots, 0),
        (row_log_weight, out_weights, 0),
    ):
        buffer[:used] = values
        buffer[used:] = padding
    words = mask.shape[1]
    packed = b"".join(bits.to_bytes(4 * words, "little") for bits in out_masks)
    mask[:used] = np.frombuffer(packed, dtype="<u4").reshape(used, words)
    mask[used:] = 0
