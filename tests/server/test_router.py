"""Behind a router that others wrote: two servers, one of which is away for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.server.harness import MODEL, events_of, live_server

pytest.importorskip("sglang_router")
SECONDS = 120.0
BODY = {"model": MODEL.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def router(*workers: str) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--health-check-interval-secs", "1", "--prometheus-port", str(free_port())]
    process = subprocess.Popen(
        [*command, "--worker-urls", *workers],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_servers_behind_sglangs_router() -> None:
    with live_server() as first, live_server() as second, router(first.url, second.url) as client:
        until(lambda: client.post("/v1/chat/completions", json=BODY).status_code == 200)
        first.engine.requests.clear()
        second.engine.requests.clear()
        for _ in range(4):
            stream = client.post("/v1/chat/completions", json={**BODY, "stream": True})
            chunks = events_of(stream)
            text = "".join(chunk["choices"][0]["delta"].get("reasoning_content") or "" for chunk in chunks)
            assert text == "Hello, world!" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert len(first.engine.requests) == len(second.engine.requests) == 2
        # a server that is not ready gets nothing, and comes back when it is
        first.engine.state = "loading"
        until(lambda: httpx.get(f"{first.url}/health").status_code == 503)
        first.engine.requests.clear()

        def only_the_second() -> bool:
            before = len(first.engine.requests)
            answers = [client.post("/v1/chat/completions", json=BODY).status_code for _ in range(4)]
            return answers == [200] * 4 and len(first.engine.requests) == before

        until(only_the_second)
        first.engine.state = "ready"
        first.engine.requests.clear()
        until(lambda: client.post("/v1/chat/completions", json=BODY).status_code == 200 and bool(first.engine.requests))
