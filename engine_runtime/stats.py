"""What decoding did: passes, tokens, acceptance by depth, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DecodeStats:
    """Counts of one request, or of all together.

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
        for name in ("offered", "reached", "accepted"):
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
        for name, depth in (("offered", offered), ("reached", reached), ("accepted", accepted)):
            counts = getattr(self, name)
            for index in range(depth):
                counts[index] += 1

    def to_json(self) -> dict[str, Any]:
        names = ("prompt_tokens", "generated_tokens", "passes", "tokens", "rows", "drafted_passes")
        value = {name: getattr(self, name) for name in names}
        value |= {name: list(getattr(self, name)) for name in ("offered", "reached", "accepted")}
        return {**value, "tokens_per_pass": round(self.tokens_per_pass, 4)}


@dataclass
class TimeSplit:
    """Seconds spent in the passes of each part of decoding; draft includes the tree and the drafter's context."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)

    def to_json(self) -> dict[str, float]:
        return {"prefill": self.prefill, "draft": self.draft, "verify": self.verify}
