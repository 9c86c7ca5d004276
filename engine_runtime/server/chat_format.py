"""Kimi's chat format as `chat_core.ChatFormat`."""

from __future__ import annotations

from collections.abc import Sequence

from engine_runtime.chat import ChatTemplate
from engine_runtime.server.chat_core import Prepared
from engine_runtime.server.contract import ChatJob
from engine_runtime.server.conversation import render_prompt
from engine_runtime.server.kimi_parser import KimiParser
from engine_runtime.server.tool_grammar import constraint_for
from engine_runtime.tokenizer import Tokenizer


class KimiFormat:
    """Renders with the checkpoint's template, constrains and parses with Kimi's markers."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def render(self, job: ChatJob) -> Sequence[int]:
        return render_prompt(job, self._template, self._tokenizer).ids

    def prepare(self, job: ChatJob) -> Prepared:
        rendered = render_prompt(job, self._template, self._tokenizer)
        constraint = constraint_for(job, rendered, self._tokenizer)
        parser = KimiParser(
            self._tokenizer,
            starts_in_reasoning=rendered.starts_in_reasoning,
            history_calls=rendered.history_calls,
            tools=job.tools,
            parse_calls=bool(job.tools) and job.tool_choice != "none",
        )
        return Prepared(tuple(rendered.ids), constraint, parser)
