"""POST /v1/completions: the continuation of texts or token ids, with echo and log probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from engine_runtime.generation import MAX_LOGPROBS, GenerationRequest, RequestUsage, TokenLogprobs
from engine_runtime.server.chat_core import off_loop
from engine_runtime.server.contract import BadRequest
from engine_runtime.server.errors import GenerationFailed, error_envelope
from engine_runtime.server.fields import SamplingFields, TokenId, choice_params, sampling_params
from engine_runtime.server.merge import merge
from engine_runtime.server.routes import JSONRoute
from engine_runtime.server.services import Services
from engine_runtime.server.sse import DONE, Chunks, JSONBytes, event, open_stream, until_gone
from engine_runtime.server.text_core import TextEnd, TextOptions, TextPiece, run_text
from engine_runtime.server.usage import TextLogprobs, usage_json

PATH = "/v1/completions"
MAX_PROMPTS = 64
MAX_CHOICES = 64  # prompts times n

Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = (
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = 16
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    suffix: str | None = None
    skip_special_tokens: bool = True


def router(services: Services) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute)

    @routes.post(PATH, tags=["openai"])
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a text, several texts, or lists of token ids."""
        _check(services, body)
        answer = _Answer(services, body, await prompt_ids(services, body.prompt))
        if body.stream:
            return await open_stream(request, answer.stream(), stream_error)
        return JSONBytes(await until_gone(request, answer.collect()))

    return routes


def stream_error(error: Exception) -> bytes:
    """The end of a stream that failed after it had begun."""
    return event(error_envelope(PATH, error)) + DONE


def _check(services: Services, body: CompletionRequest) -> None:
    body.warn_of_unknown_fields()
    services.check_model(body.model)
    if body.suffix:
        raise BadRequest("suffix: this model continues a text, it does not fill in; leave suffix out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadRequest(f"best_of: expected the value of n, {body.n or 1}, found {body.best_of}", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens: 0 needs echo: true", "max_tokens")
    if body.response_format is not None and body.response_format.type != "text" or body.structured_outputs is not None:
        raise BadRequest("response_format: structured output needs /v1/chat/completions", "response_format")


async def prompt_ids(services: Services, prompt: Any) -> list[tuple[int, ...]]:
    """Token ids of each prompt; `BadRequest` for an id outside the vocabulary or an empty text."""
    if isinstance(prompt, str):
        prompts: Sequence[Any] = [prompt]
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else prompt
    return [await off_loop(_ids, services, one) for one in prompts]


def _ids(services: Services, prompt: str | list[int]) -> tuple[int, ...]:
    tokens = services.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not tokens:
        raise BadRequest("prompt: expected at least one token, found an empty text", "prompt")
    found, most = max(tokens), services.model.vocab_size - 1
    if found > most:
        raise BadRequest(f"prompt: expected token ids from 0 to {most}, found {found}", "prompt")
    return tuple(tokens)


@dataclass
class _Choice:
    """One choice of an answer that is sent whole."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: TextEnd | None = None


class _Answer:
    """One response. Choice i is the (i mod n)th of prompt i // n."""

    def __init__(self, services: Services, body: CompletionRequest, prompts: list[tuple[int, ...]]) -> None:
        self._services = services
        self._body = body
        self._n = body.n or 1
        self._prompts = prompts
        self._count = len(prompts) * self._n
        if self._count > MAX_CHOICES:
            raise BadRequest(f"n: expected at most {MAX_CHOICES} choices over all prompts, found {self._count}", "n")
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": services.model.name,
            "system_fingerprint": services.model.fingerprint[:16],
        }
        self._usages: dict[int, RequestUsage] = {}
        self._ends: dict[int, TextEnd] = {}
        self._logprobs = [TextLogprobs(services.tokenizer) for _ in range(self._count)]
        self._options = TextOptions(body.stops, body.include_stop_str_in_output, body.skip_special_tokens)

    def _pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """(choice, piece) of all choices, as they come."""
        body, room = self._body, self._services.model.room()
        given = sampling_params(
            body, body.max_tokens, self._services.defaults, room.eos_ids, self._services.model.vocab_size
        )
        requests = [
            GenerationRequest(
                prompt,
                choice_params(room.fit(prompt, given, "prompt"), index),
                room.speculation,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )
            for prompt in self._prompts
            for index in range(self._n)
        ]
        engine, tokenizer = self._services.engine, self._services.tokenizer
        ended = self._services.metrics.finished
        return merge([run_text(engine, tokenizer, room.eos_ids, one, self._options, ended) for one in requests])

    def _note(self, index: int, piece: TextPiece) -> None:
        self._usages[index] = piece.usage
        if piece.end is not None:
            if piece.end.reason == "error":
                raise GenerationFailed(piece.end.error or "the engine failed")
            self._ends[index] = piece.end

    def _usage(self) -> dict[str, Any]:
        """Of all choices: each prompt counts once."""
        firsts = [self._usages[i] for i in range(0, self._count, self._n) if i in self._usages]
        timings = [end.timing for end in self._ends.values()] if self._body.timing else None
        return usage_json(firsts, list(self._usages.values()), 0, timings)

    def _echo(self, index: int) -> tuple[int, ...]:
        return self._prompts[index // self._n] if self._body.echo else ()

    def _echo_text(self, index: int) -> str:
        return self._services.tokenizer.decode(self._echo(index), self._body.skip_special_tokens)

    async def collect(self) -> dict[str, Any]:
        """The whole completion object."""
        choices = [_Choice([self._echo_text(i)], list(self._echo(i))) for i in range(self._count)]
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                self._note(index, piece)
                choice = choices[index]
                choice.text.append(piece.text)
                choice.tokens += piece.tokens
                choice.logprobs += [*(piece.prompt_logprobs or ()), *piece.logprobs]
        return {**self._head, "choices": [self._whole(*pair) for pair in enumerate(choices)], "usage": self._usage()}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        value = self._choice(index, "".join(choice.text), choice.tokens, choice.logprobs, self._ends[index])
        if self._body.return_token_ids:
            value["prompt_token_ids"] = self._prompts[index // self._n]
            value["token_ids"] = choice.tokens[len(self._echo(index)) :]
        return value

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        end: TextEnd | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs[index].json(tokens, logprobs),
            "finish_reason": None if end is None else end.reason,
            "stop_reason": None if end is None else end.stop,
        }

    async def stream(self) -> Chunks:
        """The events of the stream, the last one [DONE]."""
        begun: set[int] = set()
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                self._note(index, piece)
                first = index not in begun
                begun.add(index)
                echo = self._echo(index) if first else ()
                text = self._echo_text(index) + piece.text if first else piece.text
                logprobs = [*(piece.prompt_logprobs or ()), *piece.logprobs]
                choice = self._choice(index, text, [*echo, *piece.tokens], logprobs, piece.end)
                if self._body.return_token_ids:
                    choice["token_ids"] = piece.tokens
                    if first:
                        choice["prompt_token_ids"] = self._prompts[index // self._n]
                usage = self._usage() if self._body.continuous_usage else None
                yield event({**self._head, "choices": [choice], "usage": usage})
        if self._body.includes_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE
