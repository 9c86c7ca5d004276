"""A short run of bench/chaos.py: clients that misbehave leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.chaos import run, served
from builder.cli import main
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft
