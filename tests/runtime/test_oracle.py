"""Logits and hidden states equal transformers' DeepseekV3 in float32, however the prompt is cut into passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builder.build import make_plans, open_source
from builder.config import load_draft_config
from builder.options import BuildOptions
from engine_runtime.executor.cpu import CpuExecutor
from plugins.core.packing import get_packer
from plugins.core.plan import Plan
from plugins.core.spec import DTYPES
from tests.checkpoints import (
    make_tiny_checkpoint,
    make_tiny_draft,
    oracle_hidden_states,
    oracle_logits,
    oracle_model,
)
from tests.runtime.passes import OneRequest

NANO = Path(__file__).parents[2] / "artifacts" / "k2-nano"
TOLERANCE = 1e-4  # relative to the largest value
PROMPT = 70
# a chunk above 170 rows takes the expanded form of MLA, the others the absorbed one
CHUNKS = {"one chunk": [PROMPT], "ragged": [1, 31, 7, 20, 11], "token by token": [1] * PROMPT}


def build_plans_and_weights(directory: Path, draft: Path, **options: object) -> tuple[list[Plan], list[dict]]:
    """Plans and packed weights of all ranks, in memory."""
    chosen = BuildOptions(arch="cpu", max_context=512, max_requests=2, verify_buckets=(1, 16, 128), **options)
    source = open_source(directory, draft, chosen, lambda message: None)
    plans = make_plans(source, chosen, lambda message: None)
    return plans, [pack(plan, source.read) for plan in plans]


def pack(plan: Plan, read) -> dict[str, np.ndarray]:
    weights = {}
    for name, weight in plan.weights.items():
        chunks = get_packer(weight.recipe.packer).pack(weight.recipe, read, plan.tp, plan.rank)
        data = b"".join(chunk.tobytes() for chunk in chunks)
        weights[name] = np.frombuffer(data, DTYPES[weight.spec.dtype][1]).reshape(weight.spec.shape)
    return weights


def close(found: np.ndarray, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    assert scale > 0
    assert np.abs(found - expected).max() <= TOLERANCE * scale


@pytest.fixture(scope="module", params=["tiny", "real head sizes", "k2-nano"])
def case(request, tmp_path_factory):
    """(executor, oracle model, token ids, tap layers) for a checkpoint."""
    directory, draft = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("draft")
    if request.param == "k2-nano":
        if not (NANO / "checkpoint" / "model.safetensors.index.json").exists():
            pytest.skip("artifacts/k2-nano/checkpoint is not there")
        directory, draft = NANO / "checkpoint", NANO / "draft"
    else:
        sizes = {}
        if request.param == "real head sizes":
            sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        config = make_tiny_checkpoint(directory, seed=3, **sizes)
        make_tiny_draft(draft, config, seed=4)
    plans, weights = build_plans_and_weights(directory, draft, prefill_chunk=256)
    model = oracle_model(directory)
    ids = np.random.default_rng(1).integers(0, plans[0].settings["model"]["vocab_size"] - 8, 300)
    executor = CpuExecutor(plans[0], weights[0])
    return executor, model, ids, draft


@pytest.fixture(scope="module")
def expected(case):
    """Logits [300, V] and residual streams of the oracle over the whole token string."""
    _, model, ids, draft = case
    hidden = oracle_hidden_states(model, ids)
    layers = load_draft_config(draft).target_layer_ids
    return oracle_logits(model, ids).numpy(), [hidden[layer].numpy() for layer in layers]


@pytest.mark.parametrize("cut", CHUNKS)
def test_prefill_equals_transformers(case, expected, cut) -> None:
    executor, _, ids, _ = case
    logits, taps = expected
    request = OneRequest(executor)
    done = 0
    for count in CHUNKS[cut]:
        executor.poison(f"prefill[{min(b for b in executor.plan.buckets('prefill') if b >= count)}]")
        found, found_taps = request.prefill(ids[done : done + count])
        close(found, logits[done + count - 1])
        for tap, hidden in zip(found_taps, taps, strict=True):
            close(tap, hidden[done : done + count])
        done += count


def test_expanded_mla_equals_transformers_and_absorbed(case, expected) -> None:
    """A chunk of 256 rows runs the expanded form; what follows reads its latents in the absorbed form."""
    executor, _, ids, _ = case
    logits, taps = expected
    forms = {s.attrs["form"] for s in executor.plan.phases["prefill[256]"].steps if s.plugin == "mla_attention"}
    assert forms == {"expanded"}
    request = OneRequest(executor)
    found, found_taps = request.prefill(ids[:250])
    close(found, logits[249])
    for tap, hidden in zip(found_taps, taps, strict=True):
        close(tap, hidden[:250])
    found, _ = request.prefill(ids[250:270])
    close(found, logits[269])


def test_verify_rows_equal_transformers(case, expected) -> None:
    executor, _, ids, _ = case
    logits, taps = expected
    request = OneRequest(executor)
    request.prefill(ids[:40])
    done = 40
    for count in (1, 13, 100):
        executor.poison(f"verify[{min(b for b in executor.plan.buckets('verify') if b >= count)}]")
        found, found_taps = request.verify(ids[done : done + count])
        close(found, logits[done : done + count])
        for tap, hidden in zip(found_taps, taps, strict=True):
            close(tap, hidden[done : done + count])
        done += count
