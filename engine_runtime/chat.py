"""Chat messages -> prompt token ids, through the checkpoint's own chat template.

Markers written by the template become special tokens; strings supplied by the caller (contents, names, roles,
tool ids, arguments, tool declarations, template variables) stay plain text, whatever they contain. How:
before rendering, a guard character is put around every character of the caller's strings that could begin or
end the name of a special token, so that none of them can spell such a name, nor complete one together with
its neighbours. The guard is a code point that occurs neither in the strings nor in the template. The rendered
text is cut at the names it still holds, all of them the template's, and the guards are taken out of the
pieces between. A piece is encoded whole, so that text of template and caller that meets (`## Return of {id}`
+ content) merges into tokens as it did in training: for messages without markers the ids are those of Hugging
Face's `apply_chat_template`.

A template that searches contents for markers finds none; reasoning belongs in `reasoning_content`.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_runtime.tokenizer import Tokenizer
from engine_runtime.tool_schema import ToolSchemaError, declare_tools

_log = logging.getLogger(__name__)

# Unicode noncharacters, which text should never hold, then the private planes
_GUARDS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

_SLICE = 1 << 16  # characters


class ChatError(Exception):
    """The messages, the tools or the template are unfit; the message is one sentence."""


class ChatTemplate:
    """A checkpoint's chat template bound to its tokenizer. Build with `ChatTemplate.load`."""

    def __init__(self, tokenizer: Tokenizer, source: str, special_names: Mapping[str, str]) -> None:
        """`special_names`: what the template prints for its variables bos_token, eos_token, ..."""
        self._tokenizer = tokenizer
        self._source = source
        self._ends = {end for name in tokenizer.special_tokens for end in (name[0], name[-1])}
        try:
            self._template = _environment().from_string(source, globals=dict(special_names))
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"the chat template does not parse: line {error.lineno}: {error.message}") from None

    @classmethod
    def load(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Reads `chat_template.jinja`, or else the `chat_template` entry of tokenizer_config.json, of
        `directory`."""
        directory = Path(directory)
        names = {}
        try:
            config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
            file = directory / "chat_template.jinja"
            source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
            for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
                if token := config.get(key):
                    names[key] = token if isinstance(token, str) else token["content"]
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ChatError(f"the chat template of {directory} cannot be read: {error!r}") from None
        if not isinstance(source, str):
            raise ChatError(f"{directory} has no chat template; copy chat_template.jinja from the checkpoint")
        return cls(tokenizer, source, names)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Prompt token ids of OpenAI-style `messages` and `tools`.

        thinking: whether the answer begins inside a think block. preserve_thinking: keep the reasoning of
        earlier turns. Further `variables` go to the template. ChatError where the messages are malformed or
        the template refuses them.
        """
        _check_messages(messages)
        variables |= {
            "thinking": thinking,
            "preserve_thinking": preserve_thinking,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            guard, text = self._render({"messages": messages, **_declare(tools), **variables})
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template refuses the messages: {error.message}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatError(f"the chat template cannot render the messages: {error!r}") from None
        ids: list[int] = []
        for piece, special in self._tokenizer.split_special(text):
            if special:
                ids.append(self._tokenizer.special_id(piece))
            else:
                ids.extend(self._tokenizer.encode(piece.replace(guard, "")))
        return ids

    def _render(self, supplied: dict[str, Any]) -> tuple[str, str]:
        """The guard character, and the rendered text with the guards still in it."""
        used = set(self._source)
        for text in _strings(supplied):
            for start in range(0, len(text), _SLICE):  # one call for a long text would stop all other threads
                used.update(text[start : start + _SLICE])
        guard = next((char for char in map(chr, chain(*_GUARDS)) if char not in used), None)
        if guard is None:
            raise ValueError("the messages use every private code point")

        def guarded(text: str) -> str:
            for char in self._ends:
                text = text.replace(char, guard + char + guard)
            return text

        return guard, self._template.render(_map_strings(supplied, guarded))


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise ChatError("messages is empty; send at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"messages[{index}] must be an object with a string 'role'")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, Sequence):
            raise ChatError(f"messages[{index}].content must be a string, null or a list of text parts")
        for position, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ChatError(
                    f"messages[{index}].content[{position}] is of type {kind!r}; this engine reads text "
                    "parts only, {'type': 'text', 'text': ...}"
                )


def _declare(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Template variables for the tools: `tools`, and `tools_ts_str` where they have a TypeScript form.

    As Kimi's own tokenizer does: keys sorted at every level; JSON where TypeScript cannot express a schema.
    """
    if not tools:
        return {"tools": None}
    declared = _sort_keys(tools)
    try:
        return {"tools": declared, "tools_ts_str": declare_tools(declared)}
    except ToolSchemaError as error:
        _log.warning("%s; the tools are declared as JSON", error)
        return {"tools": declared}


def _sort_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sort_keys(value[key]) for key in sorted(value)}
    return [_sort_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of `value` with every string, keys of mappings included, replaced by `change` of it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list | tuple) else value


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up for chat templates."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if ensure_ascii:  # it would escape the guards, which could then not be found again
            raise jinja2.TemplateRuntimeError("tojson with ensure_ascii=true is not supported")
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
