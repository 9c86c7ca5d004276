"""Running one request with its counts and times, for the command line."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from engine_runtime.budget import Speculation
from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.sampling import SamplingParams
from engine_runtime.stats import DecodeStats

if TYPE_CHECKING:
    from engine_runtime.runtime import Runtime


@dataclass(frozen=True)
class Seconds:
    """Where the time of a request went. total = prefill + draft + verify + other."""

    total: float
    first_token: float
    prefill: float
    draft: float
    verify: float

    @property
    def other(self) -> float:
        return max(0.0, self.total - self.prefill - self.draft - self.verify)

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in (*asdict(self).items(), ("other", self.other))}


@dataclass(frozen=True)
class Measured:
    """One request: tokens (a stop id included), why it ended ("stop", "length", "error", "interrupted"), counts."""

    prompt_tokens: int
    tokens: list[int]
    finish: str
    error: str | None
    stats: DecodeStats
    seconds: Seconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: tokens after the first, over the time after the first."""
        return rate(len(self.tokens) - 1, self.seconds.total - self.seconds.first_token)


def rate(count: float, total: float) -> float:
    """count / total, and 0 where there is nothing to divide."""
    return count / total if count > 0 and total > 0 else 0.0


def run_request(
    runtime: Runtime,
    prompt: Sequence[int],
    params: SamplingParams,
    speculation: Speculation,
    on_tokens: Callable[[tuple[int, ...], bool], None] = lambda tokens, last: None,
) -> Measured:
    """Run one request to its end, on a runtime that has no other; ValueError where it cannot be taken.

    on_tokens: called with each step's tokens and whether they are the last. Ctrl-C ends the request early, with what
    it has so far.
    """
    before, counted = runtime.seconds.to_json(), copy.deepcopy(runtime.stats)
    start = time.perf_counter()
    request = runtime.submit(GenerationRequest(tuple(prompt), params, speculation))
    tokens: list[int] = []
    first_token: float | None = None
    last: Output | None = None
    try:
        while last is None:
            for event in runtime.step():
                if event.request != request:
                    continue
                output = event.output
                tokens += output.tokens
                if tokens and first_token is None:
                    first_token = time.perf_counter() - start
                if output.finish is not None:
                    last = output
                on_tokens(output.tokens, last is not None)
    except KeyboardInterrupt:
        last = last or Output(finish="interrupted")
    total = time.perf_counter() - start
    spent = {part: value - before[part] for part, value in runtime.seconds.to_json().items()}
    seconds = Seconds(total, total if first_token is None else first_token, **spent)
    stats = runtime.stats.since(counted)
    return Measured(len(prompt), tokens, str(last.finish), last.error, stats, seconds)


def acceptance(stats: DecodeStats) -> list[dict[str, Any]]:
    """By depth: passes whose accepted path reached it and could go on, those that did, and their share."""
    return [
        {"depth": depth, "reached": reached, "accepted": accepted, "rate": round(rate(accepted, reached), 4)}
        for depth, (reached, accepted) in enumerate(zip(stats.reached, stats.accepted, strict=True), 1)
        if reached
    ]
