"""Step costs, calibration and the choice of whether to draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_runtime.budget import Calibration, CostTable, Gain, Speculation, TreeBudget, TreeResult
from tests.runtime.toy import toy_limits

TABLE = CostTable(
    rows=(1, 4, 8),
    contexts=(0, 1000),
    verify=((1.0, 2.0, 3.0), (2.0, 4.0, 6.0)),
    draft={1: 0.5, 4: 0.8},
)


def test_verify_runs_the_next_bucket_and_interpolates_the_context() -> None:
    assert [TABLE.verify_seconds(rows, 0) for rows in (1, 2, 4, 5, 8)] == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert TABLE.verify_seconds(3, 250) == 2.5
    assert TABLE.verify_seconds(1, 5000) == 2.0
    assert TABLE.verify_seconds(16, 0) == 6.0  # two passes of the largest bucket


def test_tree_costs_count_the_rows_of_the_whole_batch() -> None:
    alone = TABLE.tree_costs(1, 1, 0, 8)
    assert alone.dtype == np.float32
    assert alone.tolist() == [1.5, 2.5, 2.5, 2.5, 3.5, 3.5, 3.5, 3.5]
    assert TABLE.tree_costs(4, 2, 0, 4).tolist() == pytest.approx([2.8, 3.8, 3.8, 0.8 + 3 * 10 / 8])
    assert (np.diff(TABLE.tree_costs(3, 3, 500, 100)) >= 0).all()


def test_table_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(TABLE.to_json()))
    assert CostTable.load(path) == TABLE


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": [4, 1, 8]}, "rows: expected ascending"),
        ({"contexts": []}, "contexts: expected ascending"),
        ({"verify": [[1.0, 2.0, 3.0]]}, "verify: expected 2 lines of 3"),
        ({"verify": [[1.0, 2.0, 3.0], [2.0, 0.0, 6.0]]}, "a positive number of seconds"),
        ({"verify": [[1.0, 2.0, 3.0], [2.0, float("nan"), 6.0]]}, "a positive number of seconds"),
        ({"draft": {}}, "and a draft time"),
        ({"draft": {"one": 1.0}}, "expected rows, contexts, verify and draft"),
        ({"verify": None}, "expected rows, contexts, verify and draft"),
    ],
)
def test_a_bad_table_names_its_file(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**TABLE.to_json(), **changes}))
    with pytest.raises(ValueError, match=f"costs.json: .*{sentence}"):
        CostTable.load(path)


@pytest.mark.parametrize("values", [("beam", None), ("tree", -1), ("tree", 1.5), ("chain", True)])
def test_speculation_is_checked(values: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="speculation mode|tree budget"):
        Speculation(*values)


@pytest.mark.parametrize(
    ("mode", "budget", "costs", "most", "width"),
    [
        ("off", None, TABLE, 0, 0),
        ("off", 9, None, 0, 0),
        ("chain", None, None, 7, 1),
        ("chain", 3, None, 3, 1),
        ("chain", 64, None, 7, 1),
        ("chain", None, TABLE, 7, 1),
        ("tree", None, None, 7, 0),
        ("tree", 64, None, 64, 0),
        ("tree", 1000, None, 519, 0),
        ("tree", None, TABLE, 519, 0),
        ("tree", 5, TABLE, 5, 0),
    ],
)
def test_most_nodes_of_a_request(mode: str, budget: int | None, costs: CostTable | None, most: int, width: int) -> None:
    slot = TreeBudget(toy_limits(), Speculation(mode, budget), costs, False)
    assert (slot.most, slot.width) == (most, width)
    assert slot.adaptive == (costs is not None and budget is None)


def test_no_drafter_no_nodes() -> None:
    assert TreeBudget(toy_limits(draft_depth=0), Speculation("tree", 9), None, False).most == 0


def test_calibration_converges_to_the_true_ratio() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration(2)
    assert calibration.factors().tolist() == [1.0, 1.0]
    for _ in range(2000):
        calibration.observe(1, 0.8, bool(rng.random() < 0.4))
        calibration.observe(2, 0.3, bool(rng.random() < 0.9))
    first, second = calibration.factors()
    # 100 effective observations and 16 of the prior: (40 + 16) / (80 + 16), give or take the noise
    assert first == pytest.approx(56 / 96, abs=0.15)
    assert second == 1.0  # never above 1: a child must not outweigh its parent


def test_calibration_is_not_learned_from_its_own_factor() -> None:
    """Trees carry calibrated weights; a drafter that is as right as its raw weights say keeps factor 1."""
    slot = TreeBudget(toy_limits(), Speculation("tree", 4), None, calibrate=True)
    rng = np.random.default_rng(1)
    for _ in range(1000):
        factor = float(slot.factors[0])
        accepted = int(rng.random() < 0.5)
        slot.observe(TreeResult(rows=2, depth=1, accepted=accepted, mass=(0.5 * factor,)))
    assert slot.factors[0] > 0.75


def test_fixed_budget_keeps_the_calibration_at_one() -> None:
    slot = TreeBudget(toy_limits(), Speculation("tree", 4), TABLE, calibrate=False)
    for _ in range(50):
        slot.observe(TreeResult(2, 1, 0, (0.9,)))
    assert slot.factors.tolist() == [1.0] * 7


def test_drafting_stops_while_it_does_not_pay() -> None:
    gain = Gain()
    drafted = 0
    for _ in range(2000):
        if gain.drafts(plain_seconds=1.0, drafted_seconds=1.8):
            drafted += 1
            gain.observe(1)  # never a token more than plain decoding
    assert drafted <= gain.WARM_UP + 2000 // gain.PROBE + 1
    loss = drafted * 0.8 / 2000
    assert loss < 0.02
    for _ in range(3000):
        if gain.drafts(1.0, 1.8):
            gain.observe(4)
    assert all(gain.drafts(1.0, 1.8) for _ in range(100))  # it was noticed that drafts got good


def test_result_of_a_tree() -> None:
    """Root 10, children 11 (.5) and 12 (.25), 13 (.4) below 11, 14 (.1) below 13; walk 10, 11, 13."""
    parents = np.array([-1, 10, 10, 11, 13], np.int32)
    weights = np.log(np.array([1.0, 0.5, 0.25, 0.4, 0.1], np.float32))
    tree = TreeResult.read(parents, weights, [10, 11, 13], 10)
    assert (tree.rows, tree.depth, tree.accepted) == (5, 3, 2)
    assert tree.mass == pytest.approx((0.75, 0.8, 0.25))
    leaf = TreeResult.read(parents, weights, [10, 12], 10)
    assert (leaf.accepted, leaf.mass) == (1, pytest.approx((0.75,)))
    root = TreeResult.read(parents[:1], weights[:1], [10], 10)
    assert (root.rows, root.depth, root.accepted, root.mass) == (1, 0, 0, ())
