"""From a checkpoint to text: real models through the builder, engine files and the runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builder.cli import main
from engine_runtime.bench import read_prompts
from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.generation import GenerationRequest
from engine_runtime.runtime import Runtime
from engine_runtime.sampling import SamplingParams
from engine_runtime.tokenizer import Tokenizer
from tests.checkpoints import make_tiny_checkpoint, make_tiny_draft

NANO = Path(__file__).parents[2] / "artifacts" / "k2-nano"
SLOTS = 8
PROMPTS = 72
TREE = Speculation("tree", 8)
TREE_16 = Speculation("tree", 16)


def build(checkpoint: Path, draft: Path, output: Path, *options: str) -> Path:
    fixed = ["--arch", "cpu", "--max-context", "512", "--max-requests", str(SLOTS)]
    assert main([str(checkpoint), "--draft", str(draft), "-o", str(output), *fixed, *options]) == 0
    return output


def texts(runtime: Runtime, prompts: list[list[int]], mode: Speculation, **params: object) -> list[tuple]:
    """(tokens, finish) of every prompt; the seed of a prompt is its index."""
    requests = [
        GenerationRequest(tuple(prompt), SamplingParams(seed=i, **params), mode)  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]
    return [(done.tokens, done.last.finish) for done in runtime.generate(requests)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A random tiny checkpoint built for 1, 2 and 4 ranks."""
    base = tmp_path_factory.mktemp("tiny")
    config = make_tiny_checkpoint(base / "checkpoint", seed=5)
    make_tiny_draft(base / "draft", config, seed=6, num_key_value_heads=4)
    return {tp: build(base / "checkpoint", base / "draft", base / f"tp{tp}", "--tp", str(tp)) for tp in (1, 2, 4)}


def test_any_number_of_ranks_gives_the_same_text(tiny) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, rng.integers(1, 60)).tolist() for _ in range(12)]
    found = {}
    for tp, engine in tiny.items():
        with Runtime.open(engine) as runtime:
            found[tp] = {
                "plain": texts(runtime, prompts, PLAIN, max_tokens=12, stop_ids=()),
                "tree": texts(runtime, prompts, TREE, max_tokens=12, stop_ids=()),
                "sampled": texts(runtime, prompts, TREE, max_tokens=12, stop_ids=(), temperature=0.8),
            }
    assert len({tokens for tokens, _ in found[1]["plain"]}) > 6
    assert found[1]["plain"] == found[1]["tree"]
    assert found[2] == found[1]
    assert found[4] == found[1]


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hold_the_same_bits(tiny, tp) -> None:
    """Hidden states, latents and everything that the drafter's tree is built from are equal on every rank."""
    with Runtime.open(tiny[tp]) as runtime:
        texts(runtime, [[5, 6, 7, 8] * 9, [9] * 20], TREE, max_tokens=10, stop_ids=())
        for name in ("taps.0", "taps.1", "kv_pool", "logits", "tokens", "row_parent", "mask"):
            ranks = runtime.read_buffer(name)
            assert np.asarray(ranks[0]).any(), name
            for other in ranks[1:]:
                assert np.array_equal(ranks[0].view(np.uint8), other.view(np.uint8)), name


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K2-Nano with room for a tree of 64 nodes in each of the slots."""
    output = tmp_path_factory.mktemp("nano") / "engine"
    return build(NANO / "checkpoint", NANO / "draft", output, "--verify-buckets", "8,16,24,40,72,136,520")


@pytest.fixture(scope="module")
def held_out(nano) -> list[list[int]]:
    """The last 4 to 27 tokens of held-out prompts: code, text, chats and tool calls in turn."""
    prompts = read_prompts(NANO / "heldout" / "prompts.jsonl", PROMPTS, Tokenizer.load(nano), str(nano))
    assert len(prompts) == PROMPTS
    return [prompt.tokens[-(4 + i % 24) :] for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("params", "budgets"),
    [
        ({"temperature": 0.0}, (0, 1, 2, 4, 8, 16, 64)),
        ({"temperature": 0.7}, (2, 16)),
        ({"temperature": 1.0, "top_p": 0.95}, (8,)),
    ],
    ids=["greedy", "0.7", "1.0 top_p"],
)
def test_speculation_on_a_real_model_changes_no_text(nano, held_out, params, budgets) -> None:
    """Chain and trees on real text. test_lossless.py has 200 prompts, and every budget at every temperature."""
    params = {"max_tokens": 8, **params}
    with Runtime.open(nano) as runtime:
        plain = texts(runtime, held_out, PLAIN, **params)
        assert len(set(plain)) > PROMPTS // 2
        assert texts(runtime, held_out, Speculation("chain", 7), **params) == plain
        for budget in budgets:
            assert texts(runtime, held_out, Speculation("tree", budget), **params) == plain, budget


def test_acceptance_of_the_shipped_drafter(nano) -> None:
    """What the model card promises, on a few held-out prompts: trees beat the chain, at least 3 tokens a pass."""
    prompts = read_prompts(NANO / "heldout" / "prompts.jsonl", 24, Tokenizer.load(nano), str(nano))
    rate = {}
    for name, mode in (("chain", Speculation("chain", 7)), ("equal", Speculation("tree", 7)), ("tree", TREE_16)):
        with Runtime.open(nano) as runtime:
            texts(runtime, [prompt.tokens[-256:] for prompt in prompts], mode, max_tokens=48)
            stats = runtime.stats
            # the first token of a prompt comes from its prefill, not from a verify pass
            rate[name] = (stats.generated_tokens - len(prompts)) / stats.passes
    assert rate["tree"] >= 3.0
    assert rate["tree"] > rate["equal"] > rate["chain"]
