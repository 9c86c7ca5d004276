"""The engine process: opens the engine, steps it while there is work, sleeps on its socket while there is none.

Started by `engine_client` as `python -m engine_runtime.server.engine_process DESCRIPTOR`. It is rank 0 and starts the
other ranks; all are one process group of their own. It ends when the socket is closed or the parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from engine_runtime.decoder import Event
from engine_runtime.engine import EngineError
from engine_runtime.generation import GenerationRequest
from engine_runtime.prefix_cache import PrefixMatch
from engine_runtime.ranks import RankError
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.wire import (
    Cancel,
    Channel,
    Command,
    Failed,
    Loading,
    Match,
    Matched,
    News,
    Open,
    Ready,
    Refused,
    Snapshot,
    Submit,
    decode_command,
    decode_open,
)
from engine_runtime.stats import DecodeStats, EngineStatus

HEARTBEAT_SECONDS = 1.0  # between signs of life of an idle engine
SNAPSHOT_SECONDS = 0.25  # between snapshots of a busy one
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Progress = Callable[[float, str], None]  # fraction of the load, what is being done


class StepLoop(Protocol):
    """What the engine process needs of `engine_runtime.runtime.Runtime`."""

    def submit(self, request: GenerationRequest) -> int: ...
    def step(self) -> list[Event]: ...
    def cancel(self, request: int) -> None: ...
    def match(self, prompt: Sequence[int]) -> PrefixMatch: ...
    def status(self) -> EngineStatus: ...
    @property
    def busy(self) -> bool: ...
    @property
    def stats(self) -> DecodeStats: ...
    def close(self) -> None: ...


class EngineLoop:
    """Carries out the commands of `channel` on `runtime` until the channel ends."""

    def __init__(self, runtime: StepLoop, channel: Channel) -> None:
        self._runtime = runtime
        self._channel = channel
        self._names: dict[int, int] = {}  # the runtime's request id -> the client's
        self._requests: dict[int, int] = {}  # and back
        self._snapshot_time = 0.0
        self._ranks = {process.sentinel: process.name for process in multiprocessing.active_children()}

    def run(self) -> None:
        """Returns when the other side closes; raises `RankError` where a rank dies, whatever a step raises else."""
        busy = True  # so that the first report carries a snapshot
        while True:
            dead = self._channel.wait(0.0 if self._runtime.busy else HEARTBEAT_SECONDS, list(self._ranks))
            if dead:
                raise RankError(f"{self._ranks[dead[0]]}: its process ended while no request was running")
            try:
                messages = self._channel.receive()
            except EOFError:
                return
            for message in messages:
                self._carry_out(decode_command(message))
            was_busy, busy = busy, self._runtime.busy
            self._report(self._runtime.step() if busy else [], was_busy)

    def _carry_out(self, command: Command) -> None:
        try:
            if isinstance(command, Submit):
                request = self._runtime.submit(command.request)
                self._names[request], self._requests[command.id] = command.id, request
            elif isinstance(command, Cancel):
                request = self._requests.pop(command.id, -1)
                if request >= 0:
                    del self._names[request]
                    self._runtime.cancel(request)
            elif isinstance(command, Match):
                found = [self._runtime.match(prompt) for prompt in command.prompts]
                self._channel.send(Matched(command.id, tuple((match.cached, match.common) for match in found)))
        except ValueError as error:
            self._channel.send(Refused(command.id, str(error)))

    def _report(self, events: list[Event], was_busy: bool) -> None:
        outputs = []
        for event in events:
            name = self._names.get(event.request)
            if name is None:
                continue
            outputs.append((name, event.output))
            if event.output.finish is not None:
                del self._names[event.request], self._requests[name]
        now = time.monotonic()
        due = now - self._snapshot_time >= SNAPSHOT_SECONDS
        if due or (was_busy and not self._runtime.busy):
            self._snapshot_time = now
            snapshot = Snapshot(self._runtime.status(), self._runtime.stats)
        else:
            snapshot = None
        self._channel.send(News(tuple(outputs), snapshot))


def warm_up(runtime: StepLoop) -> None:
    """Produce a token, so that ready means ready; raises `EngineError` where none comes."""
    request = runtime.submit(GenerationRequest((0,), SamplingParams(max_tokens=2)))
    while runtime.busy:
        for event in runtime.step():
            if event.request == request and event.output.finish == "error":
                raise EngineError(f"the engine's first token failed: {event.output.error}")


def serve(channel: Channel, open_runtime: Callable[[Progress], StepLoop]) -> int:
    """Open, warm up, run; returns the exit code. Why it failed is told to the other side, as permanent where the engine
    could not be opened."""
    runtime: StepLoop | None = None
    ready = False
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone: nobody to tell
            try:
                runtime = open_runtime(lambda fraction, stage: channel.send(Loading(fraction, stage)))
                channel.send(Loading(1.0, "producing a first token"))
                warm_up(runtime)
                channel.send(Ready())
                ready = True
                EngineLoop(runtime, channel).run()
                return 0
            except (EngineError, RankError) as error:
                channel.send(Failed(str(error).splitlines()[0], permanent=not ready))
            except Exception as error:
                traceback.print_exc()
                reason = f"the engine process failed with {type(error).__name__}, its traceback is in the log"
                channel.send(Failed(reason, permanent=not ready))
        return 1
    finally:
        if runtime is not None:
            runtime.close()


def _open_engine(message: Open, progress: Progress) -> StepLoop:
    from engine_runtime.runtime import Runtime

    return Runtime.open(message.artifact, threads=message.threads, progress=lambda part: progress(part, "reading"))


def connect(descriptor: int) -> Channel:
    """The channel over the inherited socket; makes this process end with its parent, and leaves signals that a whole
    process group gets to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be noticed
            sys.exit(1)
    return Channel(socket.socket(fileno=descriptor))


def receive_open(channel: Channel) -> Open:
    """The first message; exits where the parent is gone."""
    while True:
        channel.wait(HEARTBEAT_SECONDS)
        try:
            messages = channel.receive()
        except EOFError:
            sys.exit(1)
        if messages:
            return decode_open(messages[0])


def main() -> int:
    channel = connect(int(sys.argv[1]))
    message = receive_open(channel)
    return serve(channel, lambda progress: _open_engine(message, progress))


if __name__ == "__main__":
    sys.exit(main())
