"""`ddtree_accept` against an independent walk, and the claim that what is emitted does not depend on the
tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.state import (
    FINISH_DEAD_END,
    FINISH_LENGTH,
    FINISH_NAN,
    FINISH_NONE,
    FINISH_STOP,
    Limits,
    request_buffers,
    result_buffers,
    row_buffers,
    vocabulary_buffers,
)
from tests.plugins.tree_buffers import Buffers, candidates_of, paths

DEPTH, TOKENS = 4, 3


def limits(**changes: int) -> Limits:
    values = {
        "max_requests": 3,
        "max_rows": 48,
        "prefill_chunk": 20,
        "max_context": 96,
        "page_size": 8,
        "kv_pages": 37,
        "draft_depth": DEPTH,
        "tree_top_k": TOKENS,
    }
    return Limits(**(values | changes))


def trees(seed: int, world_size: int = 12) -> Buffers:
    """Random trees over few tokens, so that a random target often stays inside them."""
    rng = np.random.default_rng(seed)
    buffers = Buffers(limits(), seed)
    buffers["active"][int(rng.integers(0, 3))] = int(rng.integers(0, 2))
    buffers["tree_budget"][:] = torch.from_numpy(rng.integers(0, world_size + 1, 3))
    buffers.build(candidates_of(rng.normal(size=(3 * DEPTH, TOKENS)), TOKENS))
    return buffers


def walk(tokens: list[int], drawn: list[int], parents: list[int], stops: set[int], remaining: int):  # type: ignore[no-untyped-def]
    """(path, finish) of one request by searching for the child at every step; rows numbered from its root."""
    path, row = [], 0
    while True:
        if remaining <= 0:
            return path, FINISH_LENGTH
        if drawn[row] == -1:
            return path, FINISH_NAN
        path.append(row)
        if drawn[row] in stops:
            return path, FINISH_STOP
        if len(path) == remaining:
            return path, FINISH_LENGTH
        following = [i for i in range(len(tokens)) if parents[i] == row and tokens[i] == drawn[row]]
        if not following:
            return path, FINISH_NONE
        (row,) = following


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_accept_equals_a_plain_walk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    buffers = trees(seed)
    rows = int(buffers["num_rows"][0]) + int(rng.integers(0, 4))
    drawn = rng.integers(0, TOKENS, rows)
    if rng.random() < 0.4:
        drawn[rng.random(rows) < 0.15] = -1
    buffers["remaining"][:] = torch.from_numpy(rng.integers(0, 7, 3))
    if rng.random() < 0.5:
        buffers["stop_ids"][int(rng.integers(0, 3)), int(rng.integers(0, 8))] = int(rng.integers(0, TOKENS))
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    buffers.accept(torch.from_numpy(drawn))

    appended: list[tuple[int, int, int]] = []
    for request in range(3):
        first, count = int(buffers["first_row"][request]), int(buffers["request_rows"][request])
        remaining, context = int(before["remaining"][request]), int(before["context_len"][request])
        path, finish, emitted = [], FINISH_NONE, []
        if count:
            own = slice(first, first + count)
            parents = [p - first for p in buffers["row_parent"][own].tolist()]
            stops = set(buffers["stop_ids"][request].tolist()) - {-1}
            tokens = buffers["tokens"][own].tolist()
            path, finish = walk(tokens, drawn[own].tolist(), [-1, *parents[1:]], stops, remaining)
            emitted = [int(drawn[first + row]) for row in path]
        size = len(path)
        assert buffers["finish"][request] == finish and buffers["num_emitted"][request] == size
        assert buffers["emitted"][request].tolist() == emitted + [-1] * (DEPTH + 1 - size)
        rows_of_path = [first + row for row in path]
        assert buffers["path_rows"][request].tolist() == rows_of_path + [-1] * (DEPTH + 1 - size)
        assert buffers["context_len"][request] == context + size
        assert buffers["remaining"][request] == remaining - size
        last = emitted[-1] if emitted else int(before["anchor"][request])
        assert buffers["anchor"][request] == last
        appended += [(row, context + i, int(buffers["row_slot"][first + i])) for i, row in enumerate(rows_of_path)]
    appended += [(-1, 0, 0)] * (3 * (DEPTH + 1) - len(appended))
    names = ("append_rows", "append_positions", "append_slots")
    got = list(zip(*(buffers[name][: len(appended)].tolist() for name in names), strict=True))
    assert got == appended
    for name in names:
        assert torch.equal(buffers[name][len(appended) :], before[name][len(appended) :])
    mutated = get_plugin("ddtree_accept").mutates
    unchanged = [name for name in before if name not in mutated]
    assert all(torch.equal(buffers[name], before[name]) for name in unchanged)


def chain() -> Buffers:
    """One request whose tree is the chain of tokens 1, 2, 3, 4 below anchor 100; the target agrees and adds
    5."""
    buffers = Buffers(limits(max_requests=1, max_rows=8))
    buffers["tree_width"][:] = 1
    logits = np.full((DEPTH, 8), -3.0)
    logits[range(DEPTH), [1, 2, 3, 4]] = 5.0
    buffers.build(candidates_of(logits, TOKENS))
    return buffers


AGREED = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("index", range(DEPTH + 1))
def test_stop_token_at_every_path_index(index: int) -> None:
    buffers = chain()
    buffers["stop_ids"][0, 3] = AGREED[index]
    buffers.accept(torch.tensor(AGREED))
    assert buffers["emitted"][0, : index + 1].tolist() == AGREED[: index + 1]
    assert (buffers["num_emitted"][0], buffers["finish"][0]) == (index + 1, FINISH_STOP)
    assert buffers["context_len"][0] == 2 + index + 1 and buffers["anchor"][0] == AGREED[index]


@pytest.mark.parametrize("allowed", range(DEPTH + 3))
def test_length_limit_at_every_path_index(allowed: int) -> None:
    buffers = chain()
    buffers["remaining"][0] = allowed
    buffers.accept(torch.tensor(AGREED))
    count = min(allowed, DEPTH + 1)
    finish = FINISH_LENGTH if allowed <= DEPTH + 1 else FINISH_NONE
    assert (buffers["num_emitted"][0], buffers["finish"][0]) == (count, finish)
    assert buffers["remaining"][0] == allowed - count


@pytest.mark.parametrize("index", range(DEPTH + 1))
def test_nan_at_every_path_index_emits_what_came_before(index: int) -> None:
    buffers, drawn = chain(), list(AGREED)
    drawn[index] = -1
    buffers.accept(torch.tensor(drawn))
    assert buffers["emitted"][0].tolist() == AGREED[:index] + [-1] * (DEPTH + 1 - index)
    assert (buffers["num_emitted"][0], buffers["finish"][0]) == (index, FINISH_NAN)
    assert buffers["anchor"][0] == (AGREED[index - 1] if index else 100)


def test_stop_wins_over_length_and_over_a_later_nan() -> None:
    buffers = chain()
    buffers["stop_ids"][0, 0], buffers["remaining"][0] = 2, 2
    buffers.accept(torch.tensor([1, 2, -1, -1, -1]))
    assert (buffers["num_emitted"][0], buffers["finish"][0]) == (2, FINISH_STOP)


def test_a_dead_end_is_told_from_nan() -> None:
    buffers = chain()
    buffers.accept(torch.tensor([1, -2, -1, -1, -1]))
    assert (buffers["num_emitted"][0], buffers["finish"][0]) == (1, FINISH_DEAD_END)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_token_counts_are_those_of_the_committed_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    buffers = trees(seed)
    buffers["anchor"][:] = torch.from_numpy(rng.integers(0, 8, 3))
    buffers["tokens"][buffers["first_row"].long()] = buffers["anchor"]
    buffers["penalized"][:] = torch.from_numpy(rng.integers(0, 2, 3))
    before = buffers["token_counts"].clone()
    rows = int(buffers["num_rows"][0])
    buffers.accept(torch.from_numpy(rng.integers(0, TOKENS, rows)))
    for request in range(3):
        expected = before[request].tolist()
        for row in buffers["path_rows"][request].tolist():
            if row >= 0 and buffers["penalized"][request]:
                expected[int(buffers["tokens"][row])] += 1
        assert buffers["token_counts"][request].tolist() == expected


def test_nan_off_the_path_is_not_seen() -> None:
    buffers = chain()
    buffers.accept(torch.tensor([1, 7, -1, -1, -1]))
    assert (buffers["num_emitted"][0], buffers["finish"][0]) == (2, FINISH_NONE)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_emitted_does_not_depend_on_the_tree(seed: int) -> None:
    """The target as a function of the prefix: any trees emit the text of plain decoding, only in other
    portions."""

    def target(prefix: tuple[int, ...]) -> int:
        return int(np.random.default_rng([seed, *prefix]).integers(0, TOKENS + 1))

    rng, length = np.random.default_rng(seed), 12
    text: tuple[int, ...] = (100,)
    for _ in range(length):
        text = (*text, target(text))
    buffers = Buffers(limits(max_requests=1), seed)
    buffers["remaining"][:] = length
    emitted: tuple[int, ...] = ()
    while buffers["finish"][0] != FINISH_LENGTH:
        buffers["tree_budget"][:], buffers["tree_width"][:] = (
            int(rng.integers(0, 30)),
            int(rng.integers(0, 3)),
        )
        buffers.build(candidates_of(rng.normal(size=(DEPTH, TOKENS + 1)), TOKENS))
        prefix = (100, *emitted)
        drawn = [target((*prefix, *path)) for path in paths(buffers.rows(0))]
        buffers.accept(torch.tensor(drawn))
        emitted += tuple(buffers["emitted"][0, : int(buffers["num_emitted"][0])].tolist())
        assert buffers["context_len"][0] == 2 + len(emitted) and buffers["anchor"][0] == emitted[-1]
    assert emitted == text[1:]


def test_infer() -> None:
    plugin, shape = get_plugin("ddtree_accept"), limits()
    specs = row_buffers(shape) | request_buffers(shape) | vocabulary_buffers(shape, 8) | result_buffers(shape, 8)
    inputs = [specs[name] for name in plugin.inputs]
    assert plugin.infer({"path_length": DEPTH + 1}, inputs) == []
    with pytest.raises(PluginError, match="ddtree_accept: emitted: expected .*, found"):
        plugin.infer({"path_length": DEPTH}, inputs)
    appended = ("append_rows", "append_positions", "append_slots")
    for names, message in (
        (appended, "append_rows: expected at least 15"),
        (appended[2:], "append_slots: expected"),
    ):
        short = [TensorSpec((14,), "int32") if name in names else specs[name] for name in plugin.inputs]
        with pytest.raises(PluginError, match=message):
            plugin.infer({"path_length": DEPTH + 1}, short)
