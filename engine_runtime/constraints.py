"""What may follow a text: the rules of one request, as masks over the vocabulary.

A mask is a function of the text alone, so it does not depend on the draft tree in which a token is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine_runtime.generation import Constraint, GenerationRequest
from engine_runtime.grammar import Grammars

if TYPE_CHECKING:
    from llguidance import LLMatcher


class TooComplex(Exception):
    """Within its limits the grammar cannot say what may follow."""


def make_rules(
    given: GenerationRequest, stop_ids: Sequence[int], vocab_size: int, grammars: Grammars | None
) -> Rules | None:
    """The rules of a new request, None where everything may follow. Raises ValueError for a constraint that is wrong,
    `GrammarError` among them."""
    constraint = given.constraint or Constraint()
    for name in ("after", "banned", "banned_before"):
        for token in getattr(constraint, name):
            if type(token) is not int or not 0 <= token < vocab_size:
                expected = f"token ids from 0 to {vocab_size - 1}"
                raise ValueError(f"constraint: {name}: expected {expected}, found {str(token)[:80]}")
    if constraint.grammar is not None:
        if grammars is None:
            raise ValueError("constraint: a grammar needs a tokenizer, this engine was opened without one")
        if not stop_ids:
            raise ValueError("constraint: a grammar needs at least one stop id, else its text could not end")
    rules = Rules(constraint, given.params.min_tokens, stop_ids, vocab_size, grammars)
    return None if rules.over else rules


class Rules:
    """Where one request stands in its rules. `accept` moves it along its text, `push` and `pop` along a tree behind
    it."""

    def __init__(
        self,
        constraint: Constraint,
        min_tokens: int,
        stop_ids: Sequence[int],
        vocab_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.stop_ids = frozenset(stop_ids)
        self._constraint = constraint
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._missing = min_tokens  # tokens before a stop id may come
        self._started = not constraint.after
        self._eaten: list[int] = []  # tokens that the grammar was given
        self._trail: list[tuple[bool, bool]] = []  # of each token pushed: was the grammar started, has it eaten it
        self._lost = False
        self._free = self._ids(range(vocab_size)) & ~self._ids(constraint.banned)
        self._free_before = self._free & ~self._ids(constraint.banned_before)
        self._stops = self._ids(stop_ids)
        self._matcher: LLMatcher | None = None
        if constraint.grammar is not None and grammars is not None:
            self._matcher = grammars.start(constraint.grammar)
            self._ends = self._ids(grammars.tokenizer.stop_ids)

    @property
    def over(self) -> bool:
        """Whether everything may follow, now and later."""
        return self._matcher is None and self._missing <= 0 and not self._bans

    @property
    def _bans(self) -> bool:
        return bool(self._constraint.banned or (not self._started and self._constraint.banned_before))

    def mask(self) -> np.ndarray | None:
        """uint32 [words]: bit t % 32 of word t // 32 says whether token t may follow; None: every token may.

        Stop ids are no part of a grammar: they may follow where its text may end. Raises `TooComplex`.
        """
        mask = self._free if self._started else self._free_before
        if self._started and self._matcher is not None:
            mask = mask & self._grammar_mask(self._matcher)
        elif self._missing <= 0 and not self._bans:
            return None
        if self._missing > 0:
            longer = mask & ~self._stops
            return longer if longer.any() else mask
        return mask

    def push(self, token: int) -> bool:
        """Go on with `token`, which the mask allows; False, where nothing has changed, if that takes too much work."""
        eats = self._started and self._matcher is not None
        if eats and not self._eat(token):
            return False
        self._trail.append((self._started, eats))
        self._started = self._started or token in self._constraint.after
        self._missing -= 1
        return True

    def pop(self) -> None:
        """Take back the last token pushed."""
        self._started, ate = self._trail.pop()
        self._missing += 1
        if ate and self._matcher is not None:
            self._eaten.pop()
            if not self._matcher.rollback(1):
                self._renew()

    def accept(self, tokens: Iterable[int]) -> None:
        """Go on with `tokens` of the text for good; a stop id ends it."""
        for token in tokens:
            if token in self.stop_ids:
                break
            self._lost = self._lost or not self.push(token)
        self._trail.clear()

    # ---- the grammar ----

    def _grammar_mask(self, matcher: LLMatcher) -> np.ndarray:
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if self._lost or matcher.is_error():
            self._renew()
            raise TooComplex
        mask = np.zeros_like(self._free)  # ids that the tokenizer does not have are never allowed
        size = min(len(mask), len(allowed))
        mask[:size] = allowed[:size]
        if matcher.is_accepting():
            mask = mask & ~self._ends | self._stops
        return mask

    def _eat(self, token: int) -> bool:
        if self._matcher is None or not self._matcher.consume_token(token):
            self._renew()
            return False
        self._eaten.append(token)
        return True

    def _renew(self) -> None:
        """A new matcher at the same place: one that has failed stays failed."""
        if self._grammars is None or self._constraint.grammar is None:
            return
        self._matcher = self._grammars.start(self._constraint.grammar)
        self._matcher.consume_tokens(self._eaten)

    def _ids(self, ids: Iterable[int]) -> np.ndarray:
        """uint32 [words] with the bits of those `ids` that the vocabulary has."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        known = np.fromiter(ids, np.int64)
        bits[known[known < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


def allows(mask: np.ndarray | None, token: int) -> bool:
    """Whether token `token` is in the mask of `Rules.mask`."""
    return mask is None or bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def legal_rows(rules: Rules, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, np.ndarray | None]:
    """The rows of a tree that the rules allow, with the mask of each: what may follow it.

    tokens, parents: of its rows, row 0 being the root, whose token the rules have accepted; a parent comes before its
    children. A row that is not allowed goes with all that is below it, and so does a stop id: nothing follows it.
    Raises `TooComplex` where that holds of the root.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for row, parent in enumerate(parents):
        if row:
            children[parent].append(row)
    legal: dict[int, np.ndarray | None] = {0: rules.mask()}

    def visit(row: int) -> None:
        for child in children[row]:
            token = tokens[child]
            if token in rules.stop_ids or not allows(legal[row], token) or not rules.push(token):
                continue
            try:
                legal[child] = rules.mask()
                visit(child)
            except TooComplex:  # as a text of its own it would end with an error: let it be the next root
                legal.pop(child, None)
            rules.pop()

    visit(0)
    return legal
