"""A server whose engine says what a script says: the endpoints, the chat core and Kimi's parser are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine_runtime.budget import PLAIN
from engine_runtime.generation import GenerationRequest, Output, RequestTiming, RequestUsage
from engine_runtime.sampling import SamplingParams
from engine_runtime.server import errors
from engine_runtime.server.chat_core import Chat, Room
from engine_runtime.server.chat_format import KimiFormat
from engine_runtime.server.contract import BadRequest
from engine_runtime.server.gate import Gate
from tests.server.vocabulary import ids, template, tokenizer

MODEL = "k2-nano"
CONTEXT = 4096


class ScriptedEngine:
    """Answers every request with the next script (text with markers), `group` tokens a step. `requests`: what it was
    asked; `closed`: answers that were cut short by the client."""

    def __init__(self, group: int = 3) -> None:
        self.group = group
        self.scripts: list[str] = []
        self.finish = "stop"
        self.error: str | None = None
        self.cached_tokens = 0
        self.requests: list[GenerationRequest] = []
        self.closed = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        self.requests.append(request)
        tokens = ids(self.scripts.pop(0))
        ended = False
        try:
            for start in range(0, len(tokens), self.group):
                part = tuple(tokens[start : start + self.group])
                ended = start + self.group >= len(tokens)
                usage = RequestUsage(len(request.prompt), self.cached_tokens, start + len(part), passes=1)
                finish = self.finish if ended else None
                yield Output(part, finish=finish, usage=usage, timing=RequestTiming(), error=self.error)
                await asyncio.sleep(0)
        finally:
            self.closed += not ended


def services(engine: ScriptedEngine) -> Any:
    """What the chat endpoints use of `services.Services`."""

    def check_model(name: str | None) -> None:
        if name not in (None, MODEL):
            raise BadRequest(f"model: {name!r} is not served here", "model", 404, "model_not_found")

    room = Room(CONTEXT, tuple(sorted(tokenizer().stop_ids)), PLAIN)
    model = SimpleNamespace(name=MODEL, fingerprint="0" * 64, vocab_size=tokenizer().vocab_size, room=lambda: room)
    chat = Chat(engine, KimiFormat(template(), tokenizer()), room)
    return SimpleNamespace(
        model=model, tokenizer=tokenizer(), engine=engine, chat=chat, defaults=SamplingParams(), check_model=check_model
    )


def server_events(text: str) -> list[tuple[str, Any]]:
    """(name, data) of the server-sent events in the body of a response."""
    lines = (dict(line.split(": ", 1) for line in event.splitlines()) for event in text.split("\n\n") if event)
    return [(fields["event"], json.loads(fields["data"])) for fields in lines if "data" in fields]


@contextlib.contextmanager
def serving(engine: ScriptedEngine, modules: Sequence[Any]) -> Iterator[str]:
    """The address of a server with the routers of `modules`."""
    app = FastAPI()
    for module in modules:
        app.include_router(module.router(services(engine)))
    errors.install(app)
    app.add_middleware(Gate, api_keys=(), max_body_bytes=1 << 24, count=lambda *seen: None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
