"""The step loop: request slots, admission, chunked prefill, speculative decoding.

Every rank runs one `Decoder` on its own executor. Given the same calls, all ranks make the same decisions:
nothing here depends on the clock. What the device advances (`context_len`, `anchor`, `remaining`) is only
read back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_runtime.budget import CostTable, Speculation, TreeBudget, TreeResult
from engine_runtime.executor import Executor
from engine_runtime.kv import PageAllocator
from engine_runtime.sampling import SamplingParams
from engine_runtime.stats import DecodeStats, TimeSplit
from plugins.core.state import FINISH_LENGTH, FINISH_NAN, FINISH_NONE, FINISH_STOP, MAX_STOP_IDS, Limits

FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_NAN: "error"}
NAN_ERROR = "the model's logits were not numbers (NaN)"


@dataclass(frozen=True)
class Event:
    """News of one request: tokens that it got, and why it ended ("stop", "length" or "error"; None: it goes
    on).

    stats: the request's counts, once it has ended.
    """

    request: int
    tokens: tuple[int, ...]
    finish: str | None = None
    error: str | None = None
    stats: DecodeStats | None = None


@dataclass
class _Request:
    """prefilled: prompt tokens whose KV is written. context: mirror of `context_len`. most: tokens it may generate."""

    id: int
    prompt: np.ndarray
    params: SamplingParams
    stop_ids: tuple[int, ...]
    most: int
    budget: TreeBudget
    stats: DecodeStats
    slot: int = -1
    prefilled: int = 0
    context: int = 0
    generated: int = 0

    @property
    def drafts(self) -> bool:
        """Whether this request uses the drafter at all, so needs draft context."""
        return self.budget.most > 0

    @property
    def ready(self) -> bool:
        return self.prefilled == len(self.prompt)


class Decoder:
    """Runs requests on one executor. `costs` switches `Speculation(budget=None)` to the measured cost rule;
    `calibrate` keeps per-depth calibration in fixed-budget mode too."""

    def __init__(self, executor: Executor, costs: CostTable | None = None, calibrate: bool = False) -> None:
        plan = executor.plan
        self._executor = executor
        self.limits = Limits(**plan.settings["limits"])
        self.model = plan.settings["model"]
        self._costs = costs
        self._calibrate = calibrate
        self._buckets = {name: plan.buckets(name) for name in ("prefill", "append", "root", "draft", "verify")}
        self._check_buckets()
        self._pages = PageAllocator(self.limits)
        self._queue: deque[_Request] = deque()
        self._slots: dict[int, _Request] = {}
        self._next_id = 0
        self.stats = DecodeStats(self.limits.draft_depth)
        self.seconds = TimeSplit()
        for name in ("active", "request_rows", "context_len", "block_table"):
            executor.write(name, 0)

    def _check_buckets(self) -> None:
        limits = self.limits
        needed = {"prefill": 1, "root": 1, "verify": limits.max_rows}
        if limits.draft_depth:
            needed |= {"draft": limits.max_requests, "append": limits.max_requests * limits.path_length}
        for name, most in needed.items():
            if not self._buckets[name] or self._buckets[name][-1] < most:
                found = self._buckets[name] or "none"
                raise ValueError(f"plan: phase {name}: expected a bucket of at least {most}, found {found}, rebuild")
        if limits.draft_depth and self._buckets["append"][-1] < self._buckets["prefill"][-1]:
            raise ValueError("plan: phase append: no bucket holds a prefill chunk, rebuild the engine")

    def use_costs(self, costs: CostTable | None) -> None:
        """Take `costs` for requests that are submitted from now on."""
        self._costs = costs

    # ---- requests ----

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._queue or self._slots)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for pages."""
        return len(self._queue)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> int:
        """Queue a request and return its id (0, 1, 2, ..).

        Raises ValueError, scheduling nothing, for a prompt that is empty, too long, or has an id out of
        range, and for a request that the KV pool could never hold.
        """
        params = SamplingParams() if params is None else params
        speculation = Speculation() if speculation is None else speculation
        ids = self._check_prompt(prompt)
        room = self.limits.max_context - len(ids)
        stop_ids = self._stop_ids(params)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        budget = TreeBudget(self.limits, speculation, self._costs, self._calibrate)
        stats = DecodeStats(self.limits.draft_depth, prompt_tokens=len(ids))
        request = _Request(self._next_id, ids, params, stop_ids, most, budget, stats)
        wanted = self._pages.pages(len(ids) + most)
        if wanted > self._pages.capacity:
            raise ValueError(
                f"request: {len(ids)} prompt tokens and {most} to generate need {wanted} KV pages, "
                f"the engine has {self._pages.capacity}: lower max_tokens or build with more pages"
            )
        self._next_id += 1
        self._queue.append(request)
        return request.id

    def _check_prompt(self, prompt: Sequence[int]) -> np.ndarray:
        vocab_size = self.model["vocab_size"]
        if len(prompt) == 0:
            raise ValueError("prompt: expected at least one token, found none")
        if len(prompt) >= self.limits.max_context:
            raise ValueError(
                f"prompt: {len(prompt)} tokens leave no room to generate in a context of "
                f"{self.limits.max_context}: shorten it to at most {self.limits.max_context - 1} "
                "or build with a larger --max-context"
            )
        for index, token in enumerate(prompt):
            if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
                raise ValueError(f"prompt: token {index}: expected an id from 0 to {vocab_size - 1}, found {token!r}")
        return np.asarray(prompt, np.int32)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        if params.stop_ids is not None:
            return params.stop_ids
        ids = tuple(self.model["eos_token_ids"])
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(f"eos_token_ids of the model: expected at most {MAX_STOP_IDS} ids, found {len(ids)}")
        return ids

    def cancel(self, request: int) -> None:
        """Drop a request; no further event of it comes. One that has ended is left alone.

        Raises ValueError for an id that was never given out.
        """
        if not 0 <= request < self._next_id:
            raise ValueError(f"request {request}: no such request")
        self._queue = deque(other for other in self._queue if other.id != request)
        for running in [other for other in self._slots.values() if other.id == request]:
            self._release(running)

    # ---- the step ----

    def step(self) -> list[Event]:
        """Admit what fits, prefill one chunk of the oldest request that needs it, decode all others once."""
        self._admit()
        events: list[Event] = []
        prefilling = [request for request in self._slots.values() if not request.ready]
        if prefilling:
            events += self._prefill(min(prefilling, key=lambda request: request.id))
        decoding = [self._slots[slot] for slot in sorted(self._slots) if self._slots[slot].ready]
        if decoding:
            events += self._decode(decoding)
        return events

    def _admit(self) -> None:
        """First come, first served. A request gets all the pages it may need, so it never starves half way."""
        while self._queue and len(self._slots) < self.limits.max_requests:
            request = self._queue[0]
            tokens = len(request.prompt) + request.most + request.budget.most
            pages = min(self._pages.pages(tokens), self._pages.capacity)
            if pages > self._pages.free_pages:
                return
            self._queue.popleft()
            request.slot = min(set(range(self.limits.max_requests)) - set(self._slots))
            self._pages.reserve(request.slot, min(tokens, pages * self.limits.page_size, self.limits.max_context))
            self._slots[request.slot] = request
            self._reset_slot(request)

    def _reset_slot(self, request: _Request) -> None:
        """Everything that a slot's last request may have left, the drafter's state included."""
        params = request.params
        stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
        stop_ids[: len(request.stop_ids)] = request.stop_ids
        values = {
            "active": 0,
            "request_rows": 0,
            "context_len": 0,
            "block_table": self._pages.block_table(request.slot),
            "remaining": request.most - 1,  # the first token comes from the prefill
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "stop_ids": stop_ids,
            "tree_budget": 0,
            "tree_cost": 0.0,
            "tree_width": request.budget.width,
            "calibration": 1.0,
            "draft_start": 0,
            "finish": FINISH_NONE,
        }
        for name, value in values.items():
            self._executor.write(name, value, request.slot)

    def _release(self, request: _Request) -> None:
        self._pages.release(request.slot)
        del self._slots[request.slot]
        for name in ("active", "request_rows", "context_len", "block_table"):
            self._executor.write(name, 0, request.slot)

    # ---- prefill ----

    def _prefill(self, request: _Request) -> list[Event]:
        executor, slot, start = self._executor, request.slot, request.prefilled
        chunk = request.prompt[start : start + self._buckets["prefill"][-1]]
        count = len(chunk)
        bucket = self._bucket("prefill", count)
        positions = np.arange(start, start + count, dtype=np.int32)
        slots = self._pages.slots(slot, positions)
        self._write_rows("tokens", bucket, chunk, 0)
        self._write_rows("positions", bucket, positions, 0)
        self._write_rows("row_request", bucket, np.full(count, slot, np.int32), -1)
        self._write_rows("row_slot", bucket, slots, 0)
        self._write_rows("row_parent", bucket, np.arange(-1, count - 1, dtype=np.int32), -1)
        executor.write("first_row", 0)
        executor.write("request_rows", 0)
        executor.write("request_rows", count, slot)
        executor.write("last_row", count - 1)
        executor.write("last_position", int(positions[-1]))
        executor.write("last_request", slot)
        with self.seconds.measure("prefill"):
            executor.run(f"prefill[{bucket}]")
        request.prefilled += count
        request.context += count
        executor.write("request_rows", 0)
        executor.write("context_len", request.context, slot)
        if request.drafts:
            self._write_rows("append_rows", self._bucket("append", count), np.arange(count, dtype=np.int32), -1)
            self._write_rows("append_positions", self._bucket("append", count), positions, 0)
            self._write_rows("append_slots", self._bucket("append", count), slots, 0)
            self._append(count)
        return self._first_token(request) if request.ready else []

    def _first_token(self, request: _Request) -> list[Event]:
        token = int(self._executor.read("sampled")[0])
        self.stats.prompt_tokens += len(request.prompt)
        if token < 0:
            self._release(request)
            return [Event(request.id, (), "error", NAN_ERROR, request.stats)]
        request.generated = 1
        request.stats.generated_tokens += 1
        self.stats.generated_tokens += 1
        finish = "stop" if token in request.stop_ids else "length" if request.most == 1 else None
        if finish is None:
            self._executor.write("anchor", token, request.slot)
            self._executor.write("active", 1, request.slot)
        else:
            self._release(request)
        return [Event(request.id, (token,), finish, stats=request.stats if finish else None)]

    # ---- decode ----

    def _decode(self, decoding: list[_Request]) -> list[Event]:
        executor = self._executor
        drafting = self._spread_budget(decoding)
        with self.seconds.measure("draft"):
            if drafting:
                bucket = self._bucket("draft", len(drafting))
                slots = np.asarray([request.slot for request in drafting], np.int32)
                self._write_rows("draft_requests", bucket, slots, -1)
                executor.run(f"draft[{bucket}]")
            else:
                executor.run(f"root[{self._buckets['root'][0]}]")
        rows = int(executor.read("num_rows")[0])
        with self.seconds.measure("verify"):
            executor.run(f"verify[{self._bucket('verify', rows)}]")
        return self._collect(decoding, {request.id for request in drafting})

    def _spread_budget(self, decoding: list[_Request]) -> list[_Request]:
        """Fill the tree buffers of this step; gives the requests that are worth a draft."""
        context = float(np.mean([request.context for request in decoding]))
        wanting = [r for r in decoding if r.generated + 1 < r.most and r.budget.wants_draft(len(decoding), context)]
        share = (self.limits.max_rows - len(decoding)) // max(1, len(wanting))
        drafting = []
        for request in decoding:
            # the root and the nodes must lie in the pages that the request has
            room = self._pages.reserved_tokens(request.slot) - request.context - 1
            nodes = min(request.budget.most, share, room) if request in wanting else 0
            self._executor.write("tree_budget", nodes, request.slot)
            if nodes > 0:
                drafting.append(request)
        if self._costs is not None and drafting:
            costs = self._costs.tree_costs(len(decoding), len(drafting), context, self.limits.max_rows)
            for request in drafting:
                self._executor.write("tree_cost", costs if request.budget.adaptive else 0.0, request.slot)
        return drafting

    def _collect(self, decoding: list[_Request], drafted: set[int]) -> list[Event]:
        """Read what `ddtree_accept` reports, feed the drafter's context, end what has ended."""
        executor = self._executor
        counts = executor.read("num_emitted").tolist()
        emitted = executor.read("emitted").tolist()
        finish = executor.read("finish").tolist()
        events = []
        for request in decoding:
            slot, count = request.slot, counts[request.slot]
            reason = FINISH_REASONS.get(finish[slot])
            if count == 0 and reason is None:
                raise RuntimeError(f"request {request.id}: a decode pass gave no token and no reason to end")
            tokens = tuple(emitted[slot][:count])
            request.context += count
            request.generated += count
            self._count(request, request.id in drafted, reason is None)
            error = NAN_ERROR if reason == "error" else None
            events.append(Event(request.id, tokens, reason, error, request.stats if reason else None))
        # before anything else runs: the next pass overwrites the rows that this one tapped
        goes_on = [request for request, event in zip(decoding, events, strict=True) if event.finish is None]
        if any(request.drafts for request in goes_on):
            self._append(sum(counts[request.slot] for request in decoding))
        for request, event in zip(decoding, events, strict=True):
            if event.finish is not None:
                self._release(request)
        return events

    def _count(self, request: _Request, drafted: bool, goes_on: bool) -> None:
        executor, slot = self._executor, request.slot
        first, rows = int(executor.read("first_row")[slot]), int(executor.read("request_rows")[slot])
        tokens = int(executor.read("num_emitted")[slot])
        for stats in (request.stats, self.stats):
            stats.add_pass(rows, tokens, drafted)
        if not drafted:
            return
        path = executor.read("path_rows")[slot, :tokens].tolist()
        parents = executor.read("row_parent")[first : first + rows]
        weights = executor.read("row_log_weight")[first : first + rows]
        tree = TreeResult.read(parents, weights, path, first)
        # a walk that was cut (stop id, max_tokens) says nothing about the depth after the cut
        reached = len(tree.mass) if goes_on else tree.accepted
        for stats in (request.stats, self.stats):
            stats.add_tree(tree.depth, reached, tree.accepted)
        if goes_on:
            request.budget.observe(tree)
            self._executor.write("calibration", request.budget.factors, slot)

    def _append(self, rows: int) -> None:
        with self.seconds.measure("draft"):
            self._executor.run(f"append[{self._bucket('append', rows)}]")

    # ---- helpers ----

    def _bucket(self, phase: str, size: int) -> int:
        return next(bucket for bucket in self._buckets[phase] if bucket >= size)

    def _write_rows(self, name: str, bucket: int, values: np.ndarray, padding: int) -> None:
        """The first `bucket` entries of buffer `name`: `values`, then `padding`."""
        rows = np.full(bucket, padding, np.int32)
        rows[: len(values)] = values
        self._executor.write(name, rows, slice(0, bucket))
