"""Messages between the HTTP process and the engine process: length-prefixed msgpack over a socket pair.

Requests and outputs travel as the dataclasses of `engine_runtime.generation`; msgspec checks every type on the way in.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Sequence

import msgspec

from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.stats import DecodeStats, EngineStatus

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 28  # bytes; a million tokens are 5 MB


# ---- to the engine process ----


class Open(msgspec.Struct, tag=True, frozen=True):
    """The first message: which engine to open."""

    artifact: str
    threads: int = 1


class Submit(msgspec.Struct, tag=True, frozen=True):
    """id: chosen by the sender, unique in the connection."""

    id: int
    request: GenerationRequest


class Cancel(msgspec.Struct, tag=True, frozen=True):
    id: int


class Match(msgspec.Struct, tag=True, frozen=True):
    """Asks how much of each prompt is in the prefix cache. id as in `Submit`."""

    id: int
    prompts: tuple[tuple[int, ...], ...]


Command = Submit | Cancel | Match


# ---- from the engine process ----


class Loading(msgspec.Struct, tag=True, frozen=True):
    """fraction: 0 to 1, of the bytes to load."""

    fraction: float
    stage: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Loaded, ranks joined, a first token produced."""


class Snapshot(msgspec.Struct, frozen=True):
    """The engine's counts, for the metrics."""

    status: EngineStatus
    stats: DecodeStats


class News(msgspec.Struct, tag=True, frozen=True):
    """What a step came to; without outputs, a sign of life. snapshot: not in every one."""

    outputs: tuple[tuple[int, Output], ...] = ()
    snapshot: Snapshot | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The engine does not take the request or query `id`; why, in one sentence."""

    id: int
    message: str


class Matched(msgspec.Struct, tag=True, frozen=True):
    """(cached, common) of each prompt, as in `engine_runtime.prefix_cache.PrefixMatch`."""

    id: int
    matches: tuple[tuple[int, int], ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine process ends; why, in one sentence. permanent: trying again will not help."""

    reason: str
    permanent: bool = False


Report = Loading | Ready | News | Refused | Matched | Failed

_encoder = msgspec.msgpack.Encoder()
decode_open: Callable[[bytes], Open] = msgspec.msgpack.Decoder(Open).decode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


def frame(message: msgspec.Struct) -> bytes:
    """`message` as it goes over the socket."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"message: expected at most {MAX_FRAME} bytes, found {len(data)}")
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message's bytes; raises `asyncio.IncompleteReadError` at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


class Channel:
    """The engine process's end of the socket, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        self._socket.sendall(frame(message))

    def wait(self, timeout: float, others: Sequence[int] = ()) -> list[int]:
        """Wait up to `timeout` seconds for a message or for one of the descriptors `others` to be readable; gives
        those of `others` that are. Returns at once where a message waits already."""
        if self._complete():
            return []
        ready, _, _ = select.select([self._socket.fileno(), *others], [], [], timeout)
        return [descriptor for descriptor in others if descriptor in ready]

    def receive(self) -> list[bytes]:
        """The messages that have arrived, without waiting; raises EOFError when the other side is gone."""
        while True:
            try:
                data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the other side of the socket is gone")
            self._buffer += data
        messages = []
        while length := self._complete():
            messages.append(bytes(self._buffer[_LENGTH.size : length]))
            del self._buffer[:length]
        return messages

    def _complete(self) -> int:
        """Bytes of the first whole message in the buffer with its length, 0 where there is none."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        total = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        return total if len(self._buffer) >= total else 0
