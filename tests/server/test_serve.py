"""`python -m engine_runtime serve` on a real engine of two ranks: the whole way, and how it begins and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from builder.cli import main as build
from engine_runtime.cli import main
from engine_runtime.generation import GenerationRequest
from engine_runtime.runtime import Runtime
from engine_runtime.sampling import SamplingParams
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft
from tests.server.harness import TEMPLATE_SOURCE, events_of

SECONDS = 120.0  # for anything to happen on a busy machine
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("serve")
    make_tiny_draft(base / "draft", make_tiny_checkpoint(base / "checkpoint", seed=5), seed=6, num_key_value_heads=4)
    (base / "checkpoint" / "chat_template.jinja").write_text(TEMPLATE_SOURCE)
    options = ["--arch", "cpu", "--tp", "2", "--max-context", "512", "--max-requests", "4"]
    checkpoint, draft = str(base / "checkpoint"), str(base / "draft")
    assert build([checkpoint, "--draft", draft, "-o", str(base / "engine"), *options]) == 0
    return base / "engine"


@dataclass
class Served:
    process: subprocess.Popen[str]
    client: httpx.Client
    log: list[dict[str, Any]]

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, f"{what}: {self.log[-5:]}"
            time.sleep(0.02)

    def health(self) -> tuple[int, dict[str, Any]]:
        response = self.client.get("/health/ready")
        return response.status_code, response.json()

    def wait_until(self, state: str) -> None:
        self.wait_for(lambda: self.health()[1]["state"] == state, state)

    def engine_processes(self) -> list[psutil.Process]:
        """Rank 0 and the others."""
        (engine,) = psutil.Process(self.process.pid).children()
        return [engine, *(p for p in engine.children() if "spawn_main" in " ".join(p.cmdline()))]


@contextlib.contextmanager
def serve(artifact: Path, *options: str) -> Iterator[Served]:
    """A server process on a port of its own choice; killed at the end if it still runs."""
    command = [sys.executable, "-m", "engine_runtime", "serve", str(artifact), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log = [json.loads(process.stderr.readline())]
    lines = process.stderr
    threading.Thread(target=lambda: log.extend(map(json.loads, lines)), daemon=True).start()
    host, port = log[0]["address"]
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=SECONDS) as client:
            yield Served(process, client, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(artifact: Path) -> Iterator[Served]:
    with serve(artifact, "--stall-timeout", "2.5", "--kill-timeout", "60", "--temperature", "0") as server:
        status, health = server.health()
        assert status == 503 and health["state"] == "loading" and 0 <= health["progress"] <= 1
        assert server.client.get("/health/live").status_code == 200
        refused = server.client.post("/v1/chat/completions", json=HI)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        server.wait_until("ready")
        yield server


def test_text_is_the_runtimes_own(served, artifact) -> None:
    prompt = list(range(40, 175))
    with Runtime.open(artifact) as runtime:
        (expected,) = runtime.generate([GenerationRequest(tuple(prompt), SamplingParams(max_tokens=24, stop_ids=()))])
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    for _ in range(2):  # the second time from the cache
        answer = served.client.post("/v1/completions", json=body).json()
        assert tuple(answer["choices"][0]["token_ids"]) == expected.tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    chunks = events_of(served.client.post("/v1/completions", json={**body, "stream": True}))
    assert tuple(t for chunk in chunks for t in chunk["choices"][0]["token_ids"]) == expected.tokens
    explained = served.client.post("/v1/cache/explain", json={"prompt": prompt}).json()
    assert explained["cached_tokens"] == 128 and explained["tokens_in_common_with_cache"] >= 128


def test_chat_metrics_and_version(served, artifact) -> None:
    answer = served.client.post("/v1/chat/completions", json={**HI, "max_tokens": 30, "timing": True}).json()
    timing = answer["usage"]["timing"]
    assert answer["usage"]["completion_tokens"] <= 30
    assert timing["passes"] > 0 and timing["verify_seconds"] > 0 and timing["prefill_seconds"] > 0
    engine = served.client.get("/version").json()["engine"]
    assert engine["tp"] == 2 and len(engine["fingerprint"]) == 64
    served.wait_for(lambda: "k2_drafted_passes_total" in served.client.get("/metrics").text, "a snapshot")
    values = dict(line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines() if line[0] != "#")
    model = f'{{model_name="{artifact.name}"}}'
    assert float(values[f"k2_engine_ready{model}"]) == 1
    for ours, theirs in (
        ("k2_drafted_passes_total", "vllm:spec_decode_num_drafts_total"),
        ("k2_drafted_nodes_total", "vllm:spec_decode_num_draft_tokens_total"),
        ("k2_accepted_nodes_total", "vllm:spec_decode_num_accepted_tokens_total"),
        ("k2_requests_running", "vllm:num_requests_running"),
        ("k2_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
    ):
        assert values[ours + model] == values[theirs + model]
    assert float(values[f"vllm:time_to_first_token_seconds_count{model}"]) >= 1


def test_a13_a_stopped_engine_process_is_not_ready(served) -> None:
    engine = served.engine_processes()[0]
    os.kill(engine.pid, signal.SIGSTOP)
    served.wait_until("stalled")
    status, health = served.health()
    assert status == 503 and health["last_step_age_seconds"] > 2.5 and health["reason"]
    os.kill(engine.pid, signal.SIGCONT)
    served.wait_until("ready")


def test_a_rank_killed_mid_stream_fails_the_stream_and_comes_back(served) -> None:
    body = {"prompt": "once", "max_tokens": 450, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        served.engine_processes()[1].kill()
        rest = "\n".join([first, *lines])
    *chunks, last = events_of(rest)
    assert "rank" in last["error"]["message"]
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert served.health()[0] == 503
    served.wait_until("ready")
    assert served.health()[1]["restarts"] == 1
    answer = served.client.post("/v1/completions", json={"prompt": "once", "max_tokens": 5, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_a17_idle_takes_no_processor(served) -> None:
    family = [psutil.Process(served.process.pid), *served.engine_processes()]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    time.sleep(1)
    before = used()
    time.sleep(4)
    assert used() - before <= 0.02 * 4 + 0.02  # the clock's tick is 10 ms


def test_a15_sigterm_lets_streams_end(artifact) -> None:
    with serve(artifact) as server:
        server.wait_until("ready")
        family = server.engine_processes()
        body = {"prompt": "once", "max_tokens": 120, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=server.client.base_url, timeout=SECONDS) as other:
                server.wait_for(lambda: other.get("/ready").json()["state"] == "draining", "draining")
                assert other.get("/ready").status_code == 503
                assert other.post("/v1/completions", json=body).status_code == 503
            chunks = events_of("\n".join([first, *lines]))
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
        assert server.process.wait(SECONDS) == 0
        _, alive = psutil.wait_procs(family, timeout=SECONDS)
        assert not alive


def test_sigterm_while_loading_ends_it(artifact) -> None:
    with serve(artifact) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0
        _, alive = psutil.wait_procs(family, timeout=SECONDS)
        assert not alive


def test_a14_a_port_that_is_taken_ends_it_at_once() -> None:
    """Before the artifact is even looked at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "engine_runtime", "serve", "/no/such/artifact", "--port", port]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert said.startswith(f"error: 127.0.0.1:{port}: cannot listen") and len(said.splitlines()) == 1
    assert usage.ru_utime + usage.ru_stime < 1.0  # seconds of processor time, whatever else this machine does


def test_an_engine_that_cannot_be_loaded_ends_it_with_one_sentence(artifact, tmp_path) -> None:
    assert main(["serve", str(tmp_path)]) == 1
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in artifact.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = bytearray((broken / "rank0.weights").read_bytes())
    weights[-1] ^= 1
    (broken / "rank0.weights").write_bytes(weights)
    command = [sys.executable, "-m", "engine_runtime", "serve", str(broken), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert "rank0.weights: damaged" in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1][:6] == "error:"
