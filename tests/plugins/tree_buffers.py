"""Row, request and result buffers as torch tensors, for the tests of the tree operators."""

from __future__ import annotations

import numpy as np
import torch

from plugins.core.plugin import get_plugin
from plugins.core.state import Limits, request_buffers, result_buffers, row_buffers, vocabulary_buffers


class Buffers:
    """Every persistent buffer of `Limits` by name (`buffers["tokens"]`), and the operators called on them."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        self.limits = limits
        specs = row_buffers(limits) | request_buffers(limits)
        specs |= vocabulary_buffers(limits, vocab_size=8) | result_buffers(limits, vocab_size=8)
        self.tensors = {
            name: torch.full(spec.shape, 77, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()
        }
        requests, pages = limits.max_requests, limits.pages_per_request
        shuffled = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(seed)) + 1
        for name, value in {
            "active": 1,
            "anchor": torch.arange(requests) + 100,
            "context_len": torch.arange(requests) * 3 + 2,
            "block_table": shuffled.view(requests, pages),
            "remaining": 1000,
            "stop_ids": -1,
            "penalized": 0,
            "tree_budget": limits.max_rows,
            "tree_cost": 0.0,
            "calibration": 1.0,
            "tree_width": 0,
            "draft_requests": torch.arange(requests),
        }.items():
            self.tensors[name][:] = value

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def build(self, candidates: np.ndarray | None, world: int = 1) -> None:
        limits, plugin = self.limits, get_plugin("ddtree_build")
        attrs = {
            "draft_depth": limits.draft_depth,
            "top_k": limits.tree_top_k,
            "page_size": limits.page_size,
            "tp_world": world,
        }
        run = plugin.reference(attrs, None)  # type: ignore[arg-type]
        first = None if candidates is None else torch.from_numpy(candidates)
        run(first, *(self.tensors[name] for name in plugin.inputs[1:]))

    def accept(self, sampled: torch.Tensor) -> None:
        plugin = get_plugin("ddtree_accept")
        run = plugin.reference({"path_length": self.limits.path_length}, None)  # type: ignore[arg-type]
        run(sampled.to(torch.int32), *(self.tensors[name] for name in plugin.inputs[1:]))

    def rows(self, request: int) -> list[dict]:
        """The request's tree, by row: token, depth, parent (node number, -1: root), log weight and mask."""
        first, count = int(self["first_row"][request]), int(self["request_rows"][request])
        words = self["mask"].view(torch.int32).numpy().view(np.uint32)
        return [
            {
                "token": int(self["tokens"][row]),
                "depth": int(self["positions"][row] - self["context_len"][request]),
                "parent": int(self["row_parent"][row]) - first if row > first else int(self["row_parent"][row]),
                "log_weight": float(self["row_log_weight"][row]),
                "mask": int.from_bytes(words[row].tobytes(), "little"),
            }
            for row in range(first, first + count)
        ]


def paths(rows: list[dict]) -> list[tuple[int, ...]]:
    """Tokens from below the root to each node."""
    found: list[tuple[int, ...]] = []
    for row in rows:
        found.append((*found[row["parent"]], row["token"]) if row["parent"] >= 0 else ())
    return found


def candidates_of(logits: np.ndarray, top_k: int, world: int = 1) -> np.ndarray:
    """What `draft_topk` and `all_gather` give for logits float32 [N, V], over `world` ranks."""
    from plugins.draft_topk.reference import draft_topk

    parts = np.split(logits.astype(np.float32), world, axis=1)
    blocks = [np.repeat(part[:, None], 2, axis=1).reshape(-1, part.shape[1]) for part in parts]
    outputs = [draft_topk(torch.from_numpy(b), 2, top_k, rank).numpy() for rank, b in enumerate(blocks)]
    return np.concatenate(outputs, axis=1)
