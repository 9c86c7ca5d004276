"""Sampling parameters of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plugins.core.state import MAX_STOP_IDS

MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MAX_REPETITION = 1e6  # beyond it logits could leave float32
FLOAT32_MAX = 3.4028234e38


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Raises ValueError where a value is out of range.

    temperature: 0 is greedy. top_p: 1 is off. top_k: 0 is off. min_p: relative to the largest probability,
    0 is off. seed: the noise is a function of (seed, position, token), so equal seeds give equal text.
    max_tokens: most tokens to generate; None for as many as the context holds; 0 only to score a prompt. stop_ids:
    token ids that end the text (the id itself is emitted); None for the model's own end-of-text ids. min_tokens: no
    stop id is drawn as one of the first so many tokens, unless a grammar allows nothing else.
    presence_penalty, frequency_penalty: taken off the logit of a token that was generated, once and per occurrence.
    repetition_penalty: divides (a negative logit: multiplies) the logit of a token of the prompt or the text.
    logit_bias: (token id, bias) pairs, the bias being added to the logit before the penalties.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    stop_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, _number(self.temperature) >= 0, "a number of at least 0")
        _check("top_p", self.top_p, 0 < _number(self.top_p) <= 1, "above 0 and at most 1")
        _check("top_k", self.top_k, _is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer from 0 (off)")
        _check("min_p", self.min_p, 0 <= _number(self.min_p) <= 1, "from 0 to 1")
        _check("seed", self.seed, _is_int(self.seed) and -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        if self.max_tokens is not None:
            valid = _is_int(self.max_tokens) and 0 <= self.max_tokens < 2**31
            _check("max_tokens", self.max_tokens, valid, "an integer of at least 0")
        if self.stop_ids is not None:
            valid = all(_is_id(token) for token in self.stop_ids)
            _check("stop_ids", self.stop_ids, valid, "token ids (integers from 0)")
            _check("stop_ids", self.stop_ids, len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")
        valid = _is_int(self.min_tokens) and 0 <= self.min_tokens < 2**31
        _check("min_tokens", self.min_tokens, valid, "an integer of at least 0")
        if self.max_tokens is not None:
            valid = self.min_tokens <= self.max_tokens
            _check("min_tokens", self.min_tokens, valid, f"at most max_tokens ({self.max_tokens})")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), -2 <= _number(getattr(self, name)) <= 2, "from -2 to 2")
        valid = 1 / MAX_REPETITION <= _number(self.repetition_penalty) <= MAX_REPETITION
        expected = f"from {1 / MAX_REPETITION:g} to {MAX_REPETITION:g}"
        _check("repetition_penalty", self.repetition_penalty, valid, expected)
        self._check_bias()

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            found = len(self.logit_bias)
            raise ValueError(f"logit_bias: expected at most {MAX_BIASED_TOKENS} tokens, found {found}")
        for token, bias in self.logit_bias:
            _check("logit_bias", token, _is_id(token), "token ids (integers from 0)")
            valid = abs(_number(bias)) <= MAX_BIAS
            _check(f"logit_bias of token {token}", bias, valid, f"from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias: expected every token id once")

    @property
    def penalizes(self) -> bool:
        """Whether logits are changed by what was generated, by the prompt or by a bias."""
        off = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
        return bool(self.logit_bias) or not off


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and _is_int(value) and 0 <= value < 2**31


def _number(value: object) -> float:
    """`value`, or NaN (which fails every comparison) where float32 does not hold it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= FLOAT32_MAX:
        return math.nan
    return float(value)


def _check(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name}: expected {expected}, found {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 2**256:
        return "an integer too long to print"  # Python refuses to print some, and nobody wants to read the others
    return repr(value)[:200]
