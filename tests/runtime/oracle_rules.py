"""The rules of a request computed anew for every text: what `engine_runtime.constraints` must agree with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from engine_runtime.generation import Constraint
from engine_runtime.grammar import Grammars, json_grammar
from engine_runtime.tokenizer import Tokenizer
from tests.checkpoints import tiny_config, write_config

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["engine", "tree", "plan"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "the", 3]}, "minItems": 1, "maxItems": 2},
        "done": {"type": "boolean"},
    },
    "required": ["name", "size", "tags", "done"],
    "additionalProperties": False,
}
JSON = json_grammar({**SCHEMA, "properties": dict(SCHEMA["properties"])})  # type: ignore[call-overload]


@cache
def tokenizer() -> Tokenizer:
    """512 base tokens, with merges, and 256 special ones."""
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), tiny_config())
        return Tokenizer.load(directory)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer)


END = "<|im_end|>"


def end() -> int:
    return tokenizer().special_id(END)


def think() -> int:
    return tokenizer().special_id("</think>")


def allowed_after(
    constraint: Constraint, min_tokens: int, stop_ids: Sequence[int], text: Sequence[int], vocab_size: int
) -> set[int]:
    """Ids that may follow the generated tokens `text`, of which none is a stop id."""
    begun = not constraint.after
    inside: list[int] = []
    for token in text:
        if begun:
            inside.append(token)
        elif token in constraint.after:
            begun = True
    allowed = set(range(vocab_size))
    if constraint.grammar is not None and begun:
        matcher = LLMatcher(grammars()._tokens, constraint.grammar, log_level=0)
        for token in inside:
            assert matcher.consume_token(token), matcher.get_error()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = set(np.flatnonzero(bits).tolist())
        if allowed & tokenizer().stop_ids:  # llguidance's way to say that the text may end
            allowed = (allowed - tokenizer().stop_ids) | set(stop_ids)
    allowed -= set(constraint.banned)
    if not begun:
        allowed -= set(constraint.banned_before)
    if len(text) < min_tokens and allowed - set(stop_ids):
        allowed -= set(stop_ids)
    return allowed


def ids_of(mask: np.ndarray | None, vocab_size: int) -> set[int]:
    """The ids that a mask of `Rules.mask` allows; fails for bits beyond the vocabulary."""
    if mask is None:
        return set(range(vocab_size))
    ids = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert not ids or max(ids) < vocab_size
    return ids
