"""Ranges of the sampling parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine_runtime.sampling import MAX_BIASED_TOKENS, SamplingParams

HUGE = 10**5000  # Python itself refuses to print it


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": -0.1}, "temperature: expected a number of at least 0, found -0.1"),
        ({"temperature": math.nan}, "temperature: expected"),
        ({"temperature": math.inf}, "temperature: expected"),
        ({"temperature": HUGE}, "temperature: expected a number of at least 0, found an integer too long to print"),
        ({"temperature": "1"}, "temperature: expected a number of at least 0, found '1'"),
        ({"temperature": True}, "temperature: expected"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, found 0.0"),
        ({"top_p": 1.1}, "top_p: expected"),
        ({"top_k": -1}, "top_k: expected an integer"),
        ({"top_k": 1.5}, "top_k: expected an integer"),
        ({"top_k": 2**31}, "top_k: expected an integer"),
        ({"min_p": -0.1}, "min_p: expected from 0 to 1"),
        ({"min_p": 1.5}, "min_p: expected from 0 to 1"),
        ({"seed": 2**63}, "seed: expected a signed 64-bit integer"),
        ({"seed": True}, "seed: expected a signed 64-bit integer"),
        ({"seed": HUGE}, "seed: expected a signed 64-bit integer, found an integer too long to print"),
        ({"max_tokens": -1}, "max_tokens: expected an integer of at least 0, found -1"),
        ({"max_tokens": True}, "max_tokens: expected"),
        ({"max_tokens": 2**31}, "max_tokens: expected"),
        ({"stop_ids": (-1,)}, "stop_ids: expected token ids"),
        ({"stop_ids": tuple(range(9))}, "stop_ids: expected at most 8 ids"),
        ({"min_tokens": -1}, "min_tokens: expected an integer of at least 0, found -1"),
        ({"min_tokens": 1.0}, "min_tokens: expected"),
        ({"min_tokens": 6, "max_tokens": 5}, r"min_tokens: expected at most max_tokens \(5\), found 6"),
        ({"presence_penalty": 2.1}, "presence_penalty: expected from -2 to 2, found 2.1"),
        ({"presence_penalty": math.nan}, "presence_penalty: expected"),
        ({"frequency_penalty": -2.1}, "frequency_penalty: expected from -2 to 2, found -2.1"),
        ({"frequency_penalty": False}, "frequency_penalty: expected"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected from 1e-06 to 1e.06, found 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty: expected"),
        ({"repetition_penalty": math.inf}, "repetition_penalty: expected"),
        ({"repetition_penalty": HUGE}, "repetition_penalty: expected"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias of token 1: expected from -100 to 100, found nan"),
        ({"logit_bias": ((1, 1e309),)}, "logit_bias of token 1: expected from -100 to 100, found inf"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias of token 1: expected"),
        ({"logit_bias": ((1, True),)}, "logit_bias of token 1: expected"),
        ({"logit_bias": ((1, HUGE),)}, "logit_bias of token 1: expected"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias: expected token ids .integers from 0., found -1"),
        ({"logit_bias": (("1", 0.0),)}, "logit_bias: expected token ids"),
        ({"logit_bias": ((True, 0.0),)}, "logit_bias: expected token ids"),
        ({"logit_bias": ((2**31, 0.0),)}, "logit_bias: expected token ids"),
        ({"logit_bias": ((1, 0.0), (1, 1.0))}, "logit_bias: expected every token id once"),
        (
            {"logit_bias": tuple((i, 0.0) for i in range(300_000))},
            "logit_bias: expected at most 1024 tokens, found 300",
        ),
    ],
)
def test_out_of_range(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        SamplingParams(**values)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_limits_of_the_ranges_are_allowed() -> None:
    params = SamplingParams(0.0, 1.0, 0, 1.0, -(2**63), 1, tuple(range(8)))
    assert (params.seed, params.stop_ids) == (-(2**63), tuple(range(8)))
    assert SamplingParams().stop_ids is None and SamplingParams().max_tokens is None
    bias = tuple((i, 100 if i % 2 else -100.0) for i in range(MAX_BIASED_TOKENS))
    params = SamplingParams(
        max_tokens=0,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=1e-6,
        logit_bias=bias,
    )
    assert params.penalizes and not SamplingParams(0.5, min_tokens=3).penalizes
