"""Train the byte-level BPE of K2-Nano and write it as a tiktoken file; load it with Kimi's special slots.

    python tokenizer.py --work ../work

Kimi's layout, scaled down: ranks 0..BASE-1 are BPE ranks (the 256 single bytes among them), BASE..BASE+255 are the
256 special slots with the offsets of the real vocabulary (real id 163584 + i becomes BASE + i).
"""

from __future__ import annotations

import argparse
import base64
import json
import random
from pathlib import Path

import tiktoken

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parent / "checkpoint"
BASE = 3840
SAMPLE_BYTES = 40_000_000  # text used to count merges
PATTERN = "|".join([  # Kimi's split pattern, in the syntax shared by Rust regex (tiktoken) and Oniguruma (tokenizers)
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip


def special_tokens() -> dict[str, int]:
    """Text -> id of all 256 special slots; slots without a name in tokenizer_config.json are reserved tokens."""
    named = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    names = {int(i): entry["content"] for i, entry in named.items()}
    return {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(BASE, BASE + 256)}


def load() -> tiktoken.Encoding:
    """The tokenizer of the checkpoint, from tiktoken.model and tokenizer_config.json."""
    lines = (CHECKPOINT / "tiktoken.model").read_text().split("\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    return tiktoken.Encoding("k2-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens())


def train(texts: list[str]) -> list[bytes]:
    """BPE tokens in rank order: 256 bytes, then the merges in the order in which they were learnt."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=BASE, initial_alphabet=alphabet, show_progress=False)
    )
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    hidden = [b for b in range(256) if b not in visible]
    byte_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    by_id = sorted(model.get_vocab().items(), key=lambda item: item[1])
    return [bytes(byte_of[ch] for ch in token) for token, _ in by_id]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parent / "work", help="folder that data.py filled")
    args = parser.parse_args()
    with (args.work / "corpus.jsonl").open() as lines:
        docs = [d["text"] for d in map(json.loads, lines) if d["split"] == "train"]
    random.Random(0).shuffle(docs)
    sample, size = [], 0
    for text in docs:
        sample.append(text)
        size += len(text)
        if size > SAMPLE_BYTES:
            break
    tokens = train(sample)
    if len(tokens) != BASE or len(set(tokens)) != BASE:
        raise SystemExit(f"expected {BASE} distinct tokens, got {len(tokens)} ({len(set(tokens))} distinct)")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (CHECKPOINT / "tiktoken.model").write_text("".join(lines))
    encoding = load()
    check = docs[-200:] + ["naïve café 漢字かな \U0001f600\t\r\n\x00", "".join(map(chr, range(0x20, 0x500)))]
    ids = encoding.encode_ordinary_batch(check, num_threads=2)
    if any(encoding.decode(i) != text for i, text in zip(ids, check, strict=True)):
        raise SystemExit("the tokenizer does not round-trip")
    ratio = sum(len(t.encode()) for t in check) / sum(map(len, ids))
    print(f"round trip of {len(check)} texts; {ratio:.3f} bytes per token")


if __name__ == "__main__":
    main()
