"""What the tokenizer, the chat template and the prefix cache make of a prompt; nothing is generated."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from engine_runtime.sampling import SamplingParams
from engine_runtime.server.chat_core import off_loop
from engine_runtime.server.chat_request import ChatRequest, to_job
from engine_runtime.server.completions import Tokens, prompt_ids
from engine_runtime.server.fields import Body, TokenId
from engine_runtime.server.routes import JSONRoute
from engine_runtime.server.services import Services
from engine_runtime.server.sse import JSONBytes

SHOWN_TOKENS = 24  # of each side, around the place where two prompts differ


class Source(Body):
    """A prompt: text or token ids, or a chat request, rendered."""

    prompt: str | Tokens | None = None
    chat: ChatRequest | None = None

    @model_validator(mode="after")
    def _one(self) -> Source:
        if (self.prompt is None) == (self.chat is None):
            raise ValueError("exactly one of prompt and chat is needed")
        return self


class TokenizeRequest(Body):
    """prompt, or messages and what else a chat completion has."""

    model: str | None = None
    prompt: str
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class ExplainRequest(Source):
    """against: a second prompt to compare with the first."""

    against: Source | None = None


def router(services: Services) -> APIRouter:
    routes = APIRouter(route_class=JSONRoute, tags=["tokens"])
    tokenizer = services.tokenizer

    async def render(body: ChatRequest) -> list[int]:
        services.check_model(body.model)
        return await services.chat.render(to_job(body, SamplingParams()))

    async def ids_of(source: Source) -> tuple[int, ...]:
        if source.chat is not None:
            return tuple(await render(source.chat))
        return (await prompt_ids(services, source.prompt))[0]

    def strings(ids: list[int]) -> list[str]:
        return [tokenizer.decode([token]) for token in ids]

    async def described(ids: list[int], with_strings: bool) -> JSONBytes:
        value: dict[str, Any] = {"count": len(ids), "max_model_len": services.model.context, "tokens": ids}
        value["token_strs"] = await off_loop(strings, ids) if with_strings else None
        return JSONBytes(value)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest | ChatRequest) -> JSONBytes:
        """Token ids of a text, or of a chat request's prompt."""
        if isinstance(body, ChatRequest):
            return await described(await render(body), bool((body.model_extra or {}).get("return_token_strs")))
        services.check_model(body.model)
        return await described(await off_loop(tokenizer.encode, body.prompt), body.return_token_strs)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> JSONBytes:
        """The text of token ids."""
        services.check_model(body.model)
        ids = (await prompt_ids(services, body.tokens))[0] if body.tokens else ()
        return JSONBytes({"prompt": await off_loop(tokenizer.decode, ids)})

    @routes.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest) -> JSONBytes:
        """The prompt that a chat completion would be generated from, as token ids and as text."""
        ids = await render(body)
        text = await off_loop(tokenizer.decode, ids)
        return JSONBytes({"count": len(ids), "max_model_len": services.model.context, "tokens": ids, "text": text})

    @routes.post("/v1/cache/explain")
    async def explain(body: ExplainRequest) -> JSONBytes:
        """How many tokens of a prompt the prefix cache has, and where it parts from what is cached; with `against`,
        also where the two prompts part."""
        first = await ids_of(body)
        sources = [first] if body.against is None else [first, await ids_of(body.against)]
        matches = await services.client.match(sources)
        value = {
            "prompt_tokens": len(first),
            "cached_tokens": matches[0].cached,
            "tokens_in_common_with_cache": matches[0].common,
            "next_text": tokenizer.decode(first[matches[0].common :][:SHOWN_TOKENS]),
        }
        if body.against is not None:
            second = sources[1]
            common = await off_loop(_common, first, second)
            value["against"] = {
                "prompt_tokens": len(second),
                "cached_tokens": matches[1].cached,
                "tokens_in_common": common,
                "text_before": tokenizer.decode(first[max(0, common - SHOWN_TOKENS) : common]),
                "text_here": tokenizer.decode(first[common:][:SHOWN_TOKENS]),
                "text_there": tokenizer.decode(second[common:][:SHOWN_TOKENS]),
            }
        return JSONBytes(value)

    return routes


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
