"""The persistent buffers of an engine: every fact that changes between passes, at a fixed address.

A captured graph replays with fixed arguments, so whatever varies (tokens, tree, lengths, sampling parameters) lives
here. Axes: T token rows of a pass, R request slots, D = draft depth + 1 (the longest accepted path), N tree nodes.

Row conventions. A pass has up to T rows; a row with `row_request` -1 is padding: it must write its KV to slot 0
(page 0 is never given to a request), gets no experts, and its outputs are never read. Each request's rows are
contiguous: root first, parents before children. Row i of request r uses KV slot number `context_len[r] + i` in the
request's paged address space, while its RoPE position is `context_len[r] + depth`.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.core.spec import TensorSpec

MAX_STOP_IDS = 8
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_NAN, FINISH_DEAD_END = 0, 1, 2, 3, 4
# in place of a sampled token: the logits are no distribution; the row's mask leaves nothing that could be drawn
SAMPLED_NAN, SAMPLED_DEAD_END = -1, -2
PROMPT_TOKEN = 1 << 30  # bit of a token count: the token is in the prompt


@dataclass(frozen=True)
class Limits:
    """Sizes fixed at build time.

    max_requests: R. max_rows: most token rows of a verify pass (T). prefill_chunk: rows of a prefill pass.
    max_context: tokens of one request, prompt and output together, tree rows included. page_size: tokens a page.
    kv_pages: pages of the pool, page 0 (the dump for padding rows) included. draft_depth: 0 without a drafter.
    tree_top_k: candidates a depth that the drafter hands to the tree.
    """

    max_requests: int
    max_rows: int
    prefill_chunk: int
    max_context: int
    page_size: int
    kv_pages: int
    draft_depth: int
    tree_top_k: int

    @property
    def kv_slots(self) -> int:
        return self.kv_pages * self.page_size

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def pass_rows(self) -> int:
        return max(self.max_rows, self.prefill_chunk)

    @property
    def mask_words(self) -> int:
        return -(-self.max_rows // 32)

    @property
    def path_length(self) -> int:
        return self.draft_depth + 1


def row_buffers(limits: Limits) -> dict[str, TensorSpec]:
    """Per token row; written by `ddtree_build` (decode) or by the host (prefill)."""
    rows = limits.pass_rows
    return {
        "tokens": TensorSpec((rows,), "int32"),
        "positions": TensorSpec((rows,), "int32"),  # RoPE position: context_len + depth
        "row_request": TensorSpec((rows,), "int32"),  # request slot, -1 for padding
        "row_parent": TensorSpec((rows,), "int32"),  # row index of the parent, -1 for a root
        "row_slot": TensorSpec((rows,), "int32"),  # KV slot (page * page_size + offset), 0 for padding
        # bit j of row i: row first_row + j of the same request is visible to row i (its ancestors and itself)
        "mask": TensorSpec((limits.max_rows, limits.mask_words), "uint32"),
        "row_log_weight": TensorSpec((rows,), "float32"),  # log path probability under the drafter, 0 for a root
        "num_rows": TensorSpec((1,), "int32"),  # rows in use by the tree that was built last
    }


def request_buffers(limits: Limits) -> dict[str, TensorSpec]:
    """Per request slot; lengths and anchors are advanced on device by `ddtree_accept`."""
    requests = limits.max_requests
    nodes = limits.max_rows  # cost[r, n]: seconds of a step whose tree has n nodes, n = 0 .. max_rows - 1
    return {
        "active": TensorSpec((requests,), "int32"),  # 1 if the slot takes part in the next decode pass
        "first_row": TensorSpec((requests,), "int32"),
        "request_rows": TensorSpec((requests,), "int32"),  # rows in this pass, 0 if none
        "context_len": TensorSpec((requests,), "int32"),  # committed tokens (KV valid for positions below)
        "anchor": TensorSpec((requests,), "int32"),  # last emitted token; its KV is written in the next pass
        "block_table": TensorSpec((requests, limits.pages_per_request), "int32"),
        "remaining": TensorSpec((requests,), "int32"),  # tokens that may still be emitted
        "temperature": TensorSpec((requests,), "float32"),  # 0: greedy
        "top_p": TensorSpec((requests,), "float32"),  # 1: off
        "min_p": TensorSpec((requests,), "float32"),  # 0: off
        "top_k": TensorSpec((requests,), "int32"),  # 0: off
        "seed": TensorSpec((requests,), "int64"),
        "penalized": TensorSpec((requests,), "int32"),  # 1: the next three, token_counts and logit_bias are in force
        "presence_penalty": TensorSpec((requests,), "float32"),  # 0: off
        "frequency_penalty": TensorSpec((requests,), "float32"),  # 0: off
        "repetition_penalty": TensorSpec((requests,), "float32"),  # 1: off
        "stop_ids": TensorSpec((requests, MAX_STOP_IDS), "int32"),  # -1: unused
        "tree_budget": TensorSpec((requests,), "int32"),  # most nodes beside the root
        "tree_cost": TensorSpec((requests, nodes), "float32"),  # all zero: no cost rule, use the whole budget
        "calibration": TensorSpec((requests, max(1, limits.draft_depth)), "float32"),  # factor on q by depth
        "tree_width": TensorSpec((requests,), "int32"),  # candidates a depth, 0: all; 1: a chain
        "draft_start": TensorSpec((requests,), "int32"),  # first position that has draft KV
        "draft_requests": TensorSpec((requests,), "int32"),  # request slot of each draft block, -1 for padding
    }


def vocabulary_buffers(limits: Limits, vocab_size: int) -> dict[str, TensorSpec]:
    """What draws have to respect, token by token. Only read where `penalized` or `row_masked` says so."""
    requests, rows, words = limits.max_requests, limits.max_rows, -(-vocab_size // 32)
    return {
        # how often each token was generated, without the anchor; PROMPT_TOKEN; advanced by `ddtree_accept`
        "token_counts": TensorSpec((requests, vocab_size), "int32"),
        "logit_bias": TensorSpec((requests, vocab_size), "float32"),
        "row_masked": TensorSpec((rows,), "int32"),  # 1: only tokens of vocab_mask may follow the row
        "vocab_mask": TensorSpec((rows, words), "uint32"),  # bit t % 32 of word t // 32: token t is allowed
    }


def result_buffers(limits: Limits, vocab_size: int) -> dict[str, TensorSpec]:
    """What a pass reports; read by the host (from a pinned ring on CUDA) and by the next draft."""
    requests, path = limits.max_requests, limits.path_length
    appended = max(requests * path, limits.prefill_chunk)
    return {
        "logits": TensorSpec((limits.max_rows, vocab_size), "float32"),
        "sampled": TensorSpec((limits.max_rows,), "int32"),  # the target's token after each row, or SAMPLED_*
        "emitted": TensorSpec((requests, path), "int32"),
        "num_emitted": TensorSpec((requests,), "int32"),  # = committed rows of the path, root included
        "path_rows": TensorSpec((requests, path), "int32"),  # -1 beyond num_emitted
        "finish": TensorSpec((requests,), "int32"),  # FINISH_*
        # rows whose taps become draft context: densely, in request order; by accept, or by the host after prefill
        "append_rows": TensorSpec((appended,), "int32"),  # row index, -1 for padding
        "append_positions": TensorSpec((appended,), "int32"),
        "append_slots": TensorSpec((appended,), "int32"),  # 0 for padding
        # prefill only: which row gives the logits, and for which request and position its token is drawn
        "last_row": TensorSpec((1,), "int32"),
        "last_position": TensorSpec((1,), "int32"),
        "last_request": TensorSpec((1,), "int32"),
    }


def host_buffers(limits: Limits) -> set[str]:
    """Names of the buffers that the step loop reads or writes in every pass: all small."""
    rows, requests, results = row_buffers(limits), request_buffers(limits), result_buffers(limits, 0)
    return {*rows, *requests, *results} - {"logits"}
