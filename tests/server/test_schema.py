"""Requests made up from the server's own OpenAPI schema, with none left out: no 500, and every answer as declared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.harness import live_server

CONFIG = Path(__file__).with_name("schemathesis.toml")
EXAMPLES = 5  # random ones of each operation, beside the thousands that go to every bound


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    with live_server() as live:
        command = [str(program), "--config-file", str(CONFIG), "run", f"{live.url}/openapi.json", "--no-color"]
        command += ["--checks", "all", "--max-examples", str(EXAMPLES), "--generation-deterministic"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert live.client.get("/ready").status_code == 200
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
