"""bench serve: its figures by hand, its record, and what it says when things go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_runtime.bench_serve import spread, summarize
from engine_runtime.bench_serve_client import Sample
from engine_runtime.cli import main
from tests.server.harness import Live

PROMPTS = [
    {"id": "a", "kind": "chat", "messages": [{"role": "user", "content": "hi"}]},
    {"id": "b", "kind": "text", "text": "def f("},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def test_figures_by_hand() -> None:
    cold = Sample("a", "x", 0, 0.0, first=0.2, whole=1.2, gaps=[0.5, 0.5], prompt_tokens=10, output_tokens=5, passes=2)
    warm = Sample("b", "x", 1, 0.0, first=0.1, whole=0.1, prompt_tokens=10, cached_tokens=8, output_tokens=1)
    lost = Sample("c", "x", 0, 0.0, whole=9.0, error="gone")
    found = summarize([cold, warm, lost], 2.0)
    assert (found["requests"], found["errors"], found["output_tokens"]) == (3, 1, 6)
    assert found["output_tokens_per_second"] == 3.0 and found["cached_tokens"] == 8
    assert found["tokens_per_pass"] == (6 - 2) / 2  # the first token of each comes from its prefill
    assert found["seconds_per_token"]["mean"] == pytest.approx(0.25)
    assert found["first_text_seconds_cold"]["mean"] == 0.2 and found["first_text_seconds_warm"]["max"] == 0.1
    assert spread([None]) is None and spread([1.0, 2.0, 3.0, 4.0])["p50"] == 3.0  # type: ignore[index]


def test_a_run_writes_a_record_that_runs_again(live: Live, prompts: Path, tmp_path: Path, capsys) -> None:
    live.engine.cached = 2
    record = tmp_path / "record.json"
    command = ["bench", "serve", live.url, "--prompts", str(prompts), "--repeat", "2", "--concurrency", "2"]
    assert main([*command, "--max-tokens", "9", "--json", str(record)]) == 0
    out = capsys.readouterr().out
    assert "4 requests" in out and "prefix cached" in out
    first = json.loads(record.read_text())
    assert first["summary"]["errors"] == 0 and first["server"]["engine"]["fingerprint"]
    assert [request.params.max_tokens for request in live.engine.requests] == [9] * 4
    assert {sample["id"] for sample in first["requests"]} == {"a", "b"}
    assert all(sample["prompt_tokens"] > 0 and sample["output_tokens"] > 0 for sample in first["requests"])
    assert any(name.startswith("k2_http_requests") for name in first["server_counters"])
    again = tmp_path / "again.json"
    assert main(["bench", "serve", live.url, "--replay", str(record), "--json", str(again)]) == 0
    second = json.loads(again.read_text())
    assert second["settings"] == first["settings"] and second["prompts_sha256"] == first["prompts_sha256"]
    hashes = [sorted((s["id"], s["sha256"]) for s in result["requests"]) for result in (first, second)]
    assert hashes[0] == hashes[1]


def test_open_loop_sends_everything(live: Live, prompts: Path) -> None:
    assert main(["bench", "serve", live.url, "--prompts", str(prompts), "--repeat", "3", "--rate", "200"]) == 0
    assert len(live.engine.requests) == 6


def test_errors_are_counted_and_told(live: Live, prompts: Path, capsys) -> None:
    live.engine.error, live.engine.finish = "the logits were not numbers", "error"
    assert main(["bench", "serve", live.url, "--prompts", str(prompts)]) == 1
    assert "2 errors" in (out := capsys.readouterr().out) and "not numbers" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--requests", "0"], "--requests: expected at least 1"),
        (["--rate", "0"], "--rate: expected requests a second"),
        (["--replay", "/nowhere"], "--replay /nowhere: not a record"),
        (["--prompts", "/nowhere"], "--prompts /nowhere: cannot be read"),
        ([], "no server answers there"),
    ],
)
def test_user_errors(capsys, options: list[str], sentence: str) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:9", *options]) == 1
    assert sentence in capsys.readouterr().err
