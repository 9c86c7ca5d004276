"""A request inside the step loop: what was asked, how far it is, and what it has cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_runtime.budget import TreeBudget
from engine_runtime.constraints import Rules
from engine_runtime.generation import GenerationRequest, RequestTiming, RequestUsage, TokenLogprobs
from engine_runtime.stats import TimeSplit
from plugins.core.state import MAX_STOP_IDS, Limits


@dataclass
class Request:
    """Host side of one request.

    most: tokens that it may generate. generated: those it has. slot: request slot, -1 while it waits. context: tokens
    whose KV is written, a mirror of `context_len`. goal: tokens to prefill before it decodes. cached: those of its
    prompt that the prefix cache had, None until its prefill starts. rules: what may follow, None: everything. scores:
    log-probabilities of its prompt so far, if wanted. dead_end: what to say where nothing may follow. waited, seconds:
    its timing so far.
    """

    id: int
    given: GenerationRequest
    prompt: np.ndarray
    stop_ids: tuple[int, ...]
    most: int
    budget: TreeBudget
    generated: list[int] = field(default_factory=list)
    slot: int = -1
    context: int = 0
    goal: int = 0
    cached: int | None = None
    preemptions: int = 0
    passes: int = 0
    rows: int = 0
    accepted: int = 0
    rules: Rules | None = None
    scores: list[TokenLogprobs | None] = field(default_factory=list)
    dead_end: str = "the constraints of the request leave no token that could follow"
    waited: float = 0.0
    seconds: TimeSplit = field(default_factory=TimeSplit)

    @property
    def drafts(self) -> bool:
        """Whether this request uses the drafter at all."""
        return self.budget.most > 0

    @property
    def ready(self) -> bool:
        """Whether it decodes; until then it is prefilled."""
        return self.context >= self.goal

    @property
    def reuses_kv(self) -> bool:
        """Whether cached KV will do for its prompt; not where the prompt's own logits are wanted."""
        return self.given.prompt_logprobs is None

    @property
    def scoring(self) -> bool:
        """Whether the next thing to compute are log-probabilities of its prompt."""
        wanted = self.given.prompt_logprobs is not None
        return wanted and (self.most == 0 or len(self.scores) < len(self.prompt))

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` were generated."""
        self.generated += tokens
        if self.rules is not None:
            self.rules.accept(tokens)

    @property
    def length(self) -> int:
        """Tokens of the prompt and generated ones together."""
        return len(self.prompt) + len(self.generated)

    def sequence(self) -> np.ndarray:
        """int32: prompt and generated tokens."""
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])

    def usage(self) -> RequestUsage:
        return RequestUsage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached or 0,
            completion_tokens=len(self.generated),
            passes=self.passes,
            rows=self.rows,
            accepted=self.accepted,
            preemptions=self.preemptions,
        )

    def timing(self) -> RequestTiming:
        return RequestTiming(self.waited, **self.seconds.to_json())


def check_prompt(prompt: Sequence[int], limits: Limits, vocab_size: int) -> np.ndarray:
    """`prompt` as int32; raises ValueError for one that is empty, too long, or has an id out of range."""
    if len(prompt) == 0:
        raise ValueError("prompt: expected at least one token, found none")
    if len(prompt) >= limits.max_context:
        raise ValueError(
            f"prompt: {len(prompt)} tokens leave no room to generate in a context of "
            f"{limits.max_context}: shorten it to at most {limits.max_context - 1} "
            "or build with a larger --max-context"
        )
    for index, token in enumerate(prompt):
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(f"prompt: token {index}: expected an id from 0 to {vocab_size - 1}, found {token!r}")
    return np.asarray(prompt, np.int32)


def stop_ids(request: GenerationRequest, model: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end the text: the request's own, else the model's."""
    if request.params.stop_ids is not None:
        return request.params.stop_ids
    ids = tuple(model["eos_token_ids"])
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(f"eos_token_ids of the model: expected at most {MAX_STOP_IDS} ids, found {len(ids)}")
    return ids
