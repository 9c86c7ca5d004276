"""An engine that says what a test tells it to, and a live server around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine_runtime.chat import ChatTemplate
from engine_runtime.generation import GenerationRequest, Output, RequestTiming, RequestUsage, TokenLogprobs
from engine_runtime.prefix_cache import PrefixMatch
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.app import create_app
from engine_runtime.server.chat_core import Chat
from engine_runtime.server.chat_format import KimiFormat
from engine_runtime.server.contract import EngineUnavailable
from engine_runtime.server.engine_client import Health
from engine_runtime.server.listener import Server
from engine_runtime.server.metrics import Metered, Metrics
from engine_runtime.server.services import ModelInfo, Services
from engine_runtime.tokenizer import Tokenizer
from plugins.core.engine_file import Manifest

NANO = Path(__file__).parents[2] / "artifacts" / "k2-nano" / "checkpoint"
TOKENIZER = Tokenizer.load(NANO)
TEMPLATE_SOURCE = (NANO / "chat_template.jinja").read_text()
TEMPLATE = ChatTemplate.load(NANO, TOKENIZER)
EOS = TOKENIZER.special_id("<|im_end|>")
LIMITS = {
    "max_requests": 4,
    "max_rows": 64,
    "prefill_chunk": 64,
    "max_context": 4096,
    "page_size": 64,
    "kv_pages": 257,
    "draft_depth": 7,
    "tree_top_k": 8,
}
MODEL = ModelInfo(
    "k2-test",
    Manifest(
        name="k2-test",
        model={"vocab_size": TOKENIZER.vocab_size, "eos_token_ids": [TOKENIZER.special_id("[EOS]"), EOS]},
        checkpoint_fingerprint="made up",
        tp=1,
        arch="cpu",
        activation_dtype="float32",
        kv_dtype="float32",
        weights="splat",
        layout_versions={},
        limits=LIMITS,
    ),
    "f" * 64,
    1,
)


def ids(text: str) -> list[int]:
    """Tokens of `text`, in which names of special tokens are special tokens."""
    return TOKENIZER.encode(text, allow_special=True)


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """Made up, but a function of the token."""
    alternatives = tuple(((token + i) % 4000, -0.5 - i) for i in range(top))
    return TokenLogprobs(token, -0.5, alternatives)


@dataclass
class ScriptedEngine:
    """`contract.Engine` and the health of an `EngineClient`.

    scripts: what the next requests say, one after another. tokens: what every other request generates, group: at how
    many a step, ended by `finish` (where max_tokens is not reached). before: awaited before each step with its number.
    failure: raised instead. error: the last output's.
    """

    scripts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: ids("Hello, world!<|im_end|>"))
    group: int = 1
    finish: str = "stop"
    failure: Exception | None = None
    error: str | None = None
    cached: int = 0
    before: Callable[[int], Any] | None = None
    state: str = "ready"
    requests: list[GenerationRequest] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # requests whose iterator was closed before its end
    snapshot: Any = None

    def say(self, text: str, group: int = 1, finish: str = "stop", end: str = "<|im_end|>") -> None:
        self.tokens, self.group, self.finish = ids(text + end), group, finish

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        if self.failure is not None:
            raise self.failure
        if self.scripts:
            self.tokens = ids(self.scripts.pop(0))
        number = len(self.requests)
        self.requests.append(request)
        most = request.params.max_tokens
        tokens = self.tokens if most is None else self.tokens[:most]
        finish = self.finish if len(tokens) == len(self.tokens) else "length"
        done = False
        try:
            for step, start in enumerate(range(0, max(1, len(tokens)), self.group)):
                if self.before is not None:
                    await self.before(step)
                end = start + self.group
                done = end >= len(tokens)
                yield self._output(request, tokens[start:end], min(end, len(tokens)), step, finish if done else None)
        finally:
            if not done:
                self.closed.append(number)

    def _output(
        self, request: GenerationRequest, tokens: Sequence[int], total: int, step: int, finish: str | None
    ) -> Output:
        top = request.logprobs
        prompt = request.prompt_logprobs
        return Output(
            tuple(tokens),
            None if top is None else tuple(logprobs_of(token, top) for token in tokens),
            None if prompt is None or step else (None, *(logprobs_of(token, prompt) for token in request.prompt[1:])),
            finish=finish,
            error=self.error if finish == "error" else None,
            usage=RequestUsage(len(request.prompt), self.cached, total, step, 3 * step, total // 2),
            timing=RequestTiming(0.125, 0.25, 0.5, 1.0),
        )

    # ---- as EngineClient ----

    def health(self) -> Health:
        reason = None if self.state == "ready" else f"the engine is {self.state}"
        return Health(self.state, reason, 0.5, 0.01, 0, 0)

    async def match(self, prompts: Sequence[Sequence[int]]) -> list[PrefixMatch]:
        if self.state != "ready":
            raise EngineUnavailable("not now")
        return [PrefixMatch(len(prompt) // 2, len(prompt) - 1) for prompt in prompts]


def services_of(engine: ScriptedEngine, model: ModelInfo = MODEL) -> Services:
    client: Any = engine
    metrics = Metrics(model.name, model.limits, lambda: engine.snapshot, engine.health)
    metered = Metered(engine, metrics)
    chat = Chat(metered, KimiFormat(TEMPLATE, TOKENIZER), model.room(), metrics.finished)
    return Services(model, TOKENIZER, metered, client, chat, metrics, SamplingParams(temperature=1.0, top_p=0.95))


@dataclass
class Live:
    """A server that listens. loop: of its thread."""

    url: str
    engine: ScriptedEngine
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)


@contextlib.contextmanager
def live_server(
    engine: ScriptedEngine | None = None,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 1 << 20,
    model: ModelInfo = MODEL,
) -> Iterator[Live]:
    """A uvicorn server in a thread of its own, on a free port of this machine."""
    engine = engine or ScriptedEngine()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(services_of(engine, model), api_keys, max_body_bytes)
    server = Server(app, close_seconds=1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([listener]),))
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Live(url, engine, loop, client)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        loop.close()


def events_of(response: httpx.Response | str) -> list[Any]:
    """The JSON of each event of a stream; the last one must be [DONE]."""
    text = response if isinstance(response, str) else response.text
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """(name, JSON) of each event of a stream whose events have names."""
    events = (dict(line.split(": ", 1) for line in event.split("\n")) for event in response.text.split("\n\n") if event)
    return [(event["event"], json.loads(event["data"])) for event in events if "data" in event]
