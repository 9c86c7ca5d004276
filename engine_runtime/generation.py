"""What a caller asks of the engine and what it gets back, as plain values: the same in one process and over a socket.

Token ids, never text: tokenizer, chat format and stop strings belong to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_runtime.budget import Speculation
from engine_runtime.sampling import SamplingParams

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Constraint:
    """What a request may not generate.

    grammar: an llguidance grammar (its JSON or Lark form), None for free text. after: the grammar starts behind the
    first of these token ids that is generated (the end of the reasoning); empty: at the first token. banned: ids that
    are never drawn. banned_before: ids that are not drawn until the grammar starts.
    """

    grammar: str | None = None
    after: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    banned_before: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. logprobs: how many alternatives to report with each token, 0 to `MAX_LOGPROBS` (None: nothing).
    prompt_logprobs: the same for every prompt token; then `params.max_tokens` may be 0. trace: report each step's tree.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    speculation: Speculation = Speculation()
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for counts of logprobs out of range, and for nothing to do."""
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_LOGPROBS):
                raise ValueError(f"{name}: expected an integer from 0 to {MAX_LOGPROBS}, found {str(value)[:80]}")
        if self.params.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens: expected at least 1 unless prompt_logprobs are asked for, found 0")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probability of a token under the model, before penalties, masks and temperature; `top`: the most
    probable (id, logprob) pairs, descending, ties by lowest id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TreeTrace:
    """One decode pass of one request. tokens[i], parents[i] (index, -1 for the root), probabilities[i] (of the path,
    under the drafter) of every row, root first; accepted: the rows of the accepted path, root included; bonus: the
    token after it."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    accepted: tuple[int, ...]
    bonus: int


@dataclass(frozen=True)
class RequestTiming:
    """Seconds of one request, by part: until admission, then as shares of the passes that it took part in."""

    queue: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0


@dataclass(frozen=True)
class RequestUsage:
    """Token counts of one request. cached_tokens: prompt tokens whose KV was found in the prefix cache. passes, rows
    and accepted: decode passes, the rows that they verified, and the drafted tokens among those emitted."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    passes: int = 0
    rows: int = 0
    accepted: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Output:
    """News of one request. finish: "stop", "length" or "error" (with `error`, one sentence) in its last output. usage
    and timing: so far. prompt_logprobs comes once, before or with the first token; its first entry is None."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    trace: TreeTrace | None = None
    finish: str | None = None
    error: str | None = None
    usage: RequestUsage | None = None
    timing: RequestTiming | None = None
