"""The engine process as the HTTP process sees it: starting it, requests and their outputs, its health, its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.prefix_cache import PrefixMatch
from engine_runtime.server.contract import EngineUnavailable
from engine_runtime.server.wire import (
    Cancel,
    Failed,
    Loading,
    Match,
    Matched,
    News,
    Open,
    Ready,
    Refused,
    Report,
    Snapshot,
    Submit,
    decode_report,
    frame,
    read_frame,
)

COMMAND = (sys.executable, "-m", "engine_runtime.server.engine_process")
LOAD_TIMEOUT = 1800.0  # seconds without any news, after which a load is given up
_RESTART_SECONDS = (0.5, 30.0)  # first and longest pause before a restart; doubled each time it fails
_GRACE_SECONDS = 5.0  # for the process to end by itself when its socket is closed
_CHECK_SECONDS = 1.0  # between looks of the watchdog

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """open: which engine. slots: requests that run at once. max_queue: further ones that may wait. stall_seconds:
    silence after which the engine is reported as stalled. kill_seconds: silence after which it is killed and started
    anew. command: of the engine process, without its last argument, the socket's descriptor."""

    open: Open
    slots: int
    max_queue: int = 64
    stall_seconds: float = 10.0
    kill_seconds: float = 60.0
    command: Sequence[str] = COMMAND


@dataclass(frozen=True)
class Health:
    """state: "loading", "ready", "stalled", "failed" (about to be restarted), "draining" or "stopped". reason: of
    everything but "ready". progress: of the load, 0 to 1. last_step_age_seconds: since the step loop last said
    anything (an idle one does so every second); None before it is loaded."""

    state: str
    reason: str | None
    progress: float
    last_step_age_seconds: float | None
    requests: int
    restarts: int


class EngineClient:
    """`contract.Engine` over one engine process, which is started anew when it dies or hangs.

    All methods are for the event loop's thread.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.snapshot: Snapshot | None = None
        self.restarts = 0
        self._state = "loading"
        self._reason: str | None = "the engine is starting"
        self._progress = 0.0
        self._heard = time.monotonic()
        self._draining = False
        self._ids = itertools.count()
        self._streams: dict[int, asyncio.Queue[Output | Exception]] = {}
        self._matches: dict[int, asyncio.Future[tuple[tuple[int, int], ...]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set, with the reason, when the first load failed for good."""

    # ---- requests ----

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """See `contract.Engine`. An engine that fails before the first token raises `EngineUnavailable`; after it, the
        last output has finish "error"."""
        self._check_available()
        limit = self.settings.slots + self.settings.max_queue
        if len(self._streams) >= limit:
            raise EngineUnavailable(f"the queue is full: {limit} requests are running or waiting, try again later", 429)
        name = next(self._ids)
        queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._streams[name] = queue
        self._idle.clear()
        self._send(Submit(name, request))
        started = False
        try:
            while True:
                news = await queue.get()
                if isinstance(news, EngineUnavailable) and started:
                    news = Output(finish="error", error=str(news))
                if isinstance(news, Exception):
                    raise news
                started = True
                yield news
                if news.finish is not None:
                    return
        finally:
            if self._streams.pop(name, None) is not None:
                self._send(Cancel(name))
            if not self._streams:
                self._idle.set()

    async def match(self, prompts: Sequence[Sequence[int]]) -> list[PrefixMatch]:
        """What requests with these prompts would find in the prefix cache. Raises as `generate` does."""
        self._check_available()
        name = next(self._ids)
        future: asyncio.Future[tuple[tuple[int, int], ...]] = asyncio.get_running_loop().create_future()
        self._matches[name] = future
        self._send(Match(name, tuple(tuple(prompt) for prompt in prompts)))
        try:
            return [PrefixMatch(*match) for match in await future]
        finally:
            self._matches.pop(name, None)

    def _check_available(self) -> None:
        health = self.health()
        if health.state != "ready":
            raise EngineUnavailable(f"the engine takes no requests: {health.reason}")

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    # ---- health ----

    def health(self) -> Health:
        """As of now."""
        age = None if self._state == "loading" else time.monotonic() - self._heard
        state, reason = self._state, self._reason
        if state == "ready" and age is not None and age > self.settings.stall_seconds:
            state, reason = "stalled", f"the engine has not answered for {age:.1f} seconds"
        elif state == "ready" and self._draining:
            state, reason = "draining", "the server is shutting down"
        return Health(state, reason, self._progress, age, len(self._streams), self.restarts)

    # ---- the process ----

    @property
    def process_id(self) -> int | None:
        """Of the engine process, which is also the number of its process group; None before there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the engine process and keep it running until `stop`."""
        self._task = asyncio.create_task(self._supervise())

    async def drain(self, timeout: float) -> int:
        """Take no more requests and wait until those running have ended, at most `timeout` seconds; how many have
        not."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return len(self._streams)

    async def stop(self) -> None:
        """End the engine process; requests that are still running fail."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._state, self._reason = "stopped", "the server was stopped"
        self._fail_all("the server was stopped")

    async def _supervise(self) -> None:
        pause, longest = _RESTART_SECONDS
        loaded = False
        while True:
            try:
                failure = await self._run_process()
            except OSError as error:
                failure = Failed(f"the engine process cannot be started: {error.strerror}")
            loaded_now, loaded = self._state == "ready", loaded or self._state == "ready"
            self._state, self._reason = "failed", failure.reason
            self._fail_all(failure.reason)
            _log.error("engine failed: %s", failure.reason)
            if failure.permanent and not loaded:
                self.given_up.set_result(failure.reason)
                return
            pause = _RESTART_SECONDS[0] if loaded_now else min(2 * pause, longest)
            await asyncio.sleep(pause)
            self.restarts += 1
            _log.warning("engine is started anew")

    async def _run_process(self) -> Failed:
        """One life of the engine process; gives why it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *self.settings.command,
                str(descriptor),
                pass_fds=[descriptor],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        self._process = process
        self._state, self._reason, self._progress = "loading", "the engine is starting", 0.0
        self._heard = time.monotonic()
        watchdog: asyncio.Task[str] | None = None
        failure: Failed | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._send(self.settings.open)
            watchdog = asyncio.create_task(self._watch(process))
            try:
                while failure is None:
                    failure = self._take(decode_report(await read_frame(reader)))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # it ended; how, its exit code tells
            except msgspec.DecodeError as error:
                failure = Failed(f"the engine process sent a message that cannot be read: {error}")
        finally:
            hung = watchdog.result() if watchdog is not None and watchdog.done() else None
            if watchdog is not None:
                watchdog.cancel()
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            code = await _end(process)
        if failure is not None:
            return failure
        return Failed(hung or f"the engine process ended ({_describe(code)})")

    def _take(self, report: Report) -> Failed | None:
        """Note what the engine process says; gives its last words."""
        self._heard = time.monotonic()
        if isinstance(report, News):
            self.snapshot = report.snapshot or self.snapshot
            for name, output in report.outputs:
                self._deliver(name, output, last=output.finish is not None)
        elif isinstance(report, Refused):
            self._settle(report.id, ValueError(report.message))
            self._deliver(report.id, ValueError(report.message), last=True)
        elif isinstance(report, Matched):
            self._settle(report.id, report.matches)
        elif isinstance(report, Loading):
            self._progress, self._reason = report.fraction, f"the engine is {report.stage} ({report.fraction:.0%})"
        elif isinstance(report, Ready):
            self._state, self._reason, self._progress = "ready", None, 1.0
            _log.info("engine is ready")
        else:
            return report
        return None

    def _deliver(self, name: int, news: Output | Exception, last: bool) -> None:
        queue = self._streams.pop(name, None) if last else self._streams.get(name)
        if queue is not None:
            queue.put_nowait(news)
        if not self._streams:
            self._idle.set()

    def _settle(self, name: int, answer: tuple[tuple[int, int], ...] | Exception) -> None:
        """Give the query `name` its answer, unless whoever asked has left."""
        future = self._matches.get(name)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _fail_all(self, reason: str) -> None:
        for name in list(self._streams):
            self._deliver(name, EngineUnavailable(reason), last=True)
        for name in list(self._matches):
            self._settle(name, EngineUnavailable(reason))

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Kill the process when it has been silent for too long; gives what to say about it."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            limit = LOAD_TIMEOUT if self._state == "loading" else self.settings.kill_seconds
            silent = time.monotonic() - self._heard
            if silent > limit:
                _kill(process)
                return f"the engine process did not answer for {silent:.0f} seconds and was killed"


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its ranks, stopped ones as well."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> int:
    """Wait for the process, whose socket was closed, and see to it that its ranks end too; gives its exit code."""
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        _kill(process)
    return await process.wait()


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
