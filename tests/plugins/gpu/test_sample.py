"""Sampled tokens on the device: those of the reference, but for draws that two scores decide within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.plugin import get_plugin
from plugins.core.state import PROMPT_TOKEN
from plugins.sample.reference import gumbel
from tests.plugins.gpu.references import on_device, reference

pytestmark = pytest.mark.gpu
REQUESTS = 4


class Case:
    """Operands of `sample` over `rows` rows, all limits and penalties off."""

    def __init__(self, seed: int, rows: int, vocab: int, spread: float = 4.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        per_request = {
            "temperature": torch.zeros(REQUESTS),
            "top_k": torch.zeros(REQUESTS, dtype=torch.int32),
            "top_p": torch.ones(REQUESTS),
            "min_p": torch.zeros(REQUESTS),
            "seed": torch.arange(REQUESTS) * 7 - 3,
            "penalized": torch.zeros(REQUESTS, dtype=torch.int32),
            "presence_penalty": torch.zeros(REQUESTS),
            "frequency_penalty": torch.zeros(REQUESTS),
            "repetition_penalty": torch.ones(REQUESTS),
        }
        self.operands: dict[str, torch.Tensor] = {
            "logits": torch.randn(rows, vocab, generator=generator) * spread,
            "positions": torch.arange(rows, dtype=torch.int32) + 1000,
            "row_request": torch.arange(rows, dtype=torch.int32) % (REQUESTS + 1) - 1,
            **per_request,
            "token_counts": torch.full((REQUESTS, vocab), 3, dtype=torch.int32),
            "logit_bias": torch.full((REQUESTS, vocab), 5.0),
            "row_masked": torch.zeros(rows, dtype=torch.int32),
            "vocab_mask": torch.zeros(rows, -(-vocab // 32), dtype=torch.int32).view(torch.uint32),
            "tokens": torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32),
            "row_parent": torch.arange(rows, dtype=torch.int32) - REQUESTS - 1,
        }
        self.operands["row_parent"].clamp_(min=-1)

    def set(self, **values: object) -> Case:
        for name, value in values.items():
            self.operands[name][:] = torch.as_tensor(value, dtype=self.operands[name].dtype)
        return self

    def given(self) -> list[torch.Tensor]:
        return [self.operands[name.removesuffix("?")] for name in get_plugin("sample").inputs]

    def run(self) -> tuple[list[int], list[int]]:
        """(tokens of the device, tokens of the reference)."""
        (found,) = on_device("sample", {}, [x.cuda() for x in self.given()])
        (expected,) = reference("sample", {}, self.given(), "cpu")
        return found.tolist(), expected.tolist()

    def check(self) -> None:
        found, expected = self.run()
        for row, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one == other or self.near(row, one, other), (row, one, other)

    def near(self, row: int, one: int, other: int) -> bool:
        """Whether the two tokens' scores with noise are equal to rounding (only without masks and penalties)."""
        if min(one, other) < 0:
            return False
        slot = int(self.operands["row_request"][row])
        heat = self.operands["temperature"][slot]
        tokens = torch.tensor([one, other])
        noise = gumbel(int(self.operands["seed"][slot]), int(self.operands["positions"][row]) + 1, tokens)
        scores = self.operands["logits"][row, tokens] / heat + noise
        return bool((scores[0] - scores[1]).abs() < 2e-5)


SIZES = [(1, 163_840), (32, 163_840), (128, 4096), (7, 40)]


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_greedy(rows: int, vocab: int) -> None:
    case = Case(1, rows, vocab)
    case.operands["logits"][:, 10:20] = case.operands["logits"].max() + 1  # ties: the lowest id
    found, expected = case.run()
    assert found == expected


def test_rows_without_a_distribution() -> None:
    case = Case(2, 20, 5000)
    logits = case.operands["logits"]
    logits[1, 77], logits[2, 9], logits[3], logits[4, :4000] = float("nan"), float("inf"), -float("inf"), -float("inf")
    case.set(row_masked=[0] * 6 + [1] * 2 + [0] * 12)  # an empty mask
    for heat in (0.0, 1.0):
        found, expected = case.set(temperature=heat).run()
        assert found == expected
        assert found[1:4] == [-1] * 3 and -2 in found[6:8]


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
@pytest.mark.parametrize("heat", [0.3, 1.0, 2.5])
def test_temperature(rows: int, vocab: int, heat: float) -> None:
    Case(3, rows, vocab).set(temperature=heat).check()


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
@pytest.mark.parametrize(
    "limit",
    [
        {"top_p": 0.95},
        {"top_p": 0.1},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 3000},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_limits(rows: int, vocab: int, limit: dict[str, float]) -> None:
    Case(4, rows, vocab).set(temperature=[1.0, 0.6, 1.3, 0.0], **limit).check()
    Case(5, rows, vocab, spread=0.05).set(temperature=1.0, **limit).check()  # nearly flat: thousands are kept


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_penalties_masks_and_ancestors(heat: float) -> None:
    rows, vocab = 33, 4096
    case = Case(6, rows, vocab)
    counts = torch.from_numpy(case.rng.integers(0, 3, (REQUESTS, vocab))).int()
    counts[:, ::7] |= PROMPT_TOKEN
    case.set(
        temperature=heat,
        top_p=0.9,
        penalized=[1, 0, 1, 1],
        presence_penalty=[0.5, 9.0, 0.0, -0.3],
        frequency_penalty=[0.1, 9.0, 0.7, 0.0],
        repetition_penalty=[1.3, 9.0, 1.0, 0.8],
        token_counts=counts,
        logit_bias=torch.randn(REQUESTS, vocab),
        row_masked=torch.arange(rows) % 2,
    )
    words = torch.from_numpy(case.rng.integers(0, 2**32, (rows, vocab // 32), dtype=np.uint32))
    case.operands["vocab_mask"] = words
    found, expected = case.run()
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= (0 if heat == 0 else 1)
