"""Grammars over token ids: compiled within hard limits, so that none can stall or crash who compiles it.

Usable wherever there is a tokenizer: the engine compiles what it decodes with, a server checks a request first. Two
processes come to the same verdict, since nothing here depends on the clock.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARS = 1 << 19
MAX_DEPTH = 64
CACHE_CHARS = 1 << 19  # of the grammars kept compiled; one takes some 400 bytes a character
BLANKS = r"[ \n\r\t]{0,16}"
"""Between the tokens of JSON: a model that may go on printing blanks forever sometimes does."""
LIMITS: dict[str, Any] = {
    "max_grammar_size": 40_000,  # symbols; compiling takes up to a second at the limit
    "initial_lexer_fuel": 1_000_000,
    "max_items_in_row": 2_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,  # of one request; 1 to 2 kB each
    "verbose_errors": False,
}


class GrammarError(ValueError):
    """A grammar that is not one, or takes more than the limits allow; the message is one sentence."""


class Grammars:
    """Grammars over the tokens of one tokenizer, which is loaded when the first is needed.

    The ids that end a text are no part of a grammar: a matcher allows the tokenizer's own where the text may end.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._load()

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokens: Any = _Vocabulary(self.tokenizer)
        return LLTokenizer(tokens, eos_token=sorted(self.tokenizer.stop_ids))

    def start(self, grammar: str) -> LLMatcher:
        """A matcher at the start of `grammar`, llguidance's Lark or JSON form. Raises `GrammarError`."""
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = self._compile(grammar)
                while sum(map(len, self._compiled)) > CACHE_CHARS and len(self._compiled) > 1:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    def check(self, grammar: str) -> None:
        """Raises `GrammarError` where `start` would."""
        self.start(grammar)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if not isinstance(grammar, str) or not 0 < len(grammar) <= MAX_CHARS:
            found = f"{len(grammar)}" if isinstance(grammar, str) else type(grammar).__name__
            raise GrammarError(f"grammar: expected a text of 1 to {MAX_CHARS} characters, found {found}")
        matcher = LLMatcher(self._tokens, grammar, limits=LLParserLimits(**LIMITS), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some mistakes show only now
        if matcher.is_error():
            empty = matcher.stop_reason().startswith("NoExtension")
            raise GrammarError("grammar: no text matches it" if empty else f"grammar: {_sentence(matcher.get_error())}")
        return matcher


class _Vocabulary:
    """A tokenizer in the form that `LLTokenizer` takes. Special tokens match by id, never as text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = list(range(tokenizer.num_base_tokens, tokenizer.vocab_size))

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)


def json_grammar(schema: Any) -> str:
    """The grammar of JSON texts that follow `schema`, a JSON schema as Python values, with blanks capped.

    Raises `GrammarError` for a schema that is no object, too large or too deep; compiling may still refuse it.
    """
    if not isinstance(schema, Mapping):
        raise GrammarError(f"JSON schema: expected an object, found {type(schema).__name__}")
    if _deeper_than(schema, MAX_DEPTH):
        raise GrammarError(f"JSON schema: expected at most {MAX_DEPTH} nested levels, found more")
    grammar = {"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_pattern": BLANKS}}}]}
    text = json.dumps(grammar, ensure_ascii=False)
    if len(text) > MAX_CHARS:
        raise GrammarError(f"JSON schema: expected at most {MAX_CHARS} characters, found {len(text)}")
    return text


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        inner = [item for item in level if isinstance(item, Mapping | list | tuple)]
        if not inner:
            return False
        level = [part for item in inner for part in (item.values() if isinstance(item, Mapping) else item)]
    return True


def _sentence(message: str) -> str:
    """The first line of llguidance's `message`."""
    line = next((line for line in message.splitlines() if line.strip()), "it cannot be compiled")
    return re.sub(r"\s+", " ", line).strip()[:300]
