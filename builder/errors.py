"""Errors of the builder. A message is one sentence: what, where, expected, found, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN_PROBLEMS = 8


class BuildError(Exception):
    """A build that cannot go on."""


class CheckpointError(BuildError):
    """A checkpoint that cannot be used.

    `problems` has every finding, one sentence each; the message has the first few, one a line.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = list(problems[:SHOWN_PROBLEMS])
        if len(problems) > SHOWN_PROBLEMS:
            lines.append(f"... and {len(problems) - SHOWN_PROBLEMS} more problems")
        super().__init__("\n".join(lines))


def some(names: Sequence[str], limit: int = 3) -> str:
    """ "a, b, c and 4 more", for messages."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
