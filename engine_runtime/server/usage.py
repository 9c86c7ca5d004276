"""Usage and logprobs in the form of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_runtime.generation import RequestTiming, RequestUsage, TokenLogprobs
from engine_runtime.server.contract import StepTrace
from engine_runtime.tokenizer import Tokenizer


def usage_json(
    usages: Sequence[RequestUsage], reasoning_tokens: int = 0, timings: Sequence[RequestTiming] | None = None
) -> dict[str, Any]:
    """The usage of all choices of one request, which share a prompt. timings: of each, where they were asked for."""
    prompt = usages[0].prompt_tokens
    completion = sum(usage.completion_tokens for usage in usages)
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
    if timings is not None:
        passes = sum(usage.passes for usage in usages)
        value["timing"] = {
            **timing_json(timings),
            "passes": passes,
            "rows": sum(usage.rows for usage in usages),
            "accepted_draft_tokens": sum(usage.accepted for usage in usages),
            "preemptions": sum(usage.preemptions for usage in usages),
        }
    return value


def timing_json(timings: Sequence[RequestTiming]) -> dict[str, float]:
    return {f"{part}_seconds": sum(getattr(t, part) for t in timings) for part in RequestTiming.__annotations__}


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
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}
