"""K2-Nano's tokenizer and chat template, Kimi's own vocabulary, and token sequences written with markers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from engine_runtime.chat import ChatTemplate
from engine_runtime.tokenizer import Tokenizer

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "kimi-tokenizer"
NANO = Path(__file__).parents[2] / "artifacts" / "k2-nano" / "checkpoint"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@cache
def _kimi() -> Tokenizer:
    return Tokenizer.load(REAL)


def real_tokenizer() -> Tokenizer:
    """Kimi's own, with its 163,840 tokens; skips the test where it is absent."""
    if not (REAL / "tiktoken.model").exists():
        pytest.skip(f"the Kimi vocabulary is not at {REAL}")
    return _kimi()


@cache
def template() -> ChatTemplate:
    return ChatTemplate.load(NANO, tokenizer())


def ids(text: str) -> list[int]:
    """Token ids of `text`, names of special tokens in it being special tokens."""
    return tokenizer().encode(text, allow_special=True)


def call(id_: str, arguments: str) -> str:
    return f"{CALL}{id_}{ARGUMENTS}{arguments}{END_CALL}"


def section(*calls: str) -> str:
    return SECTION + "".join(calls) + END_SECTION
