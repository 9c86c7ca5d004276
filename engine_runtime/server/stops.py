"""Where an answer ends: stop strings, in a text that arrives in pieces, and stop ids."""

from __future__ import annotations

from collections.abc import Sequence

from engine_runtime.generation import Output, TokenLogprobs
from engine_runtime.sampling import SamplingParams


class StopStrings:
    """Lets text through until the first of `stops` is complete; no part of one is let through, however the text is cut.

    Of several stops the one that ends first counts, of those that end together the longest; so the result depends on
    the text alone. include: let that stop through as well.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that can be let through now. After a stop was found, nothing is."""
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self._include else start]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text ends here: what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def split_stop(
    output: Output, params: SamplingParams, eos_ids: Sequence[int], include: bool
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None, int | None]:
    """Tokens and logprobs of `output` without an id that ended the text, and that id if the request had asked for it
    (the model's own ends, `eos_ids`, are nobody's business). include: leave an id that was asked for in."""
    tokens, logprobs = output.tokens, output.logprobs
    if output.finish != "stop" or not tokens:
        return tokens, logprobs, None
    last = tokens[-1]
    asked = last not in eos_ids and last in (params.stop_ids or ())
    if not (asked and include):
        tokens, logprobs = tokens[:-1], None if logprobs is None else logprobs[:-1]
    return tokens, logprobs, last if asked else None
