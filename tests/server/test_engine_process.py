"""The engine process and its client: life, requests, death and return."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from engine_runtime.budget import PLAIN
from engine_runtime.decoder import Decoder
from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import EngineUnavailable
from engine_runtime.server.engine_client import EngineClient, EngineSettings
from engine_runtime.server.wire import Matched, Open
from tests.runtime.toy import ToyExecutor, toy_limits
from tests.server.toy_process import FAULTY_SEED

COMMAND = (sys.executable, "-m", "tests.server.toy_process")
SECONDS = 120.0  # for anything to happen on a busy machine


@asynccontextmanager
async def engine(**options: Any):
    """A client of a toy engine process; what is not a setting goes to the toy."""
    settings = {key: options.pop(key) for key in ("max_queue", "stall_seconds", "kill_seconds") if key in options}
    client = EngineClient(EngineSettings(Open(json.dumps(options)), slots=8, command=COMMAND, **settings))
    client.start()
    try:
        yield client
    finally:
        await client.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def state(client: EngineClient, name: str) -> None:
    await until(lambda: client.health().state == name)


def request(prompt: list[int], most: int | None = None, **params: Any) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), SamplingParams(max_tokens=most, stop_ids=(), **params))


async def tokens_of(client: EngineClient, asked: GenerationRequest) -> tuple[list[int], Output]:
    tokens: list[int] = []
    last = Output()
    async for output in client.generate(asked):
        tokens += output.tokens
        last = output
    return tokens, last


def expected(asked: GenerationRequest) -> list[int]:
    """What the same decoder says in this process, without speculation."""
    decoder = Decoder(ToyExecutor(toy_limits()))
    decoder.submit(GenerationRequest(asked.prompt, asked.params, PLAIN))
    tokens: list[int] = []
    while decoder.busy:
        for event in decoder.step():
            tokens += event.output.tokens
    return tokens


def processes(client: EngineClient) -> list[psutil.Process]:
    """The engine process and its ranks."""
    assert client.process_id is not None
    process = psutil.Process(client.process_id)
    return [process, *(p for p in process.children(recursive=True) if "spawn_main" in " ".join(p.cmdline()))]


def test_requests_queue_cancel_match_and_counts() -> None:
    async def test() -> None:
        async with engine(max_queue=2) as client:
            assert client.health().state == "loading"
            with pytest.raises(EngineUnavailable, match="takes no requests") as loading:
                await anext(client.generate(request([1])))
            assert loading.value.status == 503
            await state(client, "ready")
            # many at once, each as if it were alone
            asked = [request([3 + i, 5], 20 + i, seed=i, temperature=0.5) for i in range(10)]
            found = await asyncio.gather(*(tokens_of(client, one) for one in asked))
            assert [tokens for tokens, _ in found] == [expected(one) for one in asked]
            last = found[0][1]
            assert last.finish == "length" and last.usage is not None and last.timing is not None
            assert last.usage.prompt_tokens == 2 and last.usage.completion_tokens == 20 and last.timing.verify > 0
            # a request that the engine does not take
            with pytest.raises(ValueError, match="id from 0"):
                await tokens_of(client, request([10**6]))
            # the cache knows what was said
            long = request([1 + i % 40 for i in range(100)], 4)
            await tokens_of(client, long)
            (match,) = await client.match([long.prompt])
            assert match.cached == 96 and match.common >= 96
            with pytest.raises(ValueError, match="at least one token"):
                await client.match([[]])
            # an answer that comes when nobody waits for it any more
            asking = asyncio.ensure_future(client.match([long.prompt]))
            await asyncio.sleep(0)
            asking.cancel()
            client._take(Matched(max(client._matches), ((0, 0),)))
            # no more than slots and queue hold
            streams = [client.generate(request([1], 200)) for _ in range(10)]
            await asyncio.gather(*(anext(stream) for stream in streams[:8]))
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams[8:]]
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="queue is full") as full:
                await anext(client.generate(request([1])))
            assert full.value.status == 429 and full.value.retry_after > 0
            # closing cancels: all pages are free again
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            assert client.health().requests == 0
            await until(lambda: client.snapshot and not client.snapshot.status.running)
            status = client.snapshot.status
            assert not status.waiting and status.kv_pages_used == 0
            assert (await tokens_of(client, asked[0]))[0] == expected(asked[0])
            assert client.health().restarts == 0

    run(test)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("/no/such/program",), "cannot be started: No such file"),
        ((sys.executable, "-c", "import os, sys; os.write(int(sys.argv[1]), b'\\1\\0\\0\\0x')"), "cannot be read"),
        ((sys.executable, "-c", "import sys; sys.exit(5)"), "exit code 5"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), "killed by SIGKILL"),
    ],
)
def test_a_process_that_is_none_is_told_and_tried_again(command, reason) -> None:
    async def test() -> None:
        client = EngineClient(EngineSettings(Open(""), slots=1, command=command))
        client.start()
        await state(client, "failed")
        assert reason in (client.health().reason or "")
        await until(lambda: client.health().restarts == 1)
        await client.stop()
        assert client.health().state == "stopped"

    run(test)


def test_a_load_that_cannot_succeed_is_given_up_with_its_reason() -> None:
    async def test() -> None:
        async with engine(fail="rank0.engine: damaged: rebuild it") as client:
            assert await client.given_up == "rank0.engine: damaged: rebuild it"
            assert client.health().state == "failed" and "damaged" in (client.health().reason or "")

    run(test)


def test_a_fault_in_a_step_fails_what_runs_and_it_comes_back() -> None:
    async def test() -> None:
        async with engine() as client:
            await state(client, "ready")
            stream = client.generate(request([4, 2], 200))
            await anext(stream)
            with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
                await tokens_of(client, request([1], seed=FAULTY_SEED))
            assert "ZeroDivisionError" in ([output async for output in stream][-1].error or "")
            await state(client, "ready")
            assert client.health().restarts == 1

    run(test)


async def _killed_mid_stream(client: EngineClient, victim: Callable[[], psutil.Process]) -> None:
    """Kill a process while one request has tokens and one has none; both hear of it, and it all comes back."""
    asked = request([4, 2], 200)
    stream = client.generate(asked)
    await anext(stream)
    before = processes(client)
    victim().kill()
    rest = [output async for output in stream]
    assert rest[-1].finish == "error" and rest[-1].error
    assert client.health().state in ("failed", "loading") and client.health().reason
    with pytest.raises(EngineUnavailable):
        await anext(client.generate(asked))
    await state(client, "ready")
    short = request([4, 2], 10)
    assert (await tokens_of(client, short))[0] == expected(short)
    assert not [process for process in before if process.is_running() and process.status() != "zombie"]


def test_an_engine_or_a_rank_killed_mid_stream() -> None:
    async def test() -> None:
        async with engine(tp=2, slow=0.02) as client:
            await state(client, "ready")
            await _killed_mid_stream(client, lambda: processes(client)[1])
            await _killed_mid_stream(client, lambda: processes(client)[0])
            # while nothing runs it is noticed too
            processes(client)[1].kill()
            await state(client, "failed")
            assert "rank1" in (client.health().reason or "")

    run(test)


def test_a13_an_engine_that_hangs_is_not_ready_and_comes_back() -> None:
    """A stopped rank leaves the others waiting for it in a collective."""

    async def test() -> None:
        async with engine(tp=2, stall_seconds=2.5, kill_seconds=6.0) as client:
            await state(client, "ready")
            stopped = processes(client)[1]
            os.kill(stopped.pid, signal.SIGSTOP)
            hung = asyncio.ensure_future(tokens_of(client, request([4, 2], 200)))
            await state(client, "stalled")
            health = client.health()
            assert "not answered" in (health.reason or "") and (health.last_step_age_seconds or 0) > 2.5
            with pytest.raises(EngineUnavailable, match="not answered"):
                await anext(client.generate(request([1])))
            with pytest.raises(EngineUnavailable, match="was killed"):
                await hung
            await state(client, "ready")
            assert not stopped.is_running() or stopped.status() == "zombie"
            assert len((await tokens_of(client, request([4, 2], 10)))[0]) == 10

    run(test)


def test_drain_lets_requests_end_and_takes_no_more() -> None:
    async def test() -> None:
        async with engine(slow=0.01) as client:
            await state(client, "ready")
            stream = client.generate(request([4, 2], 30))
            await anext(stream)
            assert await client.drain(0.0) == 1  # out of time
            assert client.health().state == "draining"
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await anext(client.generate(request([1])))
            draining = asyncio.ensure_future(client.drain(SECONDS))
            assert [output async for output in stream][-1].finish == "length"
            assert await draining == 0

    run(test)


def test_what_has_not_ended_when_the_server_stops_hears_of_it() -> None:
    async def test() -> None:
        async with engine(slow=0.01) as client:
            await state(client, "ready")
            stream = client.generate(request([4, 2], 200))
            await anext(stream)
            asking = asyncio.ensure_future(client.match([[1]]))
            await asyncio.sleep(0)
            await client.stop()
            assert [output async for output in stream][-1].error == "the server was stopped"
            with contextlib.suppress(EngineUnavailable):  # it may have been answered before
                await asking
            with pytest.raises(EngineUnavailable, match="stopped"):
                await anext(client.generate(request([1])))

    run(test)


PARENT = """
import asyncio, sys
from engine_runtime.server.engine_client import EngineClient, EngineSettings
from engine_runtime.server.wire import Open
async def main():
    command = (sys.executable, "-m", "tests.server.toy_process")
    client = EngineClient(EngineSettings(Open('{"tp": 2}'), slots=8, command=command))
    client.start()
    while client.health().state != "ready":
        await asyncio.sleep(0.01)
    print(client.process_id, flush=True)
    await asyncio.Future()
asyncio.run(main())
"""


def test_no_process_outlives_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_process = psutil.Process(int(parent.stdout.readline()))
        family = [engine_process, *engine_process.children(recursive=True)]
        assert len(family) >= 2
        parent.kill()
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not [process for process in alive if process.status() != "zombie"]
