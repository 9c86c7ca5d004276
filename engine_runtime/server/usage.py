"""Usage and logprobs in the form of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from engine_runtime.generation import RequestTiming, RequestUsage, TokenLogprobs
from engine_runtime.server.contract import StepTrace
from engine_runtime.tokenizer import Tokenizer


def usage_json(
    prompts: Sequence[RequestUsage],
    choices: Sequence[RequestUsage],
    reasoning_tokens: int = 0,
    timings: Sequence[RequestTiming] | None = None,
) -> dict[str, Any]:
    """The usage of one response. prompts: of one choice for each prompt, choices: of all. timings: of all choices,
    where they were asked for."""
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in choices)
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    if timings is not None:
        value["timing"] = {
            **timing_json(timings),
            **{name: sum(getattr(usage, name) for usage in choices) for name in ("passes", "rows", "preemptions")},
            "accepted_draft_tokens": sum(usage.accepted for usage in choices),
        }
    return value


def timing_json(timings: Sequence[RequestTiming]) -> dict[str, float]:
    return {f"{part.name}_seconds": sum(getattr(t, part.name) for t in timings) for part in fields(RequestTiming)}


def trace_json(tokenizer: Tokenizer, step: StepTrace) -> dict[str, Any]:
    """One step's draft tree: `generation.TreeTrace`, with the texts of its tokens and the time of the turn so far."""
    tree = step.tree
    return {
        "tokens": tree.tokens,
        "texts": [tokenizer.decode([token]) for token in tree.tokens],
        "parents": tree.parents,
        "probabilities": tree.probabilities,
        "accepted": tree.accepted,
        "bonus": tree.bonus,
        "bonus_text": tokenizer.decode([tree.bonus]),
        "timing": timing_json([step.timing]),
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice."""
    return [
        {**_token(tokenizer, e.token, e.logprob), "top_logprobs": [_token(tokenizer, *pair) for pair in e.top]}
        for e in entries
    ]


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


class TextLogprobs:
    """`logprobs` of a text completion's choice, in pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream()
        self._offset = 0

    def json(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next `tokens`, with as many entries; None where there is none, as for the first token of a prompt."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push([token]))
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                None if entry is None else {self._text(token): _finite(value) for token, value in entry.top}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        """Two tokens never have the same name, though they may both be no text by themselves."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API says -9999.0."""
    return max(logprob, -9999.0)
