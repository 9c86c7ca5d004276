"""Packing streams: its memory does not follow the size of the checkpoint (a full layer: bench/build_throughput.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "build_throughput.py"


def test_peak_memory_of_packing_real_layer_shapes(tmp_path: Path) -> None:
    """48 of K2.6's experts, 1.2 GB: a builder that held them would show."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH), "--experts", "48", "--scratch", str(tmp_path), "--output", str(report)]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    found = json.loads(report.read_text())
    assert found["bytes"] > 1.1e9
    assert found["pack_peak_rss_mb"] < 600
