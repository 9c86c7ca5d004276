"""The step loop: request slots, admission, chunked prefill, speculative decoding.

Every rank runs one `Decoder` on its own executor. Given the same calls, all ranks make the same decisions:
nothing here depends on the clock. What the device advances (`context_len`, `anchor`, `remaining`) is only
read back.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine_runtime.budget import CostTable, TreeBudget, TreeResult
from engine_runtime.executor import Executor
from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.kv import PageAllocator
from engine_runtime.passes import Passes
from engine_runtime.request import Request, check_prompt, stop_ids
from engine_runtime.stats import DecodeStats, TimeSplit
from plugins.core.state import FINISH_LENGTH, FINISH_NAN, FINISH_STOP, Limits

FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_NAN: "error"}
NAN_ERROR = "the model's logits were not numbers (NaN)"


@dataclass(frozen=True)
class Event:
    """News of the request with id `request`."""

    request: int
    output: Output


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
        self._passes = Passes(executor, self.limits)
        self._pages = PageAllocator(self.limits)
        self._queue: deque[Request] = deque()
        self._slots: dict[int, Request] = {}
        self._next_id = 0
        self.stats = DecodeStats(self.limits.draft_depth)
        self.seconds = TimeSplit()

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

    def submit(self, given: GenerationRequest) -> int:
        """Queue a request and return its id (0, 1, 2, ..).

        Raises ValueError, scheduling nothing, for a prompt that is empty, too long, or has an id out of
        range, and for a request that the KV pool could never hold.
        """
        prompt = check_prompt(given.prompt, self.limits, self.model["vocab_size"])
        room = self.limits.max_context - len(prompt)
        most = room if given.params.max_tokens is None else min(given.params.max_tokens, room)
        wanted = self._pages.pages(len(prompt) + most)
        if wanted > self._pages.capacity:
            raise ValueError(
                f"request: {len(prompt)} prompt tokens and {most} to generate need {wanted} KV pages, "
                f"the engine has {self._pages.capacity}: lower max_tokens or build with more pages"
            )
        budget = TreeBudget(self.limits, given.speculation, self._costs, self._calibrate)
        request = Request(self._next_id, given, prompt, stop_ids(given, self.model), most, budget)
        request.waited = -time.perf_counter()
        self._next_id += 1
        self._queue.append(request)
        return request.id

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
            request.goal = len(request.prompt)
            request.waited += time.perf_counter()
            self._pages.reserve(request.slot, min(tokens, pages * self.limits.page_size, self.limits.max_context))
            self._slots[request.slot] = request
            self._passes.reset_slot(request, self._pages.block_table(request.slot))

    def _release(self, request: Request) -> None:
        self._pages.release(request.slot)
        del self._slots[request.slot]
        self._passes.clear_slot(request.slot)

    def _end(self, request: Request, tokens: tuple[int, ...], finish: str) -> Event:
        """The last event of `request`, which gives up its slot and pages."""
        self._release(request)
        error = NAN_ERROR if finish == "error" else None
        usage, timing = request.usage(), request.timing()
        return Event(request.id, Output(tokens, finish=finish, error=error, usage=usage, timing=timing))

    # ---- prefill ----

    def _prefill(self, request: Request) -> list[Event]:
        start = request.context
        chunk = request.sequence()[start : request.goal][: self._passes.buckets["prefill"][-1]]
        kv_slots = self._pages.slots(request.slot, np.arange(start, start + len(chunk)))
        with self.seconds.measure("prefill", [request.seconds]):
            self._passes.prefill(request.slot, chunk, start, kv_slots)
            if request.drafts:
                self._passes.append_prefill(len(chunk), start, kv_slots)
        request.context += len(chunk)
        return [self._first_token(request)] if request.ready else []

    def _first_token(self, request: Request) -> Event:
        """What the last prefill chunk has drawn."""
        token = int(self._executor.read("sampled")[0])
        self.stats.prompt_tokens += len(request.prompt)
        if token < 0:
            return self._end(request, (), "error")
        request.generated.append(token)
        self.stats.generated_tokens += 1
        if token in request.stop_ids:
            return self._end(request, (token,), "stop")
        if len(request.generated) == request.most:
            return self._end(request, (token,), "length")
        self._passes.activate(request.slot, token)
        return Event(request.id, Output((token,)))

    # ---- decode ----

    def _decode(self, decoding: list[Request]) -> list[Event]:
        drafting = self._spread_budget(decoding)
        with self.seconds.measure("draft", [request.seconds for request in drafting]):
            rows = self._passes.draft([request.slot for request in drafting])
        with self.seconds.measure("verify", [request.seconds for request in decoding]):
            self._passes.verify(rows)
        return self._collect(decoding, {request.id for request in drafting})

    def _spread_budget(self, decoding: list[Request]) -> list[Request]:
        """Fill the tree buffers of this step; gives the requests that are worth a draft."""
        context = float(np.mean([request.context for request in decoding]))
        wanting = [
            request
            for request in decoding
            if len(request.generated) + 1 < request.most and request.budget.wants_draft(len(decoding), context)
        ]
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

    def _collect(self, decoding: list[Request], drafted: set[int]) -> list[Event]:
        """Read what `ddtree_accept` reports, feed the drafter's context, end what has ended."""
        counts = self._executor.read("num_emitted").tolist()
        emitted = self._executor.read("emitted").tolist()
        reasons = [FINISH_REASONS.get(code) for code in self._executor.read("finish").tolist()]
        for request in decoding:
            count = counts[request.slot]
            if count == 0 and reasons[request.slot] is None:
                raise RuntimeError(f"request {request.id}: a decode pass gave no token and no reason to end")
            request.context += count
            request.generated += emitted[request.slot][:count]
            self._count(request, request.id in drafted, reasons[request.slot] is None)
        # before anything else runs: the next pass overwrites the rows that this one tapped
        going_on = [request for request in decoding if reasons[request.slot] is None]
        if any(request.drafts for request in going_on):
            with self.seconds.measure("draft", [request.seconds for request in going_on if request.drafts]):
                self._passes.append(sum(counts[request.slot] for request in decoding))
        events = []
        for request in decoding:
            tokens, reason = tuple(emitted[request.slot][: counts[request.slot]]), reasons[request.slot]
            if reason is None:
                events.append(Event(request.id, Output(tokens)))
            else:
                events.append(self._end(request, tokens, reason))
        return events

    def _count(self, request: Request, drafted: bool, goes_on: bool) -> None:
        executor, slot = self._executor, request.slot
        first, rows = int(executor.read("first_row")[slot]), int(executor.read("request_rows")[slot])
        tokens = int(executor.read("num_emitted")[slot])
        request.passes += 1
        request.rows += rows
        self.stats.add_pass(rows, tokens, drafted)
        if not drafted:
            return
        path = executor.read("path_rows")[slot, :tokens].tolist()
        parents = executor.read("row_parent")[first : first + rows]
        weights = executor.read("row_log_weight")[first : first + rows]
        tree = TreeResult.read(parents, weights, path, first)
        # a walk that was cut (stop id, max_tokens) says nothing about the depth after the cut
        reached = len(tree.mass) if goes_on else tree.accepted
        request.accepted += tree.accepted
        self.stats.add_tree(tree.depth, reached, tree.accepted)
        if goes_on:
            request.budget.observe(tree)
            executor.write("calibration", request.budget.factors, slot)
