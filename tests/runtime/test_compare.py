"""Steps beside their references: nothing differs where nothing is wrong, and a wrong step is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_runtime.compare import ComparingExecutor, Difference, summary
from engine_runtime.engine import load_engine
from engine_runtime.executor.cuda import BoundStep
from engine_runtime.executor.weights import weight_source
from tests.runtime.fake_device import FakeDevice, ReferenceExecutor, memory
from tests.runtime.test_cuda_executor import run_all
from tests.runtime.toy import TREE


class Faulty(ReferenceExecutor):
    """One step leaves a wrong number in its result."""

    bad = ""

    def _enqueue(self, bound: BoundStep) -> None:
        super()._enqueue(bound)
        if bound.step.node == self.bad:
            address = bound.addresses[-2]
            self.fake.do(lambda: np.copyto(memory(address, 4).view(np.float32), np.float32(100)))


def differences(path: Path, kind: type[ReferenceExecutor]) -> list[Difference]:
    engine, streamed = load_engine(path, 0), load_engine(path, 0, map_weights=False)
    found: list[Difference] = []
    executor = kind(engine.plan, weight_source(streamed), FakeDevice())
    run_all(ComparingExecutor(executor, engine.weights, 1, found.append), TREE, None)  # type: ignore[arg-type]
    return found


def test_equal_steps_do_not_differ(engine_path: Path) -> None:
    found = differences(engine_path, ReferenceExecutor)
    assert not [one for one in found if one.error != 0]
    compared = {plugin for plugin, *_ in summary(found)}
    assert {"mla_prepare", "ddtree_build", "ddtree_accept", "sample", "int4_marlin_gemm", "draft_attention"} <= compared


def test_the_first_wrong_step_is_named(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_engine(engine_path, 0).plan
    attention = [step.node for step in plan.phases["verify[4]"].steps if step.plugin == "mla_attention"]
    monkeypatch.setattr(Faulty, "bad", attention[1])
    wrong = [one for one in differences(engine_path, Faulty) if one.fails]
    assert wrong and {one.node for one in wrong} == {attention[1]}  # the steps after it are not blamed
    assert {one.operand for one in wrong} == {"out"}
