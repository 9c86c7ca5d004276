"""Ranges of the sampling parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine_runtime.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": -0.1}, "temperature: expected a number of at least 0, found -0.1"),
        ({"temperature": math.nan}, "temperature: expected"),
        ({"temperature": math.inf}, "temperature: expected"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, found 0.0"),
        ({"top_p": 1.1}, "top_p: expected"),
        ({"top_k": -1}, "top_k: expected an integer"),
        ({"top_k": 1.5}, "top_k: expected an integer"),
        ({"top_k": 2**31}, "top_k: expected an integer"),
        ({"min_p": -0.1}, "min_p: expected from 0 to 1"),
        ({"min_p": 1.5}, "min_p: expected from 0 to 1"),
        ({"seed": 2**63}, "seed: expected a signed 64-bit integer"),
        ({"seed": True}, "seed: expected a signed 64-bit integer"),
        ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, found 0"),
        ({"stop_ids": (-1,)}, "stop_ids: expected token ids"),
        ({"stop_ids": tuple(range(9))}, "stop_ids: expected at most 8 ids"),
    ],
)
def test_out_of_range(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**values)


def test_limits_of_the_ranges_are_allowed() -> None:
    params = SamplingParams(0.0, 1.0, 0, 1.0, -(2**63), 1, tuple(range(8)))
    assert (params.seed, params.stop_ids) == (-(2**63), tuple(range(8)))
    assert SamplingParams().stop_ids is None and SamplingParams().max_tokens is None
