"""A paged latent pool and passes over it, for tests of `mla_prepare`, `mla_attention` and `kv_compact`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from plugins.core.plugin import get_plugin

HEADS, NOPE, ROPE, VALUE, LATENT, Q_RANK, HIDDEN = 4, 8, 8, 12, 16, 24, 48
PAGE, PAGES, REQUESTS, LAYERS, LAYER, WORDS = 4, 12, 4, 2, 1, 2
ROPE_VALUES = {
    "rope_theta": 50000.0,
    "rope_factor": 64.0,
    "rope_original_max": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_amplitude": 1.0,
}


def attrs(form: str, scale: float = 1.0) -> dict:
    """Attributes of both operators."""
    return {
        "layer": LAYER,
        "num_heads": HEADS,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "eps": 1e-6,
        "form": form,
        "softmax_scale": scale,
        "page_size": PAGE,
        **ROPE_VALUES,
    }


class Oracle:
    """transformers' attention layer of a tiny K2 configuration."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = DeepseekV3Config(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            q_lora_rank=Q_RANK,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            max_position_embeddings=262144,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            attn_implementation="eager",
        )
        self.rotary = DeepseekV3RotaryEmbedding(config)
        self.layer = DeepseekV3Attention(config, 0).to(dtype).requires_grad_(False)
        for name, parameter in self.layer.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)

    def run(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """[N, HIDDEN] of a causal sequence x [N, HIDDEN] at positions start, start + 1, ..."""
        length = len(x)
        hidden = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        positions = torch.arange(start, start + length)[None]
        return self.layer(x[None], self.rotary(x[None], positions), hidden[None, None])[0][0]


@dataclass
class Rows:
    """New rows of one request: inputs, depth and visibility among themselves (None: a chain)."""

    x: torch.Tensor
    depth: list[int] | None = None
    visible: torch.Tensor | None = None


class Engine:
    """The operators over a poisoned pool with shuffled pages; `context` committed tokens a request."""

    def __init__(self, oracle: Oracle, form: str, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        layer = oracle.layer
        self.oracle, self.dtype = oracle, dtype
        self.prepare = get_plugin("mla_prepare").reference(attrs(form), None)  # type: ignore[arg-type]
        self.attend = get_plugin("mla_attention").reference(attrs(form, layer.scaling), None)  # type: ignore[arg-type]
        heads = layer.kv_b_proj.weight.to(dtype).view(HEADS, NOPE + VALUE, LATENT)
        self.w_uk, self.w_uv = heads[:, :NOPE].contiguous(), heads[:, NOPE:].contiguous()
        pages = torch.randperm(REQUESTS * PAGES, generator=generator) + 1
        self.table = pages.view(REQUESTS, PAGES).to(torch.int32)
        self.pool = torch.full((LAYERS, (REQUESTS * PAGES + 1) * PAGE, LATENT + ROPE), torch.nan, dtype=dtype)
        self.context = torch.zeros(REQUESTS, dtype=torch.int32)
        self.row_slot = self.first_row = torch.zeros(0, dtype=torch.int32)

    def run(self, work: dict[int, Rows], masked: bool, padding: int = 0) -> dict[int, torch.Tensor]:
        """One pass of `work` (request -> rows); outputs through o_proj. Rows are not committed."""
        total = sum(len(rows.x) for rows in work.values()) + padding
        self.row_slot = torch.zeros(total, dtype=torch.int32)
        positions, owner = torch.zeros(total, dtype=torch.int32), torch.full((total,), -1, dtype=torch.int32)
        self.first_row, counts = (torch.zeros(REQUESTS, dtype=torch.int32) for _ in range(2))
        mask = torch.zeros(total, WORDS, dtype=torch.int32)
        x = torch.randn(total, HIDDEN, dtype=self.dtype)
        first = 0
        for request, rows in work.items():
            count, context = len(rows.x), int(self.context[request])
            own = slice(first, first + count)
            x[own], owner[own] = rows.x, request
            depth = torch.tensor(rows.depth) if rows.depth is not None else torch.arange(count)
            positions[own] = (context + depth).to(torch.int32)
            address = context + torch.arange(count)
            self.row_slot[own] = self.table[request, address // PAGE] * PAGE + (address % PAGE).to(torch.int32)
            visible = rows.visible if rows.visible is not None else torch.ones(count, count).tril().bool()
            for i, j in visible.nonzero().tolist():
                bit = 1 << (j % 32)
                mask[first + i, j // 32] |= bit - (1 << 32) if bit >> 31 else bit
            self.first_row[request], counts[request] = first, count
            first += count
        layer = self.oracle.layer
        qkv_a = torch.cat((layer.q_a_proj(x), layer.kv_a_proj_with_mqa(x)), dim=1)
        norms = (layer.q_a_layernorm.weight, layer.kv_a_layernorm.weight)
        q = self.prepare(qkv_a, *norms, layer.q_b_proj.weight, self.w_uk, positions, self.row_slot, self.pool)
        state = (owner, self.first_row, counts, self.context, self.table, self.pool)
        shown = mask.view(torch.uint32) if masked else None
        out = self.attend(q, self.w_uk, self.w_uv, *state, shown)
        assert not out[first:].any()  # padding
        return {
            request: layer.o_proj(out[int(self.first_row[request]) :][: len(rows.x)]) for request, rows in work.items()
        }

    def prefill(self, request: int, x: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Run x as one chunk without a mask and commit it."""
        if not len(x):
            return x
        out = self.run({request: Rows(x)}, masked=False, padding=padding)[request]
        self.context[request] += len(x)
        return out


def random_tree(nodes: int, generator: torch.Generator) -> tuple[list[int], Rows]:
    """(parents, rows) of a random tree with a root and `nodes` nodes, parents before children."""
    parents = [-1] + [int(torch.randint(i, (1,), generator=generator)) for i in range(1, nodes + 1)]
    depth, visible = [0] * (nodes + 1), torch.eye(nodes + 1, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        depth[node] = depth[parent] + 1
        visible[node] |= visible[parent]
    x = torch.randn(nodes + 1, HIDDEN, generator=generator, dtype=torch.float64)
    return parents, Rows(x, depth, visible)


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
