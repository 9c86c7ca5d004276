"""A short run of bench/chaos.py: clients that misbehave leave nothing behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from builder.cli import main
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft
from tests.server.vocabulary import NANO

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from chaos import run, served  # noqa: E402

SECONDS = 12.0
LIMITS = ["--max-context", "512", "--max-requests", "4", "--kv-tokens", "1024", "--verify-buckets", "4,16,64"]


def test_nothing_is_left_of_clients_that_misbehave(tmp_path: Path) -> None:
    """Long enough for queues, preemptions and clients that leave at every stage; on a random model."""
    config = make_tiny_checkpoint(tmp_path / "checkpoint", seed=1)
    make_tiny_draft(tmp_path / "draft", config, seed=2)
    template = (NANO / "chat_template.jinja").read_text()
    (tmp_path / "checkpoint" / "chat_template.jinja").write_text(template)
    arguments = [str(tmp_path / "checkpoint"), "--draft", str(tmp_path / "draft"), "-o", str(tmp_path / "engine")]
    assert main([*arguments, "--arch", "cpu", *LIMITS]) == 0
    with served(tmp_path / "engine", "--max-queue", "16") as (url, process):
        record = asyncio.run(run(url, process, 50, SECONDS))
    assert record["failures"] == [], record
    outcomes = record["outcomes"]
    assert outcomes["chat: 200"] and outcomes["stream: 200 whole"] and outcomes["leave_early: left"]
