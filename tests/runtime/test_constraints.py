"""The rules of a request against rules computed anew for every text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runtime import grammar as grammar_module
from engine_runtime.constraints import Rules, TooComplex, legal_rows, make_rules
from engine_runtime.generation import Constraint, GenerationRequest
from engine_runtime.grammar import GrammarError, Grammars
from engine_runtime.sampling import SamplingParams
from tests.runtime.oracle_rules import JSON, allowed_after, end, grammars, ids_of, think, tokenizer

LARK = 'start: item+ <[{marker}]> "!"?\nitem: "the " | /[0-9]{{1,3}}/ "," | "é" | "tree"'
VOCAB = 800  # larger than the tokenizer: 768


def constraints() -> dict[str, tuple[Constraint, int, tuple[int, ...]]]:
    """(constraint, min_tokens, stop ids) by name."""
    marker = tokenizer().special_id("<|tool_call_begin|>")
    lark = LARK.format(marker=marker)
    letter, digit = tokenizer().encode("e")[0], tokenizer().encode("1")[0]
    return {
        "json": (Constraint(JSON), 0, (end(),)),
        "lark": (Constraint(lark), 3, (end(), 500)),
        "after": (Constraint(lark, after=(think(), 65)), 2, (end(),)),
        "after, banned before": (Constraint(JSON, (think(),), (letter,), (end(), 70)), 0, (end(),)),
        "banned": (Constraint(banned=(3, letter)), 0, (end(),)),
        "banned before": (Constraint(after=(think(),), banned_before=(end(), 9)), 0, (end(),)),
        "min_tokens": (Constraint(), 4, (end(), digit)),
        "grammar, then a stop id of one's own": (Constraint(lark), 0, (7,)),
    }


def random_tree(rng: np.random.Generator, rules: tuple, text: list[int], size: int) -> tuple[list[int], list[int]]:
    """Tokens and parents below the last token of `text`; children are often, not always, allowed ones."""
    tokens, parents = [-1], [-1]
    texts: list[list[int] | None] = [list(text)]
    while len(tokens) < size:
        legal_parents = [row for row, path in enumerate(texts) if path is not None]
        parent = int(rng.choice(legal_parents) if rng.random() < 0.85 else rng.integers(0, len(tokens)))
        if texts[parent] is None:
            token = int(rng.integers(0, VOCAB))
        else:
            allowed = sorted(allowed_after(*rules, texts[parent], VOCAB))
            legal = allowed and rng.random() < 0.7
            token = int(rng.choice(allowed)) if legal else int(rng.integers(0, VOCAB))
        if token in [tokens[i] for i in range(len(tokens)) if parents[i] == parent]:
            continue
        follows = texts[parent] is not None and token in allowed_after(*rules, texts[parent], VOCAB)
        stops = token in rules[2]
        tokens.append(token)
        parents.append(parent)
        texts.append([*texts[parent], token] if follows and not stops else None)  # type: ignore[arg-type]
    return tokens, parents


def expected_rows(rules: tuple, text: list[int], tokens: list[int], parents: list[int]) -> dict[int, set[int]]:
    texts: dict[int, list[int]] = {0: text}
    for row in range(1, len(tokens)):
        before = texts.get(parents[row])
        if before is not None and tokens[row] in allowed_after(*rules, before, VOCAB) - set(rules[2]):
            texts[row] = [*before, tokens[row]]
    return {row: allowed_after(*rules, path, VOCAB) for row, path in texts.items()}


@pytest.mark.parametrize("name", constraints())
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_masks_of_a_tree_are_those_of_every_path(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = constraints()[name]
    constraint, min_tokens, stop_ids = case
    rules = Rules(constraint, min_tokens, stop_ids, VOCAB, grammars())
    text: list[int] = []
    for _ in range(6):
        tokens, parents = random_tree(rng, case, text, int(rng.integers(1, 14)))
        found = legal_rows(rules, tokens, parents)
        expected = expected_rows(case, text, tokens, parents)
        assert {row: ids_of(mask, VOCAB) for row, mask in found.items()} == expected
        again = legal_rows(rules, tokens, parents)  # the walk has left the rules where they were
        assert {row: ids_of(mask, VOCAB) for row, mask in again.items()} == expected
        path, row = [], 0
        while True:  # walk as `ddtree_accept` does
            choices = sorted(expected[row])
            if not choices:
                return
            inside = [child for child in expected if child and parents[child] == row]
            row_next = int(rng.choice(inside)) if inside and rng.random() < 0.7 else -1
            path.append(tokens[row_next] if row_next >= 0 else int(rng.choice(choices)))
            if row_next < 0 or path[-1] in stop_ids:
                break
            row = row_next
        if path[-1] in stop_ids:
            return
        rules.accept(path)
        text += path


def test_free_requests_have_no_rules() -> None:
    request = GenerationRequest((1,), SamplingParams(min_tokens=2), constraint=Constraint(after=(5,)))
    rules = make_rules(request, (end(),), VOCAB, None)
    assert rules is not None and rules.mask() is not None
    rules.accept([3, 4])
    assert rules.over and rules.mask() is None
    for free in (GenerationRequest((1,)), GenerationRequest((1,), constraint=Constraint(after=(5,)))):
        assert make_rules(free, (end(),), VOCAB, None) is None


def test_a_complete_grammar_allows_the_stop_ids_alone() -> None:
    rules = Rules(Constraint('start: "ab"'), 9, (end(), 11), VOCAB, grammars())
    assert all(b"ab".startswith(tokenizer().token_bytes(i)) for i in ids_of(rules.mask(), VOCAB))
    rules.accept(tokenizer().encode("ab"))
    assert ids_of(rules.mask(), VOCAB) == {end(), 11}  # whatever min_tokens says: nothing else is left


def test_special_tokens_are_matched_as_tokens_not_as_text() -> None:
    as_text = Rules(Constraint('start: "</think>"'), 0, (end(),), VOCAB, grammars())
    assert think() not in ids_of(as_text.mask(), VOCAB)
    as_token = Rules(Constraint(f"start: <[{think()}]>"), 0, (end(),), VOCAB, grammars())
    assert ids_of(as_token.mask(), VOCAB) == {think()}
    anything = ids_of(Rules(Constraint(r"start: /[\s\S]*/"), 0, (end(),), VOCAB, grammars()).mask(), VOCAB)
    assert {token for token in anything if token >= tokenizer().num_base_tokens} == {end()}


def test_a_grammar_that_gives_up_leaves_the_rules_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose mask takes too much work are pruned; the rest of the tree keeps its masks."""
    rng = np.random.default_rng(0)
    case = constraints()["lark"]
    rules = Rules(*case, VOCAB, grammars())
    text: list[int] = tokenizer().encode("the the ")
    rules.accept(text)
    tokens, parents = random_tree(rng, case, text, 30)
    expected = expected_rows(case, text, tokens, parents)
    failing = next(row for row in expected if row and any(parents[other] == row for other in expected))
    calls = iter(range(100))
    order = list(legal_rows(rules, tokens, parents))
    real = Rules._grammar_mask

    def fail_once(self: Rules, matcher: object) -> np.ndarray:
        if next(calls) == order.index(failing):
            self._renew()
            raise TooComplex
        return real(self, matcher)  # type: ignore[arg-type]

    monkeypatch.setattr(Rules, "_grammar_mask", fail_once)
    found = legal_rows(rules, tokens, parents)
    below = {failing}
    for row in range(len(tokens)):
        if parents[row] in below:
            below.add(row)
    assert {row: ids_of(mask, VOCAB) for row, mask in found.items()} == {
        row: mask for row, mask in expected.items() if row not in below
    }


def test_a_matcher_that_has_failed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuel of a single step runs out: `TooComplex`, not a crash, as often as it is asked for."""
    monkeypatch.setitem(grammar_module.LIMITS, "step_max_items", 60)
    own = Grammars(tokenizer)
    rules = Rules(Constraint('start: "x" a0\n' + _doubling(12)), 0, (end(),), VOCAB, own)
    assert rules.mask() is not None
    rules.accept(tokenizer().encode("x"))
    for _ in range(3):
        with pytest.raises(TooComplex):
            rules.mask()


def _doubling(depth: int) -> str:
    rules = [f"a{i}: a{i + 1} a{i + 1} | a{i + 1} a{i + 1} a{i + 1}" for i in range(depth)]
    return "\n".join([*rules, f'a{depth}: "y" | "yy"'])


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        (Constraint(after=(VOCAB,)), f"constraint: after: expected token ids from 0 to {VOCAB - 1}, found {VOCAB}"),
        (Constraint(banned=(-1,)), "constraint: banned: expected token ids"),
        (Constraint(banned_before=(True,)), "constraint: banned_before: expected token ids"),
        (Constraint(""), "grammar: expected a text of 1 to"),
        (Constraint("start: /(/"), "grammar: at 1.8.: invalid regex"),
    ],
)
def test_wrong_constraints(constraint: Constraint, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        make_rules(GenerationRequest((1,), constraint=constraint), (end(),), VOCAB, grammars())
    assert "\n" not in str(caught.value)


def test_grammars_need_a_tokenizer_and_an_end() -> None:
    request = GenerationRequest((1,), constraint=Constraint('start: "a"'))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        make_rules(request, (end(),), VOCAB, None)
    with pytest.raises(ValueError, match="needs at least one stop id"):
        make_rules(request, (), VOCAB, grammars())


def test_compiled_grammars_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Grammars(tokenizer)
    compiled: list[str] = []
    real = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, text: compiled.append(text) or real(self, text))
    monkeypatch.setattr(grammar_module, "CACHE_CHARS", 40)
    first, second, third = ('start: "%s"' % (letter * 5) for letter in "abc")
    for text in (first, second, first, third, first):
        own.start(text).consume_token(1)
    assert compiled == [first, second, third]
    own.check(second)  # the least recently used went
    assert compiled[-1] == second
    with pytest.raises(GrammarError):
        own.check("nonsense")
