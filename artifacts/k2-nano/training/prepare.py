"""Tokenise the corpus, add conversations, and write the token streams and the held-out prompts.

    python prepare.py --work ../work

Writes WORK/carry/train.u16.xz and WORK/carry/heldout.u16.xz (uint16 token ids, every document closed by [EOS]) and
../heldout/prompts.jsonl with the licences of its sources.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import subprocess
from pathlib import Path
from typing import Any

import chat
import numpy as np
import tokenizer

HERE = Path(__file__).resolve().parent
HELDOUT = HERE.parent / "heldout"
EOS = tokenizer.BASE + 1
CHAT_SHARE = 1.0  # share of the training modules that also give conversations
CHATS_PER_MODULE = 3
QUOTA = {"code": 128, "docs": 16, "write": 48, "think": 48, "explain": 24, "tool": 36}
PROMPT_TOKENS = (64, 400)


def write_xz(ids: list[list[int]], path: Path) -> int:
    """Join token lists, each closed by [EOS], into a compressed uint16 stream; returns the number of tokens."""
    stream = np.concatenate([np.array([*i, EOS], dtype=np.uint16) for i in ids])
    raw = path.with_suffix("")
    stream.tofile(raw)
    subprocess.run(["xz", "-T2", "-4", "--force", str(raw)], check=True)
    return stream.size


def training_chats(docs: list[dict[str, str]], rng: random.Random) -> list[str]:
    """Rendered conversations from a share of the training modules."""
    out = []
    for doc in docs:
        if doc["path"].endswith(".py") and rng.random() < CHAT_SHARE:
            chats = chat.conversations(doc["text"], doc["path"], rng, CHATS_PER_MODULE)
            out += [chat.render_training(c) for _, c in chats]
    return out


def chat_prompt(kind: str, talk: dict[str, Any]) -> dict[str, Any]:
    """The prompt part of a conversation: everything before the answer that the model should give."""
    cut = -1 if kind != "tool" or len(talk["messages"][-1]["content"]) % 2 else -3
    prompt = {"messages": talk["messages"][:cut], "thinking": talk["thinking"]}
    return prompt | ({"tools": talk["tools"]} if talk["tools"] else {})


def heldout_prompts(docs: list[dict[str, str]], rng: random.Random) -> list[dict[str, Any]]:
    """Prompts of all kinds from held-out documents, each of 64 to 400 tokens once rendered."""
    encoding = tokenizer.load()
    left, prompts = dict(QUOTA), []

    def add(kind: str, doc: dict[str, str], body: dict[str, Any], text: str) -> None:
        tokens = len(encoding.encode(text, allowed_special="all"))
        if left[kind] and PROMPT_TOKENS[0] <= tokens <= PROMPT_TOKENS[1]:
            left[kind] -= 1
            number = QUOTA[kind] - left[kind]
            entry = {"id": f"{kind}-{number:03d}", "kind": kind, "source": f"{doc['package']}:{doc['path']}"}
            prompts.append(entry | body)

    for doc in [d for _ in range(12) for d in rng.sample(docs, len(docs))]:
        kind = "code" if doc["path"].endswith(".py") else "docs"
        ids = encoding.encode_ordinary(doc["text"])
        if len(ids) > PROMPT_TOKENS[1] + 200:
            start = rng.choice([0, rng.randrange(len(ids) - PROMPT_TOKENS[1] - 100)])
            text = encoding.decode(ids[start : start + rng.randint(*PROMPT_TOKENS)]).replace("\ufffd", "")
            add(kind, doc, {"text": text}, text)
        if kind == "code":
            for chat_kind, talk in chat.conversations(doc["text"], doc["path"], rng, 2):
                body = chat_prompt(chat_kind, talk)
                add(chat_kind, doc, body, chat.render(**body, add_generation_prompt=True))
    print("prompts still missing:", {k: n for k, n in left.items() if n})
    return sorted(prompts, key=lambda p: p["id"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parent / "work", help="folder that data.py filled")
    args = parser.parse_args()
    carry = args.work / "carry"
    carry.mkdir(exist_ok=True)
    with (args.work / "corpus.jsonl").open() as lines:
        docs = [json.loads(line) for line in lines]
    train = [d for d in docs if d["split"] == "train"]
    held = [d for d in docs if d["split"] == "heldout"]
    rng = random.Random(1)

    prompts = heldout_prompts(held, rng)
    HELDOUT.mkdir(exist_ok=True)
    (HELDOUT / "prompts.jsonl").write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts))
    used = {p["source"].split(":")[0] for p in prompts}
    licences = json.loads((args.work / "licences.json").read_text())
    kept = {name: licence for name, licence in licences.items() if name.split("==")[0] in used}
    (HELDOUT / "licences.json").write_text(json.dumps(kept, indent=2) + "\n")

    encoding = tokenizer.load()
    plain = encoding.encode_ordinary_batch([d["text"] for d in held], num_threads=2)
    count = {"heldout": write_xz(plain, carry / "heldout.u16.xz")}
    talks = training_chats(train, rng)
    ids = encoding.encode_ordinary_batch([d["text"] for d in train], num_threads=2)
    ids += encoding.encode_batch(talks, num_threads=2, allowed_special="all")
    rng.shuffle(ids)
    count["train"] = write_xz(ids, carry / "train.u16.xz")
    heldout_bytes = sum(len(d["text"].encode()) for d in held)
    with lzma.open(carry / "heldout.u16.xz") as stream:
        assert len(stream.read()) == 2 * count["heldout"]
    summary = {"tokens": count, "heldout_bytes": heldout_bytes, "chats": len(talks), "prompts": len(prompts)}
    (carry / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(summary)


if __name__ == "__main__":
    main()
