"""Request fields that chat and text completions share, with their bounds, and what the engine is told of them."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from engine_runtime.sampling import SamplingParams
from engine_runtime.server.contract import BadRequest, ResponseFormat
from plugins.core.state import MAX_STOP_IDS

MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_NAMES_LOGGED = 20
_PASSED_ON = (
    *("temperature", "top_p", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
IGNORED = {
    "user",
    "store",
    "metadata",
    "client_metadata",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "verbosity",
}
"""Fields of the OpenAI API that mean nothing here and need no warning."""

_log = logging.getLogger(__name__)

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Body(BaseModel):
    """A request body. Fields that are not known are ignored, with a warning in the log; a value of another type than
    its field's is refused, never converted."""

    model_config = ConfigDict(extra="allow", strict=True)

    def warn_of_unknown_fields(self) -> None:
        unknown = sorted(set(self.model_extra or ()) - IGNORED)
        if unknown:
            names = ", ".join(repr(name[:64]) for name in unknown[:MAX_NAMES_LOGGED])
            _log.warning("ignored %d unknown fields: %s", len(unknown), names)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JSONSchemaFormat(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JSONObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JSONSchemaFormat


class StructuredOutputs(Body):
    """Exactly one of the fields; the same as vLLM's parameter of this name."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Annotated[str | None, Field(min_length=1, max_length=65536)] = None
    choice: Annotated[list[str] | None, Field(min_length=1, max_length=10000)] = None
    grammar: Annotated[str | None, Field(min_length=1, max_length=1 << 20)] = None
    json_object: bool | None = None


Format = Annotated[TextFormat | JSONObjectFormat | SchemaFormat, Field(discriminator="type")]


class SamplingFields(Body):
    """What both kinds of completion take."""

    model: Annotated[str | None, Field(max_length=512)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    logit_bias: Annotated[dict[str, Bias] | None, Field(max_length=MAX_BIASES)] = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    ignore_eos: bool = False
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_IDS - 2)] = None
    include_stop_str_in_output: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    trace: Annotated[bool, Field(description="Report each step's draft tree, in chunks with `k2_trace`.")] = False
    timing: Annotated[bool, Field(description="Add a split of the time and of the speculation to the usage.")] = False

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


def sampling_params(
    fields: SamplingFields, max_tokens: int | None, defaults: SamplingParams, eos_ids: tuple[int, ...], vocab_size: int
) -> SamplingParams:
    """The parameters of the first choice; `BadRequest` for ids outside the vocabulary and what contradicts itself."""
    stop_ids = fields.stop_token_ids or []
    biases = _biases(fields)
    for name, ids in (("stop_token_ids", stop_ids), ("logit_bias", [token for token, _ in biases])):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise BadRequest(f"{name}: expected token ids from 0 to {vocab_size - 1}, found {token}", name)
    changes: dict[str, Any] = {name: value for name in _PASSED_ON if (value := getattr(fields, name)) is not None}
    if changes.get("top_p") == 0:
        changes["top_p"] = 1e-9  # the most probable token alone, as OpenAI's API has it
    if fields.top_k is not None:
        changes["top_k"] = max(fields.top_k, 0)
    if stop_ids or fields.ignore_eos:
        changes["stop_ids"] = (*(() if fields.ignore_eos else eos_ids), *stop_ids)
    changes["seed"] = secrets.randbits(63) if fields.seed is None else fields.seed
    try:
        return replace(defaults, **changes, max_tokens=max_tokens, logit_bias=biases)
    except ValueError as error:
        raise BadRequest(str(error), str(error).partition(":")[0]) from None


def _biases(fields: SamplingFields) -> tuple[tuple[int, float], ...]:
    for key in fields.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"logit_bias: expected token ids as keys, found {key[:40]!r}", "logit_bias")
    return tuple((int(key), bias) for key, bias in (fields.logit_bias or {}).items())


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Those of choice `index` of a request for several: a noise of its own, the same each time."""
    seed = (params.seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    return replace(params, seed=seed) if index else params


def response_format(fields: SamplingFields) -> ResponseFormat | None:
    """What the answer must look like."""
    chosen = fields.response_format
    extra = fields.structured_outputs
    if extra is not None:
        given = {name: value for name, value in extra.__dict__.items() if value not in (None, False)}
        if len(given) != 1 or (chosen is not None and chosen.type != "text"):
            found = ", ".join(sorted(name.rstrip("_") for name in given)) or "none"
            raise BadRequest(
                f"structured_outputs: expected exactly one constraint and no response_format, found {found}",
                "structured_outputs",
            )
        ((name, value),) = given.items()
        kinds = {"json_": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
        if name == "json_object":
            return ResponseFormat("json_object")
        return ResponseFormat(kinds[name], value)  # type: ignore[arg-type]
    if isinstance(chosen, JSONObjectFormat):
        return ResponseFormat("json_object")
    if isinstance(chosen, SchemaFormat):
        return ResponseFormat("json_schema", chosen.json_schema.schema_)
    return None
