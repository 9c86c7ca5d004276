"""From a prompt to its continuation as text, for the endpoints without a chat format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from engine_runtime.generation import GenerationRequest, RequestTiming, RequestUsage, TokenLogprobs
from engine_runtime.server.contract import BadRequest, Engine, EngineUnavailable
from engine_runtime.server.stops import StopStrings, split_stop
from engine_runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextEnd:
    """Why a text ended: "stop", "length" or "error"; stop: the text or id that did it."""

    reason: str
    timing: RequestTiming
    stop: str | int | None = None
    error: str | None = None


@dataclass(frozen=True)
class TextPiece:
    """News of a text. usage: so far. prompt_logprobs: once. end: in the last one."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    usage: RequestUsage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    end: TextEnd | None = None


@dataclass(frozen=True)
class TextOptions:
    """stops: texts at which it ends; include_stop: show them, and stop ids. skip_special: leave special tokens out."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True


async def run_text(
    engine: Engine,
    tokenizer: Tokenizer,
    eos_ids: tuple[int, ...],
    request: GenerationRequest,
    options: TextOptions,
    ended: Callable[[str], None],
) -> AsyncGenerator[TextPiece, None]:
    """The continuation of `request.prompt`. ended: told at the end why it ended, "abort" if the caller closes this
    before. Raises `BadRequest` for what the engine does not take."""
    decoder = tokenizer.stream(options.skip_special)
    stops = StopStrings(options.stops, options.include_stop)
    usage, timing = RequestUsage(len(request.prompt)), RequestTiming()
    reason = "abort"
    outputs = engine.generate(request)
    try:
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                usage, timing = output.usage or usage, output.timing or timing
                tokens, logprobs, stop = split_stop(output, request.params, eos_ids, options.include_stop)
                text = stops.push(decoder.push(tokens))
                end = None
                if output.finish is not None:
                    text += stops.push(decoder.flush())
                    end = TextEnd(output.finish, timing, stop, output.error)
                if stops.found is not None:
                    end = TextEnd("stop", timing, stops.found)
                elif end is not None:
                    text += stops.flush()
                reason = reason if end is None else end.reason
                yield TextPiece(text, tokens, logprobs or (), usage, output.prompt_logprobs, end)
                if end is not None:
                    return
    except ValueError as error:
        reason = "refused"
        raise BadRequest(str(error)) from None
    except EngineUnavailable:
        reason = "refused"
        raise
    finally:
        ended(reason)
