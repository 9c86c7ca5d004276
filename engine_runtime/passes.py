"""The phases of a plan as calls: fill the buffers that a pass reads, run it in the smallest bucket that fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_runtime.executor import Executor
from engine_runtime.penalties import penalty_values
from engine_runtime.request import Request
from engine_runtime.tree_rows import visibility
from plugins.core.state import FINISH_NONE, MAX_STOP_IDS, Limits

PHASES = ("prefill", "append", "root", "draft", "verify")


class Passes:
    """Runs passes over request slots; which requests take part is the caller's business.

    Raises ValueError where the plan lacks a bucket that the limits call for.
    """

    def __init__(self, executor: Executor, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._vocab_size = executor.plan.buffers["token_counts"].shape[1]
        self.buckets = {name: executor.plan.buckets(name) for name in PHASES}
        self._check_buckets()
        for name in ("active", "request_rows", "context_len", "block_table"):
            executor.write(name, 0)

    def _check_buckets(self) -> None:
        limits = self._limits
        needed = {"prefill": 1, "root": 1, "verify": limits.max_rows}
        if limits.draft_depth:
            needed |= {"draft": limits.max_requests, "append": limits.max_requests * limits.path_length}
        for name, most in needed.items():
            if not self.buckets[name] or self.buckets[name][-1] < most:
                found = self.buckets[name] or "none"
                raise ValueError(f"plan: phase {name}: expected a bucket of at least {most}, found {found}, rebuild")
        if limits.draft_depth and self.buckets["append"][-1] < self.buckets["prefill"][-1]:
            raise ValueError("plan: phase append: no bucket holds a prefill chunk, rebuild the engine")

    # ---- slots ----

    def reset_slot(self, request: Request, block_table: np.ndarray, draft_start: int) -> None:
        """Give `request` its slot: overwrites everything that the slot's last request may have left.

        A request that was preempted comes here again, with the tokens that it has generated so far.
        """
        params = request.given.params
        stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids[: len(request.stop_ids)] = request.stop_ids
        values = {
            "active": 0,
            "request_rows": 0,
            "context_len": request.context,
            "block_table": block_table,
            "remaining": request.most - len(request.generated) - 1,  # the next token comes from the prefill
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "stop_ids": stop_ids,
            "tree_budget": 0,
            "tree_cost": 0.0,
            "tree_width": request.budget.width,
            "calibration": request.budget.factors,
            "draft_start": draft_start,
            "finish": FINISH_NONE,
            **penalty_values(params, request.prompt, request.generated, self._vocab_size),
        }
        for name, value in values.items():
            self._executor.write(name, value, request.slot)

    def clear_slot(self, slot: int) -> None:
        for name in ("active", "request_rows", "context_len", "block_table"):
            self._executor.write(name, 0, slot)

    def set_block_table(self, slot: int, block_table: np.ndarray) -> None:
        self._executor.write("block_table", block_table, slot)

    def activate(self, slot: int, anchor: int) -> None:
        """Let slot `slot` take part in decode passes, `anchor` being its last token."""
        self._executor.write("anchor", anchor, slot)
        self._executor.write("active", 1, slot)

    # ---- prefill ----

    def prefill(self, slot: int, tokens: np.ndarray, start: int, kv_slots: np.ndarray) -> None:
        """Prefill the `tokens` of request slot `slot` at positions from `start` on; `kv_slots` are their KV slots."""
        executor, count = self._executor, len(tokens)
        bucket = self._bucket("prefill", count)
        self._write_chain(slot, bucket, tokens, start, kv_slots)
        executor.write("last_row", count - 1)
        executor.write("last_position", start + count - 1)
        executor.write("last_request", slot)
        executor.run(f"prefill[{bucket}]")
        executor.write("request_rows", 0)
        executor.write("context_len", start + count, slot)

    @property
    def score_rows(self) -> int:
        """Most tokens of a call of `score`: their context must fit the drafter's pass too."""
        return min(self._limits.max_rows, self.buckets["prefill"][-1])

    def score(self, slot: int, tokens: np.ndarray, start: int, kv_slots: np.ndarray) -> np.ndarray:
        """As `prefill`, but gives the logits float32 [tokens, V] after every token: the tokens are verified as a chain
        of which nothing may be emitted, so the state of the request stays as it is."""
        executor, count = self._executor, len(tokens)
        bucket = self._bucket("verify", count)
        self._write_chain(slot, bucket, tokens, start, kv_slots)
        rows = np.arange(count)
        executor.write("mask", visibility(rows - 1, rows, self._limits))
        executor.write("num_rows", count)
        remaining = int(executor.read("remaining")[slot])
        executor.write("remaining", 0, slot)
        executor.run(f"verify[{bucket}]")
        executor.write("remaining", remaining, slot)
        executor.write("request_rows", 0)
        executor.write("context_len", start + count, slot)
        return executor.read("logits", slice(0, count))

    def _write_chain(self, slot: int, bucket: int, tokens: np.ndarray, start: int, kv_slots: np.ndarray) -> None:
        """The rows of a pass that has only `tokens`, each the child of the one before it."""
        executor, count = self._executor, len(tokens)
        self._write_rows("tokens", bucket, tokens, 0)
        self._write_rows("positions", bucket, np.arange(start, start + count, dtype=np.int32), 0)
        self._write_rows("row_request", bucket, np.full(count, slot, np.int32), -1)
        self._write_rows("row_slot", bucket, kv_slots, 0)
        self._write_rows("row_parent", bucket, np.arange(-1, count - 1, dtype=np.int32), -1)
        executor.write("first_row", 0)
        executor.write("request_rows", 0)
        executor.write("request_rows", count, slot)

    def append_prefill(self, count: int, start: int, kv_slots: np.ndarray) -> None:
        """The drafter's context of the chunk that was prefilled last."""
        bucket = self._bucket("append", count)
        self._write_rows("append_rows", bucket, np.arange(count, dtype=np.int32), -1)
        self._write_rows("append_positions", bucket, np.arange(start, start + count, dtype=np.int32), 0)
        self._write_rows("append_slots", bucket, kv_slots, 0)
        self.append(count)

    # ---- decode ----

    def draft(self, slots: Sequence[int]) -> int:
        """Trees of all active requests, those in `slots` drafted (none: roots only); gives the rows in use."""
        if slots:
            bucket = self._bucket("draft", len(slots))
            self._write_rows("draft_requests", bucket, np.asarray(slots, np.int32), -1)
            self._executor.run(f"draft[{bucket}]")
        else:
            self._executor.run(f"root[{self.buckets['root'][0]}]")
        return int(self._executor.read("num_rows")[0])

    def verify(self, rows: int) -> None:
        """Verify and accept the `rows` rows that `draft` left."""
        self._executor.run(f"verify[{self._bucket('verify', rows)}]")

    def append(self, rows: int) -> None:
        """The drafter's context of the `rows` rows listed in `append_*`; before another pass overwrites the taps."""
        self._executor.run(f"append[{self._bucket('append', rows)}]")

    def _bucket(self, phase: str, size: int) -> int:
        return next(bucket for bucket in self.buckets[phase] if bucket >= size)

    def _write_rows(self, name: str, bucket: int, values: np.ndarray, padding: int) -> None:
        """The first `bucket` entries of buffer `name`: `values`, then `padding`."""
        rows = np.full(bucket, padding, np.int32)
        rows[: len(values)] = values
        self._executor.write(name, rows, slice(0, bucket))
