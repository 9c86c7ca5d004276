"""Responses: JSON through msgspec, server-sent events, and both ending when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

JSON = Any  # what msgspec can encode
T = TypeVar("T")
Chunks = AsyncGenerator[bytes, None]

PING_SECONDS = 10.0  # between comments in a stream that has nothing to say
SEND_SECONDS = 60.0  # for a client to take a piece before it is given up
DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"

encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class JSONBytes(Response):
    """A JSON response, encoded at once."""

    media_type = "application/json"

    def __init__(self, content: JSON, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode(content), status_code, headers)


def event(data: JSON, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; then raises `ClientGone`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        await _cancel(task)


async def open_stream(request: Request, chunks: Chunks, on_error: Callable[[Exception], bytes]) -> EventStream:
    """A response that sends `chunks`. What fails before the first chunk is raised here, so that it becomes an ordinary
    error response; unless that chunk takes so long that the client should hear something before.

    on_error: the last piece to send when `chunks` fails later on.
    """
    first = asyncio.ensure_future(anext(chunks))
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((first, watch), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not first.done():
            raise ClientGone
        if first.done():
            first.result()
        return EventStream(first, chunks, on_error)
    except BaseException:
        await _cancel(first)
        await chunks.aclose()
        raise
    finally:
        await _cancel(watch)


class EventStream(Response):
    """Sends server-sent events with comments in the pauses, until they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: asyncio.Future[bytes], chunks: Chunks, on_error: Callable[[Exception], bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._chunks, self._on_error = first, chunks, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(_disconnected(receive))
        body = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((watch, body), return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                body.result()
        finally:
            watch.cancel()
            await _cancel(body)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            pending = self._first
            try:
                while True:
                    await asyncio.wait((pending,), timeout=PING_SECONDS)
                    await _send_piece(send, pending.result() if pending.done() else _PING)
                    if pending.done():
                        pending = asyncio.ensure_future(anext(chunks))
            except StopAsyncIteration:
                pass
            except TimeoutError:
                return  # the client has stopped reading
            except Exception as error:
                await _send_piece(send, self._on_error(error))
            finally:
                await _cancel(pending)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_piece(send: Send, data: bytes) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel `task` if it runs, and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
