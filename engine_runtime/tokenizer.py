"""Kimi's tokenizer: byte-level BPE from `tiktoken.model`, special tokens from `tokenizer_config.json`.

The vocabulary has N base ranks (0 .. N-1) followed by 256 special slots (N .. N+255). Names of special slots
come from `added_tokens_decoder`; a slot without a name is `<|reserved_token_{id}|>`. Text is never turned
into special tokens unless the caller asks for it: what a user types stays text.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

NUM_SPECIAL_SLOTS = 256
MAX_PIECE_CHARS = 400_000
"""Longest text that goes to the BPE at once; longer text makes tiktoken's regex engine give up."""
MAX_RUN_CHARS = 25_000
"""Longest run of whitespace, or of non-whitespace, in one piece; BPE is quadratic in the length of a run."""

# Kimi's split pattern, in the syntax of the Rust regex crate (`&&` is class intersection).
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TokenizerError(Exception):
    """The tokenizer's files or an argument are wrong; the message is one sentence."""


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Ranks of `tiktoken.model` (a line is: base64 of the token's bytes, space, rank).

    Not tiktoken's own loader: that one keeps a copy in the temporary directory keyed by path alone, so a
    changed file would not be seen.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise TokenizerError(f"{path} is missing; copy tiktoken.model from the checkpoint") from None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{path} line {number} is not 'base64 rank'") from None
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise TokenizerError(f"{path} has no token for byte 0x{missing[0]:02x}; the file is not a byte-level BPE")
    if set(ranks.values()) != set(range(len(ranks))):
        raise TokenizerError(f"{path} must hold each rank 0..{len(ranks) - 1} once; the file is damaged")
    return ranks


def _read_special_tokens(path: Path, num_base: int) -> dict[str, int]:
    """Name -> id of the 256 special slots behind `num_base` base ranks."""
    try:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        names = {int(token_id): entry["content"] for token_id, entry in added.items()}
    except FileNotFoundError:
        raise TokenizerError(f"{path} is missing; copy tokenizer_config.json from the checkpoint") from None
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TokenizerError(f"{path} must be JSON with added_tokens_decoder: {{id: {{content: name}}}}") from None
    slots = range(num_base, num_base + NUM_SPECIAL_SLOTS)
    for token_id in names:
        if token_id not in slots:
            raise TokenizerError(
                f"{path} names special token {token_id}, but the slots behind the {num_base} ranks of "
                f"tiktoken.model are {slots.start}..{slots.stop - 1}; the two files are not of one checkpoint"
            )
    special = {names.get(token_id, f"<|reserved_token_{token_id}|>"): token_id for token_id in slots}
    if len(special) != NUM_SPECIAL_SLOTS:
        raise TokenizerError(f"{path} gives one name to two special tokens")
    return special


def _split_runs(text: str) -> Iterator[str]:
    """Cuts `text` so that no piece has more than MAX_RUN_CHARS whitespace or non-whitespace characters in a
    row."""
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    start = 0
    for run in re.finditer(r"\s+|\S+", text):
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield text[start:cut]
            start = cut
    yield text[start:]


class Tokenizer:
    """Text <-> token ids. Build with `Tokenizer.load`.

    `special_tokens` maps each special token's name to its id; `stop_ids` are the ids that end a turn.
    """

    def __init__(self, ranks: dict[bytes, int], special_tokens: dict[str, int]) -> None:
        self.special_tokens = special_tokens
        self.num_base_tokens = len(ranks)
        self.vocab_size = len(ranks) + len(special_tokens)
        self._bpe = tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens
        )
        names = sorted(special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self.stop_ids = frozenset((self.special_id("<|im_end|>"), self.special_id("[EOS]")))

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Reads `tiktoken.model` and `tokenizer_config.json` of `directory`; TokenizerError where they are
        unfit."""
        directory = Path(directory)
        ranks = _read_ranks(directory / "tiktoken.model")
        return cls(ranks, _read_special_tokens(directory / "tokenizer_config.json", len(ranks)))

    def special_id(self, name: str) -> int:
        """Id of a special token by its name, e.g. `<|im_end|>`."""
        try:
            return self.special_tokens[name]
        except KeyError:
            raise TokenizerError(
                f"the tokenizer has no special token {name!r}; name it in tokenizer_config.json"
            ) from None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is one of the 256 special slots."""
        return self.num_base_tokens <= token_id < self.vocab_size

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS.

        The names of special tokens inside `text` are plain text, unless `allow_special`.
        """
        if not allow_special:
            return self._encode_text(text)
        ids: list[int] = []
        for piece, special in self.split_special(text):
            ids.extend([self.special_tokens[piece]] if special else self._encode_text(piece))
        return ids

    def split_special(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cuts `text` at the names of special tokens: pairs (piece, is it a special token's name)."""
        # re.split with one group: odd entries are the matches
        for index, piece in enumerate(self._special_pattern.split(text)):
            if piece:
                yield piece, index % 2 == 1

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(text), MAX_PIECE_CHARS):
            for piece in _split_runs(text[start : start + MAX_PIECE_CHARS]):
                ids.extend(self._bpe.encode_ordinary(piece))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; for a special token, its name in UTF-8."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside the vocabulary 0..{self.vocab_size - 1}")
        return self._bpe.decode_single_token_bytes(token_id)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves special tokens out."""
        kept = (i for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def stream(self, skip_special: bool = False) -> StreamDecoder:
        """A decoder for one sequence whose tokens arrive one after another."""
        return StreamDecoder(self, skip_special)


class StreamDecoder:
    """Decodes a growing sequence; the joined results equal `Tokenizer.decode` of the whole sequence.

    A token may end inside a UTF-8 character: its bytes are held back until the character is complete, so no
    piece ever holds half a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty."""
        kept = (i for i in ids if not (self._skip_special and self._tokenizer.is_special(i)))
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, kept)))

    def flush(self) -> str:
        """Ends the sequence: what is still held back (an unfinished character) as U+FFFD, or ""."""
        return self._utf8.decode(b"", final=True)
