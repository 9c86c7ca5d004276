"""Streams that are slow, that are left, that are stopped."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

from engine_runtime.server import sse
from tests.server.harness import Live, events_of, ids

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}


class Steps:
    """Lets the engine go one step at a time."""

    def __init__(self, live: Live) -> None:
        self._loop = live.loop
        self._allowed = asyncio.Semaphore(0)
        self.reached: list[int] = []

    async def __call__(self, step: int) -> None:
        self.reached.append(step)
        await self._allowed.acquire()

    def allow(self, count: int = 1) -> None:
        for _ in range(count):
            self._loop.call_soon_threadsafe(self._allowed.release)


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


def test_a_long_prefill_is_bridged_with_comments(live, monkeypatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.05)
    steps = Steps(live)
    live.engine.before = steps
    with live.client.stream("POST", CHAT, json={**HI, "stream": True}) as response:
        lines = response.iter_lines()
        assert response.status_code == 200  # before the first token
        assert next(lines) == ": ping"
        steps.allow(100)
        text = "\n".join(lines)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events_of(text)) == "Hello, world!"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a10_generation_ends_when_the_client_leaves(live, path, begun, streamed) -> None:
    steps = Steps(live)
    live.engine.before = steps
    if begun:
        steps.allow(2)
    body = {**(HI if path == CHAT else {"prompt": "x"}), "stream": streamed}

    def ask() -> None:
        with httpx.Client(base_url=live.url) as client, pytest.raises(httpx.TimeoutException):
            client.post(path, json=body, timeout=httpx.Timeout(30, read=0.5))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: len(steps.reached) == (3 if begun else 1))
    thread.join()
    wait_for(lambda: live.engine.closed == [0])
    assert len(steps.reached) == (3 if begun else 1)  # not one step more
    assert 'finished_reason="abort"' in live.client.get("/metrics").text
    live.engine.before = None
    assert live.post(CHAT, HI).json()["choices"][0]["message"]["content"] == "Hello, world!"


def test_a_client_that_stops_reading_is_given_up(live, monkeypatch) -> None:
    monkeypatch.setattr(sse, "SEND_SECONDS", 0.2)
    live.engine.tokens = ids("word " * 4000)[:4000]
    body = {**HI, "stream": True, "logprobs": True, "top_logprobs": 20}  # more than sockets buffer
    with live.client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        wait_for(lambda: live.engine.closed == [0])


@pytest.mark.parametrize("group", [1, 2, 5, 16])
def test_stop_strings_never_show(live, group) -> None:
    live.engine.say("Answer: 42\n\nHuman: more", group)
    body = {**HI, "stop": ["\n\nHuman", "zzz"]}
    choice = live.post(CHAT, body).json()["choices"][0]
    assert choice["message"]["content"] == "Answer: 42" and choice["stop_reason"] == "\n\nHuman"
    assert choice["finish_reason"] == "stop"
    chunks = events_of(live.post(CHAT, {**body, "stream": True, "logprobs": True}))
    deltas = [chunk["choices"][0] for chunk in chunks]
    shown = ""
    for delta in deltas:
        shown += delta["delta"].get("content") or ""
        assert "Answer: 42".startswith(shown)
    assert shown == "Answer: 42"
    assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["stop"]
    included = live.post(CHAT, {**body, "include_stop_str_in_output": True}).json()["choices"][0]
    assert included["message"]["content"] == "Answer: 42\n\nHuman"


def test_stop_strings_do_not_count_in_reasoning(live) -> None:
    live.engine.say("a STOP b</think>c STOP d")
    body = {"messages": HI["messages"], "stop": "STOP"}
    message = live.post(CHAT, body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "a STOP b" and message["content"] == "c "


def test_text_that_only_looks_like_a_stop_is_shown_at_the_end(live) -> None:
    live.engine.say("almost STO")
    choice = live.post(CHAT, {**HI, "stop": "STOP", "logprobs": True}).json()["choices"][0]
    assert choice["message"]["content"] == "almost STO" and choice["stop_reason"] is None
    assert len(choice["logprobs"]["content"]) == len(ids("almost STO"))


def test_a18_long_texts_do_not_block_the_loop(live) -> None:
    """A million spaces, tokenised, while the server goes on answering."""
    text = " " * 500_000 + "x" * 300_000
    gaps: list[float] = []
    done = threading.Event()

    async def watch() -> None:
        last = time.monotonic()
        while not done.is_set():
            await asyncio.sleep(0.002)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    future = asyncio.run_coroutine_threadsafe(watch(), live.loop)
    start = time.monotonic()
    response = live.post(CHAT, {"messages": [{"role": "user", "content": text}]})
    took = time.monotonic() - start
    counted = live.post("/tokenize", {"prompt": text}).json()["count"]
    done.set()
    future.result(30)
    assert counted > 1000
    if counted > 4096:
        assert response.status_code == 400 and "do not fit" in response.json()["error"]["message"]
    assert max(gaps) < max(0.1, took / 2), (max(gaps), took)
