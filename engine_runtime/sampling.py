"""Sampling parameters of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plugins.core.state import MAX_STOP_IDS


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Raises ValueError where a value is out of range.

    temperature: 0 is greedy. top_p: 1 is off. top_k: 0 is off. min_p: relative to the largest probability,
    0 is off. seed: the noise is a function of (seed, position, token), so equal seeds give equal text.
    max_tokens: most tokens to generate; None for as many as the context holds. stop_ids: token ids that end
    the text (the id itself is emitted); None for the model's own end-of-text ids.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    stop_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number of at least 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("top_k", self.top_k, _is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer from 0 (off)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _check("seed", self.seed, _is_int(self.seed) and -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        if self.max_tokens is not None:
            valid = _is_int(self.max_tokens) and self.max_tokens >= 1
            _check("max_tokens", self.max_tokens, valid, "an integer of at least 1")
        if self.stop_ids is not None:
            valid = all(_is_int(token) and 0 <= token < 2**31 for token in self.stop_ids)
            _check("stop_ids", self.stop_ids, valid, "token ids (integers from 0)")
            _check("stop_ids", self.stop_ids, len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name}: expected {expected}, found {value!r}")
