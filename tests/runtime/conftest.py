"""What several tests of the runtime need."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.build import build, make_plans, open_source
from builder.options import BuildOptions
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft


@pytest.fixture(scope="session")
def engine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CPU engine of a tiny random checkpoint and drafter, one rank."""
    base = tmp_path_factory.mktemp("engine")
    for name in ("checkpoint", "draft"):
        (base / name).mkdir()
    make_tiny_draft(base / "draft", make_tiny_checkpoint(base / "checkpoint", seed=3), seed=4)
    options = BuildOptions(arch="cpu", max_context=192, max_requests=4, page_size=16, verify_buckets=(1, 4, 16))
    source = open_source(base / "checkpoint", base / "draft", options, lambda message: None)
    plans = make_plans(source, options, lambda message: None)
    build(source, options, plans, base / "engine", lambda message: None, lambda *progress: None)
    return base / "engine"
