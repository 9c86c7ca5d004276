"""Prompt files of the benchmarks: JSON lines with "id", "kind" and either "text" or "messages" (and "tools")."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from engine_runtime.cli import CommandError

DEFAULT_PROMPTS = Path(__file__).resolve().parent.parent / "artifacts" / "k2-nano" / "heldout" / "prompts.jsonl"


def read_prompt_file(path: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` prompts, taken from the kinds in turn so that each has its share. Raises `CommandError`."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompts {path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            by_kind[value["kind"]].append(value)
            if not isinstance(value.get("text", value.get("messages")), str | list):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            expected = '{"id": .., "kind": .., "text" or "messages": ..}'
            raise CommandError(f"--prompts {path} line {number}: expected {expected}") from None
    if not by_kind:
        raise CommandError(f"--prompts {path}: no prompts in it")
    longest = max(map(len, by_kind.values()))
    in_turn = [values[i] for i in range(longest) for values in by_kind.values() if i < len(values)]
    return in_turn[:count]
