"""A synthetic Kimi-style vocabulary for tests: 256 bytes, some merges, 256 special slots."""

import base64
import json
from pathlib import Path

# offsets of the named special tokens behind the base ranks, as in Kimi K2.6
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
MERGES = (
    b"th",
    b"the",
    b" the",
    b"\n\n",
    b"in",
    b"ing",
    "é".encode(),
    b"\xe4\xb8",
    "中".encode(),
    b"<|",
    b"|>",
)


def write_vocabulary(directory: Path, template: str | None = None) -> int:
    """Writes tiktoken.model, tokenizer_config.json and, if given, chat_template.jinja; returns the base
    size."""
    tokens = [bytes((byte,)) for byte in range(256)] + list(MERGES)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(len(tokens) + offset): {"content": name} for name, offset in SPECIAL_OFFSETS.items()}
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": {"content": "[EOS]"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return len(tokens)
