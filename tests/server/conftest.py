"""One live server for the tests of a module; its engine is as new for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import Live, ScriptedEngine, live_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Live]:
    with live_server() as live:
        yield live


@pytest.fixture
def live(shared_server: Live) -> Live:
    """The shared server with its engine reset; for tests that need no options of their own."""
    shared_server.engine.__dict__.update(ScriptedEngine().__dict__)
    return shared_server
