"""Reference of `ddtree_accept`, on numpy views of the buffers."""

from __future__ import annotations

import numpy as np

from plugins.core.state import FINISH_DEAD_END, FINISH_LENGTH, FINISH_NAN, FINISH_NONE, FINISH_STOP, SAMPLED_NAN


def ddtree_accept(
    sampled: np.ndarray,
    tokens: np.ndarray,
    row_parent: np.ndarray,
    positions: np.ndarray,
    row_slot: np.ndarray,
    first_row: np.ndarray,
    request_rows: np.ndarray,
    stop_ids: np.ndarray,
    penalized: np.ndarray,
    context_len: np.ndarray,
    anchor: np.ndarray,
    remaining: np.ndarray,
    emitted: np.ndarray,
    num_emitted: np.ndarray,
    path_rows: np.ndarray,
    finish: np.ndarray,
    append_rows: np.ndarray,
    append_positions: np.ndarray,
    append_slots: np.ndarray,
    token_counts: np.ndarray,
    *,
    path_length: int,
) -> None:
    """Follow what the target drew from each root down the tree, and commit the rows on the way.

    sampled int32 [T]: the target's token after each row, or SAMPLED_*. The walk emits sampled[root], moves to
    the child with that token, emits what was sampled there, and so on; the token after the last row of the
    path is the bonus. As many tokens are emitted as rows are committed: the last emitted token becomes the
    anchor, without KV yet. It ends after the first stop id (FINISH_STOP), else at `remaining` tokens
    (FINISH_LENGTH), else before a row without a token (FINISH_NAN, FINISH_DEAD_END). Requests without rows in
    this pass emit nothing. emitted and path_rows [R, path_length] are -1 beyond num_emitted. append_* list the
    committed rows of all requests densely, in request order, with the slot that `kv_compact` leaves their KV
    in; then padding up to R * path_length entries. token_counts [R, V] of a penalized request count the tokens
    of its committed rows.
    """
    rows = len(sampled)
    drawn = sampled.tolist()
    child = {
        (parent, token): row
        for row, (parent, token) in enumerate(zip(row_parent[:rows].tolist(), tokens[:rows].tolist(), strict=True))
        if parent >= 0
    }
    emitted[:], path_rows[:] = -1, -1
    num_emitted[:], finish[:] = 0, FINISH_NONE
    committed: list[int] = []
    targets: list[int] = []
    for request in np.flatnonzero(request_rows).tolist():
        first, allowed = int(first_row[request]), int(remaining[request])
        stops = set(stop_ids[request].tolist())  # -1 (unused) never equals an emitted token
        row: int | None = first
        path: list[int] = []
        ending = FINISH_LENGTH if allowed <= 0 else FINISH_NONE
        while row is not None and ending == FINISH_NONE and len(path) < path_length:
            token = drawn[row]
            if token < 0:
                ending = FINISH_NAN if token == SAMPLED_NAN else FINISH_DEAD_END
                break
            path.append(row)
            if token in stops:
                ending = FINISH_STOP
            elif len(path) == allowed:
                ending = FINISH_LENGTH
            row = child.get((row, token))
        count = len(path)
        finish[request], num_emitted[request] = ending, count
        if count:
            path_rows[request, :count] = path
            emitted[request, :count] = sampled[path]
            anchor[request] = drawn[path[-1]]
            context_len[request] += count
            remaining[request] -= count
            if penalized[request]:
                np.add.at(token_counts[request], tokens[path], 1)
            committed += path
            targets += range(first, first + count)

    count, capacity = len(committed), num_emitted.size * path_length
    append_rows[:count], append_rows[count:capacity] = committed, -1
    append_positions[:count], append_positions[count:capacity] = positions[committed], 0
    append_slots[:count], append_slots[count:capacity] = row_slot[targets], 0
