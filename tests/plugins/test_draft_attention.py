"""`draft_kv_append` and `draft_attention` against transformers' Qwen3Attention."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from plugins.core.plugin import PluginError, get_plugin
from plugins.core.spec import TensorSpec

HIDDEN, HEADS, GROUPS, DIM, BLOCK, PAGE, PAGES, LAYERS, LAYER = 40, 6, 2, 16, 4, 4, 10, 2, 1
SLOTS = (3 * PAGES + 1) * PAGE
AMPLITUDE = 1.4158883


def attrs(window: int = 0, amplitude: float = AMPLITUDE) -> dict:
    """Attributes of both operators."""
    return {
        "layer": LAYER,
        "num_heads": HEADS,
        "num_kv_heads": GROUPS,
        "head_dim": DIM,
        "block_size": BLOCK,
        "sliding_window": window,
        "page_size": PAGE,
        "eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_factor": 64.0,
        "rope_original_max": 4096,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "rope_amplitude": amplitude,
    }


class Oracle:
    """transformers' attention layer; YaRN without mscale, whose amplitude is 0.1 ln(64) + 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=DIM,
            rms_norm_eps=1e-5,
            max_position_embeddings=262144,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            attn_implementation="eager",
        )
        self.rotary = Qwen3RotaryEmbedding(config)
        assert self.rotary.attention_scaling == pytest.approx(AMPLITUDE, abs=1e-7)
        self.layer = Qwen3Attention(config, 0).to(dtype).requires_grad_(False)
        for name, parameter in self.layer.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)

    def block(self, context: torch.Tensor, block: torch.Tensor, seen: int) -> torch.Tensor:
        """Outputs of the block rows over the last `seen` context rows and the whole block, without
        causality."""
        x = torch.cat((context, block))
        mask = torch.zeros(len(x), len(x), dtype=x.dtype)
        mask[:, : len(context) - seen] = -torch.inf
        positions = self.rotary(x[None], torch.arange(len(x))[None])
        return self.layer(x[None], positions, mask[None, None])[0][0, len(context) :]


class Drafter:
    """The two operators over a poisoned pool with shuffled pages, for three requests."""

    def __init__(self, oracle: Oracle, dtype: torch.dtype, window: int = 0) -> None:
        self.layer, self.dtype = oracle.layer, dtype
        self.table = (torch.randperm(3 * PAGES) + 1).view(3, PAGES).to(torch.int32)
        self.pool = torch.full((LAYERS, 2, SLOTS, GROUPS, DIM), torch.nan, dtype=dtype)
        self.context = torch.zeros(3, dtype=torch.int32)
        self.append_op = get_plugin("draft_kv_append").reference(attrs(window), None)  # type: ignore[arg-type]
        self.attend_op = get_plugin("draft_attention").reference(attrs(window), None)  # type: ignore[arg-type]

    def append(self, work: dict[int, torch.Tensor], start: int | None = None, padding: int = 2) -> None:
        """Append context rows of several requests in one call, padding rows behind."""
        rows, positions, slots = [], [], []
        for request, x in work.items():
            first = int(self.context[request]) if start is None else start
            position = torch.arange(first, first + len(x), dtype=torch.int32)
            rows.append(x)
            positions.append(position)
            slots.append(self.table[request, position // PAGE] * PAGE + position % PAGE)
            self.context[request] = first + len(x)
        x = torch.cat([*rows, torch.full((padding, HIDDEN), torch.nan, dtype=self.dtype)])
        kv = torch.cat((self.layer.k_proj(x), self.layer.v_proj(x)), dim=1)
        pad = torch.zeros(padding + 3, dtype=torch.int32)  # buffers are longer than the pass
        self.append_op(kv, self.layer.k_norm.weight, torch.cat([*positions, pad]), torch.cat([*slots, pad]), self.pool)

    def attend(self, x: torch.Tensor, requests: list[int], start: list[int]) -> torch.Tensor:
        """Outputs through o_proj [B, BLOCK, HIDDEN] for block inputs x of the same shape."""
        flat = x.reshape(-1, HIDDEN)
        qkv = torch.cat([projection(flat) for projection in self.projections()], dim=1)
        blocks, starts = torch.tensor(requests, dtype=torch.int32), torch.tensor(start, dtype=torch.int32)
        norms = (self.layer.q_norm.weight, self.layer.k_norm.weight)
        out = self.attend_op(qkv, *norms, blocks, self.context, starts, self.table, self.pool)
        return self.layer.o_proj(out).view(x.shape)

    def projections(self) -> tuple[torch.nn.Module, ...]:
        return self.layer.q_proj, self.layer.k_proj, self.layer.v_proj


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.float64, 2e-6)])
@pytest.mark.parametrize("window", [0, 5])
def test_blocks_agree_with_transformers(dtype: torch.dtype, tolerance: float, window: int) -> None:
    """Unequal contexts, one empty, appended in portions; blocks out of request order with padding between."""
    oracle = Oracle(dtype)
    drafter = Drafter(oracle, dtype, window)
    context = {r: torch.randn(n, HIDDEN, dtype=dtype) for r, n in ((0, 23), (1, 0), (2, 7))}
    drafter.append({0: context[0][:9], 2: context[2][:1]})
    drafter.append({0: context[0][9:], 1: context[1], 2: context[2][1:]}, padding=0)
    blocks = torch.randn(4, BLOCK, HIDDEN, dtype=dtype)
    order = [2, -1, 0, 1]
    blocks[1] = torch.nan
    out = drafter.attend(blocks, order, [0, 0, 0])
    assert not out[1].any()
    for index, request in enumerate(order):
        if request >= 0:
            length = len(context[request])
            seen = min(length, window) if window else length
            expected = oracle.block(context[request], blocks[index], seen)
            torch.testing.assert_close(out[index], expected, atol=tolerance, rtol=1e-4)
    assert drafter.pool[1 - LAYER].isnan().all()
    drafter.pool[:, :, :PAGE] = 1e30  # page 0 holds padding rows; nothing reads it
    assert torch.equal(drafter.attend(blocks, order, [0, 0, 0]), out)


@pytest.mark.parametrize("start", [1, 6, 11])
def test_context_before_draft_start_is_not_seen(start: int) -> None:
    """A prefix restored without draft KV: its slots still hold NaN."""
    oracle = Oracle(torch.float32)
    drafter = Drafter(oracle, torch.float32)
    context, block = torch.randn(11, HIDDEN), torch.randn(1, BLOCK, HIDDEN)
    drafter.context[1] = start
    drafter.append({1: context[start:]}, start=start)
    drafter.context[1] = 11
    out = drafter.attend(block, [1], [0, start, 0])
    expected = oracle.block(context, block[0], 11 - start)
    torch.testing.assert_close(out[0], expected, atol=5e-5, rtol=1e-4)


def test_window_and_draft_start_apply_together() -> None:
    oracle = Oracle(torch.float64)
    x, block = (
        torch.randn(10, HIDDEN, dtype=torch.float64),
        torch.randn(1, BLOCK, HIDDEN, dtype=torch.float64),
    )
    wide, windowed = (Drafter(oracle, torch.float64, window) for window in (0, 6))
    windowed.table, windowed.pool = wide.table, wide.pool
    wide.append({0: x})
    windowed.context[0] = 10
    for start in (2, 4, 8, 10):
        latest = max(start, 4)
        narrow, reference = (d.attend(block, [0], [s, 0, 0]) for d, s in ((windowed, start), (wide, latest)))
        torch.testing.assert_close(narrow, reference, atol=1e-14, rtol=0)


def test_block_rows_see_later_rows_of_the_block() -> None:
    drafter = Drafter(Oracle(torch.float32), torch.float32)
    block = torch.randn(1, BLOCK, HIDDEN)
    before = drafter.attend(block, [2], [0, 0, 0])
    block[0, -1] += 1
    assert ((drafter.attend(block, [2], [0, 0, 0]) - before).abs().amax(-1) > 1e-4).all()


def test_all_padding_is_zero() -> None:
    drafter = Drafter(Oracle(torch.float32), torch.float32)
    assert not drafter.attend(torch.randn(2, BLOCK, HIDDEN), [-1, -1], [0, 0, 0]).any()


def test_infer_and_cost() -> None:
    append, attend = get_plugin("draft_kv_append"), get_plugin("draft_attention")
    pool = TensorSpec((LAYERS, 2, SLOTS, GROUPS, DIM), "bfloat16")
    norm, ids = TensorSpec((DIM,), "bfloat16"), TensorSpec((20,), "int32")
    kv = TensorSpec((7, 2 * GROUPS * DIM), "bfloat16")
    assert append.infer(attrs(), [kv, norm, ids, ids, pool]) == []
    qkv = TensorSpec((3 * BLOCK, (HEADS + 2 * GROUPS) * DIM), "bfloat16")
    state = [TensorSpec((3,), "int32")] * 3
    inputs = [qkv, norm, norm, *state, TensorSpec((3, PAGES), "int32"), pool]
    (out,) = attend.infer(attrs(), inputs)
    assert out == TensorSpec((3 * BLOCK, HEADS * DIM), "bfloat16")
    costs = [attend.cost(attrs(window), inputs, [out], 100) for window in (0, 10)]
    assert costs[0][0] - costs[1][0] == 3 * 90 * 2 * GROUPS * DIM * 2
    assert costs[0][1] - costs[1][1] == 3 * BLOCK * HEADS * DIM * 4 * 90
    for change in (
        {"layer": 2},
        {"num_kv_heads": 4},
        {"head_dim": 8},
        {"block_size": 5},
        {"page_size": 5},
        {"sliding_window": -1},
    ):
        with pytest.raises(PluginError, match="draft_attention: .*expected .*, found"):
            attend.infer(attrs() | change, inputs)
    for index, wrong in ((0, qkv), (2, TensorSpec((6,), "int32")), (4, None)):
        operands = [kv, norm, ids, ids, pool]
        operands[index] = wrong  # type: ignore[call-overload]
        with pytest.raises(PluginError, match=f"draft_kv_append: {append.inputs[index]}: expected .*, found"):
            append.infer(attrs(), operands)
