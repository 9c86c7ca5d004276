"""One measured request to a server that speaks the completions APIs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Sample:
    """One request. Times are seconds since it was sent; first: to the first text, gaps: between pieces of text after
    that, whole: to the end. Token counts and passes are the server's own (0 where it does not tell)."""

    id: str
    kind: str
    repeat: int
    start: float
    first: float | None = None
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    passes: int = 0
    accepted: int = 0
    finish: str | None = None
    sha256: str = ""
    error: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Between tokens after the first; None for an answer of one token, which has no such time."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.whole - self.first) / (self.output_tokens - 1)


def body_of(prompt: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of the request for a line of a prompt file."""
    common = {**options, "stream": True, "stream_options": {"include_usage": True}, "timing": True}
    if "text" in prompt:
        return "/v1/completions", {**common, "prompt": prompt["text"]}
    tools = {"tools": prompt["tools"]} if prompt.get("tools") else {}
    return "/v1/chat/completions", {**common, "messages": prompt["messages"], **tools}


async def measure(
    client: httpx.AsyncClient, prompt: Mapping[str, Any], options: Mapping[str, Any], sample: Sample
) -> Sample:
    """Send one request and fill `sample`; what goes wrong becomes its `error`."""
    path, body = body_of(prompt, options)
    clock: Callable[[], float] = time.perf_counter
    begin = clock()
    digest = hashlib.sha256()
    latest = None
    try:
        async with client.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise ValueError(f"HTTP {reply.status_code}: {reply.text[:200]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"].get("message", "the server sent an error"))
                text = _text(chunk)
                if text:
                    now = clock() - begin
                    if latest is None:
                        sample.first = now
                    else:
                        sample.gaps.append(now - latest)
                    latest = now
                    digest.update(text.encode())
                _note(sample, chunk)
    except (httpx.HTTPError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.whole = clock() - begin
    sample.sha256 = digest.hexdigest()
    return sample


def _text(chunk: Mapping[str, Any]) -> str:
    """Everything that the model wrote in this chunk."""
    text = ""
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("reasoning_content") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _note(sample: Sample, chunk: Mapping[str, Any]) -> None:
    for choice in chunk.get("choices", ()):
        sample.finish = choice.get("finish_reason") or sample.finish
    usage = chunk.get("usage")
    if not usage:
        return
    sample.prompt_tokens = usage["prompt_tokens"]
    sample.output_tokens = usage["completion_tokens"]
    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    timing = usage.get("timing") or {}
    sample.passes, sample.accepted = timing.get("passes", 0), timing.get("accepted_draft_tokens", 0)
