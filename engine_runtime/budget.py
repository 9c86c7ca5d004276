"""How many tree nodes a decode step spends: fixed, or from the engine's own measured cost of a step.

The choice of the node count itself is made on device by `ddtree_build`, from the `tree_budget`, `tree_cost`,
`calibration` and `tree_width` buffers that are filled here.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plugins.core.state import Limits

MODES = ("off", "chain", "tree")


@dataclass(frozen=True)
class Speculation:
    """How one request drafts. mode: "off" (plain decoding), "chain" (the drafter's first choice at each
    depth) or "tree" (DDTree). budget: exactly this many nodes beside the root (as far as candidates and
    room allow); None lets the measured cost of a step decide, or takes as many nodes as the draft is deep
    where no costs are known."""

    mode: str = "tree"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"speculation mode: expected one of {', '.join(MODES)}, found {self.mode!r}")
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            raise ValueError(f"tree budget: expected an integer of at least 0, found {self.budget!r}")


PLAIN = Speculation("off")


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of the passes of one engine.

    rows: verify buckets, ascending. contexts: committed tokens a request, ascending. verify[i][j]: seconds
    of a verify pass of rows[j] at contexts[i]. draft: seconds of a draft pass by number of blocks, append
    of its context included.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: dict[int, float]

    def __post_init__(self) -> None:
        for name in ("rows", "contexts"):
            values = getattr(self, name)
            if not values or any(a >= b for a, b in zip(values, values[1:], strict=False)):
                raise ValueError(f"cost table: {name}: expected ascending numbers, found {list(values)}")
        shape = [len(line) for line in self.verify]
        if shape != [len(self.rows)] * len(self.contexts):
            expected = f"{len(self.contexts)} lines of {len(self.rows)}"
            raise ValueError(f"cost table: verify: expected {expected} numbers, found lines of {shape}")
        seconds = [*(s for line in self.verify for s in line), *self.draft.values()]
        if not all(0 < s < float("inf") for s in seconds) or not self.draft:
            raise ValueError("cost table: expected every time to be a positive number of seconds, and a draft time")

    def verify_seconds(self, rows: int, context: float) -> float:
        """Of a pass that fits `rows`: the bucket that runs, between contexts by linear interpolation.

        More rows than the largest bucket cost as many such passes as they fill.
        """
        column = bisect.bisect_left(self.rows, rows)
        factor = 1.0
        if column == len(self.rows):
            column -= 1
            factor = rows / self.rows[-1]
        return factor * float(np.interp(context, self.contexts, [line[column] for line in self.verify]))

    def draft_seconds(self, blocks: int) -> float:
        buckets = sorted(self.draft)
        return self.draft[buckets[min(bisect.bisect_left(buckets, blocks), len(buckets) - 1)]]

    def tree_costs(self, requests: int, drafts: int, context: float, nodes: int) -> np.ndarray:
        """float32 [nodes]: seconds of a step in which each of `drafts` trees has n nodes, n = 0 .. nodes - 1.

        The other `requests - drafts` bring their root only. All trees being of equal size is an
        approximation: the sum over requests that it stands for has its optimum at the same n when the trees
        are alike.
        """
        draft = self.draft_seconds(drafts)
        seconds = [draft + self.verify_seconds(requests + drafts * n, context) for n in range(nodes)]
        return np.asarray(seconds, np.float32)

    def to_json(self) -> dict[str, Any]:
        verify = [list(line) for line in self.verify]
        draft = {str(blocks): seconds for blocks, seconds in self.draft.items()}
        return {"rows": list(self.rows), "contexts": list(self.contexts), "verify": verify, "draft": draft}

    @staticmethod
    def from_json(value: dict[str, Any]) -> CostTable:
        """Inverse of `to_json`; raises ValueError with what is wrong."""
        try:
            rows, contexts = (tuple(int(n) for n in value[name]) for name in ("rows", "contexts"))
            verify = tuple(tuple(float(s) for s in line) for line in value["verify"])
            draft = {int(blocks): float(seconds) for blocks, seconds in value["draft"].items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"cost table: expected rows, contexts, verify and draft, found {error}") from None
        return CostTable(rows, contexts, verify, draft)

    @staticmethod
    def load(path: str | Path) -> CostTable:
        """The table in the JSON file `path`; raises ValueError naming the file."""
        try:
            return CostTable.from_json(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


@dataclass
class Calibration:
    """Running factor per depth on the drafter's probabilities: how often a depth was accepted when it was
    reached, over how often the drafter said it would be.

    Raw drafter probabilities are over-confident deep in the block (docs/operators.md, `ddtree_build`).
    Counts decay with `decay` per observation and start with `prior` observations that say "as predicted".
    The factor never exceeds 1: path probabilities must not rise with depth, or a child could outrank its
    parent.
    """

    depth: int
    prior: float = 16.0
    decay: float = 0.99
    floor: float = 0.05
    hits: np.ndarray = field(init=False)
    mass: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.hits = np.zeros(self.depth)
        self.mass = np.zeros(self.depth)

    def observe(self, depth: int, predicted: float, accepted: bool) -> None:
        """A walk was offered nodes at `depth` (from 1) of total uncalibrated probability `predicted`."""
        index = depth - 1
        self.hits[index] = self.decay * self.hits[index] + accepted
        self.mass[index] = self.decay * self.mass[index] + predicted

    def factors(self) -> np.ndarray:
        """float32 [depth], in [floor, 1]."""
        ratio = (self.hits + self.prior) / (self.mass + self.prior)
        return np.clip(ratio, self.floor, 1.0).astype(np.float32)


@dataclass
class Gain:
    """Whether drafting pays for one request: tokens a drafted pass against the seconds that it and a plain
    pass take.

    While it does not pay, one pass in `PROBE` is drafted all the same, so that a change is noticed: a probe
    costs at most about its own draft and rows, so decoding stays within about 2 % of plain.
    """

    PROBE = 64
    WARM_UP = 8
    SMOOTHING = 0.1

    tokens: float = 0.0
    observed: int = 0
    pause: int = 0

    def observe(self, tokens: int) -> None:
        self.observed += 1
        weight = max(self.SMOOTHING, 1 / self.observed)
        self.tokens += weight * (tokens - self.tokens)

    def drafts(self, plain_seconds: float, drafted_seconds: float) -> bool:
        """Whether the next pass should be drafted; counts the passes that were not."""
        if self.observed < self.WARM_UP or self.tokens * plain_seconds >= drafted_seconds:
            return True
        self.pause += 1
        if self.pause < self.PROBE:
            return False
        self.pause = 0
        return True


@dataclass
class TreeBudget:
    """The speculation state of one request slot."""

    limits: Limits
    speculation: Speculation
    costs: CostTable | None
    calibrate: bool
    calibration: Calibration = field(init=False)
    gain: Gain = field(default_factory=Gain)

    def __post_init__(self) -> None:
        self.calibration = Calibration(max(1, self.limits.draft_depth))
        self._rows = 1.0

    @property
    def adaptive(self) -> bool:
        """Whether the cost rule chooses the node count."""
        return self.costs is not None and self.speculation.budget is None

    @property
    def width(self) -> int:
        """For `tree_width`: candidates a depth, 0 for all."""
        return 1 if self.speculation.mode == "chain" else 0

    @property
    def most(self) -> int:
        """Most nodes that this request may use in a step."""
        depth = self.limits.draft_depth
        if self.speculation.mode == "off" or depth == 0:
            return 0
        nodes = self.speculation.budget
        if nodes is None:
            nodes = self.limits.max_rows - 1 if self.adaptive else depth
        if self.speculation.mode == "chain":
            nodes = min(nodes, depth)
        return min(nodes, self.limits.max_rows - 1)

    @property
    def factors(self) -> np.ndarray:
        """For `calibration`: float32 [depth]; ones unless calibrated probabilities are wanted."""
        if self.calibrate or self.adaptive:
            return self.calibration.factors()
        return np.ones(self.calibration.depth, np.float32)

    def wants_draft(self, requests: int, context: float) -> bool:
        """Whether drafting this request is worth it in a step over `requests` requests."""
        if self.most == 0:
            return False
        if self.costs is None or not self.adaptive:
            return True
        plain = self.costs.verify_seconds(requests, context)
        rows = round(requests * self._rows)
        return self.gain.drafts(plain, self.costs.draft_seconds(requests) + self.costs.verify_seconds(rows, context))

    def observe(self, tree: TreeResult) -> None:
        """Learn from a drafted pass that did not end the request."""
        self.gain.observe(tree.accepted + 1)
        self._rows += self.gain.SMOOTHING * (tree.rows - self._rows)
        factors = self.factors  # those that this tree was built with
        for depth, mass in enumerate(tree.mass, start=1):
            raw = min(1.0, mass / float(factors[depth - 1]))
            self.calibration.observe(depth, raw, depth <= tree.accepted)


@dataclass(frozen=True)
class TreeResult:
    """What became of one tree. rows: root included. depth: its deepest node. accepted: depth of the
    accepted path. mass[d]: for each depth d + 1 that the walk was offered, the calibrated probability of
    all the nodes offered."""

    rows: int
    depth: int
    accepted: int
    mass: tuple[float, ...]

    @staticmethod
    def read(parents: np.ndarray, log_weights: np.ndarray, path: Sequence[int], first: int) -> TreeResult:
        """parents i32 [n] (row numbers), log_weights f32 [n] of one request's rows, which start at row
        `first`; path: its accepted rows from the root on."""
        depth = np.zeros(len(parents), np.int32)
        for row in range(1, len(parents)):
            depth[row] = depth[parents[row] - first] + 1
        mass = []
        for row in path:
            children = parents == row
            if not children.any():
                break
            mass.append(float(np.exp(log_weights[children] - log_weights[row - first]).sum()))
        return TreeResult(len(parents), int(depth.max()), len(path) - 1, tuple(mass))
