"""Clients that misbehave: afterwards nothing may be left of them.

    python bench/chaos.py [--seconds 300] [--clients 50] [--engine DIR] [--output FILE]

Starts a server on the engine (default: K2-Nano, built for the purpose with few slots) and lets many clients at once
send good, huge, broken and half requests, read slowly, stall, and leave in the middle. Afterwards a quiet server must
hold no request, no page outside the prefix cache and no more file descriptors than before, and its memory must not
have grown while it was busy. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine_runtime.bench import commit  # noqa: E402
from engine_runtime.doctor import cpu_model  # noqa: E402

READY_SECONDS = 180.0
QUIET_SECONDS = 60.0  # for a server without clients to have ended everything
MAX_GROWTH = 48 << 20  # bytes of resident memory, between the first quarter and the end
WORDS = ["def", "return", "the", "weather", "in", "Zürich", "中文", "file", "list", "{json}", "42", "why"]


def build_engine(directory: Path) -> Path:
    """K2-Nano with few slots and pages, so that requests queue and are preempted."""
    nano = ROOT / "artifacts" / "k2-nano"
    limits = ["--max-context", "512", "--max-requests", "4", "--kv-tokens", "1024"]
    sources = [str(nano / "checkpoint"), "--draft", str(nano / "draft")]
    command = [sys.executable, str(ROOT / "build.py"), *sources, "-o", str(directory), "--arch", "cpu", *limits]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


@contextlib.contextmanager
def served(engine: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server on `engine`: its address, once it is ready, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "engine_runtime", "serve", str(engine), "--port", str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server on {engine} did not become ready (exit code {process.poll()})")
            time.sleep(0.2)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False


# ---- clients ----


class Clients:
    """What one client after another does. `counts`: (behaviour, outcome) -> how often."""

    def __init__(self, url: str, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._url = url
        self._host, self._port = url.removeprefix("http://").split(":")
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self._behaviours: list[Callable[[], Coroutine[Any, Any, str]]] = [
            self.chat,
            self.chat,
            self.stream,
            self.stream,
            self.leave_early,
            self.leave_early,
            self.leave_at_once,
            self.several,
            self.constrained,
            self.slow_reader,
            self.half_request,
            self.broken,
            self.too_long,
        ]

    async def run(self, clients: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        async with self._client:
            await asyncio.gather(*(self._client_loop(deadline) for _ in range(clients)))

    async def _client_loop(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            behaviour = self._rng.choice(self._behaviours)
            try:
                outcome = await behaviour()
            except (httpx.HTTPError, OSError, asyncio.IncompleteReadError) as error:
                outcome = type(error).__name__
            self.counts[f"{behaviour.__name__}: {outcome}"] += 1
            await asyncio.sleep(self._rng.random() * 0.2)

    def _body(self, **more: Any) -> dict[str, Any]:
        text = " ".join(self._rng.choice(WORDS) for _ in range(self._rng.randrange(1, 120)))
        return {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._rng.randrange(1, 60),
            "temperature": self._rng.choice([0, 1]),
            **more,
        }

    async def chat(self) -> str:
        reply = await self._client.post("/v1/chat/completions", json=self._body())
        return str(reply.status_code)

    async def stream(self) -> str:
        async with self._client.stream("POST", "/v1/chat/completions", json=self._body(stream=True)) as reply:
            last = ""
            async for line in reply.aiter_lines():
                last = line or last
            return f"{reply.status_code} {'whole' if last == 'data: [DONE]' else 'refused'}"

    async def leave_early(self) -> str:
        pieces = self._rng.randrange(1, 8)
        body = self._body(stream=True, max_tokens=200)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                pieces -= 1
                if pieces == 0:
                    break
        return "left"

    async def leave_at_once(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.random() * 0.05):
                await self._client.post("/v1/chat/completions", json=self._body(max_tokens=200))
        return "left"

    async def several(self) -> str:
        reply = await self._client.post("/v1/completions", json={"prompt": "def f(", "n": 3, "max_tokens": 8})
        return str(reply.status_code)

    async def constrained(self) -> str:
        reply = await self._client.post(
            "/v1/chat/completions", json=self._body(response_format={"type": "json_object"}, max_tokens=40)
        )
        return str(reply.status_code)

    async def slow_reader(self) -> str:
        async with self._client.stream("POST", "/v1/chat/completions", json=self._body(stream=True)) as reply:
            async for _ in reply.aiter_lines():
                await asyncio.sleep(0.05)
        return "read"

    async def half_request(self) -> str:
        """Promises a body and leaves before it is whole."""
        _, writer = await asyncio.open_connection(self._host, int(self._port))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n"
        writer.write(head + self._rng.choice([b"", b"\r\n", b'\r\n{"messages": [']))
        await writer.drain()
        await asyncio.sleep(self._rng.random() * 2)
        writer.close()
        return "left"

    async def broken(self) -> str:
        content = self._rng.choice([b"{", b"null", b'{"messages": 5}', b"\xff\xfe", b'{"max_tokens": -186}'])
        headers = {"Content-Type": "application/json"}
        reply = await self._client.post("/v1/chat/completions", content=content, headers=headers)
        return str(reply.status_code)

    async def too_long(self) -> str:
        body = {"messages": [{"role": "user", "content": "word " * 5000}]}
        reply = await self._client.post("/v1/chat/completions", json=body)
        return str(reply.status_code)


# ---- what is left ----


def left_behind(url: str) -> dict[str, float]:
    """Requests and pages that the server holds, from its metrics and its health."""
    values: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        for key in ("k2_requests_running", "k2_requests_waiting", "k2_kv_usage_ratio"):
            if name.startswith(key + "{"):
                values[key] = float(value)
    values["health_requests"] = float(httpx.get(f"{url}/health").json()["requests"])
    return values


def resident(process: psutil.Process) -> int:
    """Bytes of the server and of the engine's processes."""
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


async def run(url: str, process: psutil.Process, clients: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Let them loose; gives the record, with the sentences of what went wrong under "failures"."""
    crowd = Clients(url, seed)
    descriptors, pids = process.num_fds(), {child.pid for child in process.children(recursive=True)}
    busy = asyncio.create_task(crowd.run(clients, seconds))
    memory = []
    while not busy.done():
        await asyncio.wait({busy}, timeout=seconds / 40)
        memory.append(resident(process))
    await busy
    deadline = time.monotonic() + QUIET_SECONDS
    while any((left := left_behind(url)).values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    quarter = max(memory[: len(memory) // 4 + 1])
    growth = max(memory[-len(memory) // 4 :]) - quarter
    failures = [f"{name} is {value:g}, expected 0" for name, value in left.items() if value]
    if process.num_fds() > descriptors + 2:
        failures.append(f"{process.num_fds()} file descriptors are open, {descriptors} were before")
    if {child.pid for child in process.children(recursive=True)} != pids:
        failures.append("the engine process is not the one that it was")
    if growth > MAX_GROWTH:
        failures.append(f"memory grew by {growth / 1e6:.0f} MB after the first quarter")
    wrong = {what: count for what, count in crowd.counts.items() if ": 5" in what and not what.endswith(": 503")}
    if wrong:
        failures.append(f"answers of 500 and more: {wrong}")
    return {
        "device": cpu_model(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "clients": clients,
        "seconds": seconds,
        "outcomes": dict(sorted(crowd.counts.items())),
        "left_behind": left,
        "memory_mb": [round(value / 1e6) for value in (memory[0], quarter, memory[-1])],
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        engine = args.engine or build_engine(Path(scratch) / "engine")
        with served(engine, "--max-queue", "64") as (url, process):
            record = asyncio.run(run(url, process, args.clients, args.seconds))
    text = json.dumps(record, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
