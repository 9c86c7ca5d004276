"""Tensor-parallel ranks on one machine: one process each, the caller's process being rank 0.

Every rank holds the same kind of object (a decoder). Calls on it are mirrored: the parent sends the call to
the workers, makes it itself, then collects their acknowledgements. The ranks meet in the collectives of the
plan, over what they make of their `Rendezvous`. A worker that fails or dies makes the parent's call fail with
`RankError`; nothing waits longer than `timeout` seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

DEFAULT_TIMEOUT = 300.0  # seconds
_START_SECONDS = 120.0  # for a worker's interpreter and imports
_SHUTDOWN_SECONDS = 5.0

# makes a rank's object; must be importable by name, since the workers are spawned
Factory = Callable[..., Any]


class RankError(RuntimeError):
    """A rank failed; the message names the rank and what it said. The group is closed."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet: a file that does not exist yet, for at most `timeout` seconds."""

    rank: int
    world: int
    store: str
    timeout: float


def _worker(
    rank: int,
    world: int,
    store: str,
    timeout: float,
    pipe: Connection,
    factory: Factory,
    args: tuple[Any, ...],
) -> None:
    """A worker's life: make the object, then answer calls until the parent says stop or is gone.

    It ends at the first exception: its sockets close, so that the parent's collective fails rather than waits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    code = 1
    try:
        pipe.send(("ok", None))  # up: the parent may wait for this rank in the rendezvous
        target = factory(Rendezvous(rank, world, store, timeout), *args)
        pipe.send(("ok", None))
        while True:
            method, parameters, keywords = pipe.recv()
            if method is None:
                code = 0
                break
            value = getattr(target, method)(*parameters, **keywords)
            pipe.send(("ok", value if method.startswith("read") else None))
    except EOFError:
        pass  # the parent is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        # no orderly farewell: torch's destructors may wait for peers that are gone
        os._exit(code)


class RankGroup:
    """`world` ranks, each holding `factory(rendezvous, *args)`.

    `target` is rank 0's object, which is also given `local`, keyword arguments that need not be sent anywhere. Not
    thread-safe: one call at a time.
    """

    def __init__(
        self,
        world: int,
        factory: Factory,
        args: tuple[Any, ...] = (),
        timeout: float = DEFAULT_TIMEOUT,
        local: Mapping[str, Any] | None = None,
    ) -> None:
        self.world = world
        self._timeout = timeout
        self._workers: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._directory: str | None = None
        self._closed = False
        if world == 1:
            self.target = factory(Rendezvous(0, 1, "", timeout), *args, **(local or {}))
            return
        self._directory = tempfile.mkdtemp(prefix="k2-ranks-")
        store = os.path.join(self._directory, "store")
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(1, world):
                ours, theirs = context.Pipe()
                arguments = (rank, world, store, timeout, theirs, factory, args)
                worker = context.Process(target=_worker, args=arguments, name=f"rank{rank}", daemon=True)
                worker.start()
                theirs.close()
                self._workers.append(worker)
                self._pipes.append(ours)
            self._collect("start", _START_SECONDS)
            self.target = self._guard(lambda: factory(Rendezvous(0, world, store, timeout), *args, **(local or {})))
            self._collect("open")
        except BaseException:
            self._stop(0.0)
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`target.method(*args, **kwargs)` on every rank at once; gives rank 0's result.

        Raises `RankError` where any rank fails, after which the group is closed.
        """
        with self._in_step():
            self._send(method, args, kwargs)
            result = self._guard(lambda: getattr(self.target, method)(*args, **kwargs))
            self._collect(method)
        return result

    def call_checked(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `call`, for methods without collectives: what rank 0 refuses (raises on), the others never hear of."""
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `call_checked`, for methods whose name starts with "read": results of all ranks, in rank order."""
        self._check_open()
        with self._in_step():
            result = getattr(self.target, method)(*args, **kwargs)
            self._send(method, args, kwargs)
            return [result, *self._collect(method)]

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """An interrupt (Ctrl-C) amid a call leaves the ranks at different points: then the group is closed."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._stop(0.0)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RankError("the ranks are closed, open the engine anew")

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_open()
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.send((method, args, kwargs))
            except OSError:
                self._fail(f"rank {rank}: {self._last_words(rank) or 'its process closed the connection'}")

    def _guard(self, body: Callable[[], Any]) -> Any:
        """Rank 0's own part. If it fails because a worker did, the worker's reason is the one to tell."""
        if self.world == 1:
            return body()
        try:
            return body()
        except Exception as error:
            self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        while time.monotonic() < deadline:
            for rank in range(1, self.world):
                words = self._last_words(rank)
                if words is not None:
                    self._fail(f"rank {rank}: {words}", error)
            time.sleep(0.05)
        self._fail(f"rank 0: {type(error).__name__}: {error}", error)

    def _last_words(self, rank: int) -> str | None:
        """What a failed worker said, or how it ended; None while it lives and has not complained."""
        pipe, worker = self._pipes[rank - 1], self._workers[rank - 1]
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                kind, value = pipe.recv()
                if kind == "error":
                    return value
        worker.join(0.01)
        return None if worker.exitcode is None else f"its process ended (exit code {worker.exitcode})"

    def _collect(self, what: str, timeout: float | None = None) -> list[Any]:
        """Every worker's answer to the last call."""
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes, start=1):
            if not wait([pipe], max(0.0, deadline - time.monotonic())):
                self._fail(f"rank {rank}: no answer to {what} within {timeout:g} seconds")
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                kind, value = "error", self._last_words(rank) or "its process closed the connection"
            if kind == "error":
                self._fail(f"rank {rank}: {value}")
            answers.append(value)
        return answers

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        self._stop(0.0)
        raise RankError(message) from cause

    def close(self) -> None:
        """Stop the workers; may be called again."""
        self._stop(_SHUTDOWN_SECONDS)

    def _stop(self, grace: float) -> None:
        """Ask the workers to end, and end those that have not after `grace` seconds."""
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((None, (), {}))
        deadline = time.monotonic() + grace
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
