"""Penalties and logit bias of a request, as the buffers that `sample` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_runtime.sampling import SamplingParams
from plugins.core.state import PROMPT_TOKEN


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a biased token id that the vocabulary does not have."""
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise ValueError(f"logit_bias: expected token ids from 0 to {vocab_size - 1}, found {token}")


def penalty_values(
    params: SamplingParams, prompt: np.ndarray, generated: Sequence[int], vocab_size: int
) -> dict[str, Any]:
    """Buffer values of a request slot whose committed tokens are `prompt` int32 and `generated`.

    Where nothing is penalized the buffers of vocabulary size are left alone.
    """
    if not params.penalizes:
        return {"penalized": 0}
    counts = np.bincount(np.asarray(generated, np.int64), minlength=vocab_size).astype(np.int32)
    counts[prompt] |= PROMPT_TOKEN
    bias = np.zeros(vocab_size, np.float32)
    for token, value in params.logit_bias:
        bias[token] = value
    return {
        "penalized": 1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "token_counts": counts,
        "logit_bias": bias,
    }
