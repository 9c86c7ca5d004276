"""The passes of an engine: each is one fixed-shape graph over the model and the persistent buffers.

What each pass reads and leaves behind is listed in docs/engine-format.md.
"""

from __future__ import annotations

import torch
from torch import nn

from builder.model.draft import Draft
from builder.model.ops import call
from builder.model.state import State
from builder.model.target import Target
from plugins.core.state import Limits
from plugins.sample.plugin import PER_REQUEST

# Above this many query tokens a chunk is cheaper with keys and values expanded per head than absorbed into latents
# (kernel arithmetic: 576 + 512 against 192 + 128 multiply-adds a score, plus expanding the history once).
EXPANDED_MLA_ROWS = 170


class Pass(nn.Module):
    """One fixed-shape graph. `state`: the persistent buffers it sees; `outputs`: the buffers its results go to."""

    state: State
    outputs: tuple[str, ...] = ()


class Prefill(Pass):
    """`rows` tokens of one request; the token after `last_row` is drawn (meaningful in the last chunk)."""

    def __init__(self, target: Target, buffers: dict, limits: Limits, rows: int):
        super().__init__()
        names = ("tokens", "positions", "row_request", "row_slot")
        self.state = State(buffers, limits, dict.fromkeys(names, rows))
        self.target = target
        self.form = "expanded" if rows > EXPANDED_MLA_ROWS else "absorbed"
        self.outputs = ("logits", "sampled", *(f"taps.{i}" for i in range(len(target.tap_layers))))

    def forward(self) -> tuple[torch.Tensor, ...]:
        hidden, taps = self.target(self.state, self.form, masked=False)
        last = call("gather_rows", *self.state.get("last_row"), hidden)
        logits = call("all_gather", self.target.vocabulary.rank_logits(last), tp_world=1)
        sampled = _sample(logits, self.state, self.state.get("last_position", "last_request"), [])
        return logits, sampled, *taps


class Verify(Pass):
    """`rows` token rows over all running requests, their acceptance and the compaction of the accepted KV."""

    def __init__(self, target: Target, buffers: dict, limits: Limits, rows: int):
        super().__init__()
        names = ("tokens", "positions", "row_request", "row_parent", "row_slot", "mask", "row_masked", "vocab_mask")
        self.state = State(buffers, limits, dict.fromkeys(names, rows))
        self.target = target
        self.outputs = ("logits", "sampled", *(f"taps.{i}" for i in range(len(target.tap_layers))))

    def forward(self) -> tuple[torch.Tensor, ...]:
        state = self.state
        hidden, taps = self.target(state, "absorbed", masked=True)
        logits = call("all_gather", self.target.vocabulary.rank_logits(hidden), tp_world=1)
        rows, ancestors = state.get("positions", "row_request"), state.get("tokens", "row_parent")
        sampled = _sample(logits, state, rows, ancestors)
        call(
            "ddtree_accept",
            sampled,
            *state.get("tokens", "row_parent", "positions", "row_slot", "first_row", "request_rows", "stop_ids"),
            *state.get("penalized", "context_len", "anchor", "remaining"),
            *state.get("emitted", "num_emitted", "path_rows", "finish"),
            *state.get("append_rows", "append_positions", "append_slots", "token_counts"),
            path_length=state.limits.path_length,
        )
        call("kv_compact", *state.get("path_rows", "num_emitted", "first_row", "row_slot", "kv_pool"))
        return logits, sampled, *taps


class Append(Pass):
    """Draft context: the taps of `rows` listed rows become keys and values of every drafter layer."""

    def __init__(self, draft: Draft, buffers: dict, limits: Limits, rows: int):
        super().__init__()
        self.state = State(buffers, limits, dict.fromkeys(("append_rows", "append_positions", "append_slots"), rows))
        self.draft = draft

    def forward(self) -> tuple[torch.Tensor, ...]:
        self.draft.append(self.state)
        return ()


class Root(Pass):
    """Row buffers for plain decoding: every active request's anchor, no drafts."""

    def __init__(self, buffers: dict, limits: Limits):
        super().__init__()
        self.state = State(buffers, limits, {})

    def forward(self) -> tuple[torch.Tensor, ...]:
        _build_trees(None, self.state)
        return ()


class DraftPass(Pass):
    """One DFlash block for each of `blocks` requests, then the trees of all active requests."""

    def __init__(self, target: Target, draft: Draft, buffers: dict, limits: Limits, blocks: int):
        super().__init__()
        self.state = State(buffers, limits, {"draft_requests": blocks})
        self.target, self.draft = target, draft

    def forward(self) -> tuple[torch.Tensor, ...]:
        config, vocabulary = self.draft.config, self.target.vocabulary
        tokens = call(
            "draft_tokens",
            *self.state.get("draft_requests", "anchor"),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        hidden = self.draft(vocabulary.embed(tokens), self.state)
        candidates = call(
            "draft_topk",
            vocabulary.rank_logits(hidden),
            block_size=config.block_size,
            top_k=self.state.limits.tree_top_k,
            tp_rank=0,
        )
        _build_trees(call("all_gather", candidates, tp_world=1), self.state)
        return ()


def _sample(
    logits: torch.Tensor, state: State, rows: list[torch.Tensor], ancestors: list[torch.Tensor]
) -> torch.Tensor:
    """rows: position and request of each row. ancestors: token and parent of each row, empty where what it follows is
    committed already."""
    return call(
        "sample",
        *(logits, *rows),
        *state.get(*PER_REQUEST),
        *state.get("token_counts", "logit_bias", "row_masked", "vocab_mask"),
        *ancestors,
    )


def _build_trees(candidates: torch.Tensor | None, state: State) -> None:
    limits = state.limits
    call(
        "ddtree_build",
        candidates,
        *state.get("draft_requests", "active", "anchor", "context_len", "block_table", "tree_budget"),
        *state.get("tree_cost", "calibration", "tree_width", "tokens", "positions", "row_request", "row_parent"),
        *state.get("row_slot", "mask", "row_log_weight", "first_row", "request_rows", "num_rows"),
        draft_depth=limits.draft_depth,
        top_k=limits.tree_top_k,
        page_size=limits.page_size,
        tp_world=1,
    )
