"""What decoding did: passes, tokens, acceptance by depth, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COUNTS = ("prompt_tokens", "generated_tokens", "passes", "tokens", "rows", "drafted_passes")
BY_DEPTH = ("offered", "reached", "accepted")


@dataclass
class DecodeStats:
    """Counts of decoding, over all requests.

    passes: decode passes (verify runs; a pass over n requests counts once for each of them). tokens: tokens
    that those passes emitted (the first token of a request comes from its prefill and is not among them).
    rows: token rows verified, roots included. offered[d], reached[d], accepted[d] for depth d + 1: passes
    whose tree held a node that deep; whose accepted path got to a node with children that deep; that
    accepted one of them.
    """

    depth: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    tokens: int = 0
    rows: int = 0
    drafted_passes: int = 0
    offered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in BY_DEPTH:
            setattr(self, name, [0] * self.depth)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    def add_pass(self, rows: int, tokens: int, drafted: bool) -> None:
        self.passes += 1
        self.tokens += tokens
        self.generated_tokens += tokens
        self.rows += rows
        self.drafted_passes += drafted

    def add_tree(self, offered: int, reached: int, accepted: int) -> None:
        """Depths (0: none) that one tree held, that its walk got to be offered, and that it accepted."""
        for name, depth in zip(BY_DEPTH, (offered, reached, accepted), strict=True):
            counts = getattr(self, name)
            for index in range(depth):
                counts[index] += 1

    def since(self, earlier: DecodeStats) -> DecodeStats:
        """What was counted after `earlier`, a copy of these counts as they were."""
        result = DecodeStats(self.depth)
        for name in COUNTS:
            setattr(result, name, getattr(self, name) - getattr(earlier, name))
        for name in BY_DEPTH:
            pairs = zip(getattr(self, name), getattr(earlier, name), strict=True)
            setattr(result, name, [now - then for now, then in pairs])
        return result

    def to_json(self) -> dict[str, Any]:
        value = {name: getattr(self, name) for name in COUNTS}
        value |= {name: list(getattr(self, name)) for name in BY_DEPTH}
        return {**value, "tokens_per_pass": round(self.tokens_per_pass, 4)}


@dataclass
class TimeSplit:
    """Seconds spent in the passes of each part of decoding, the drafter's context of a prompt counted as prefill and
    that of generated tokens as draft; of one request: its shares of them."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0

    def add(self, part: str, seconds: float) -> None:
        setattr(self, part, getattr(self, part) + seconds)

    def to_json(self) -> dict[str, float]:
        return {"prefill": self.prefill, "draft": self.draft, "verify": self.verify}


@dataclass(frozen=True)
class EngineStatus:
    """What an engine is busy with. waiting, running: request ids, oldest first. kv_pages_used: pages that running
    requests have; kv_pages_cached: pages that only the prefix cache keeps, as good as free. prefix_queries and
    prefix_hits: prompt tokens looked up in the prefix cache, and those found there."""

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    kv_pages_total: int
    kv_pages_used: int
    kv_pages_cached: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
