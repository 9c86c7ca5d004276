"""Log-probabilities of tokens, from the logits that the target left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_runtime.generation import TokenLogprobs


def token_logprobs(logits: np.ndarray, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Of each of `tokens` under its row of `logits` float32 [n, V], with the `top` most probable ids of the row."""
    return tuple(_row_logprobs(row, token, top) for row, token in zip(logits, tokens, strict=True))


def _row_logprobs(row: np.ndarray, token: int, top: int) -> TokenLogprobs:
    largest = row.max()
    total = float(largest) + float(np.log(np.exp(row - largest).sum(dtype=np.float64)))
    best: list[int] = []
    if top:
        least = np.partition(row, -top)[-top]
        ids = np.flatnonzero(row >= least)  # more than `top` where several tie at the end
        best = ids[np.argsort(-row[ids], kind="stable")][:top].tolist()
    return TokenLogprobs(int(token), float(row[token]) - total, tuple((i, float(row[i]) - total) for i in best))
