"""Who waits and who runs: the queue, the request slots and the pages that each request gets as it grows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine_runtime.kv import PagePool
from engine_runtime.passes import Passes
from engine_runtime.request import Request
from engine_runtime.stats import EngineStatus
from plugins.core.state import Limits


class Batch:
    """Requests in their order of arrival, which their ids give.

    A request is admitted when its prompt and a first tree fit, and takes more pages while it decodes. When the pool is
    short, cached text goes first, then the youngest running request is preempted: it returns to the front of the queue
    and later goes on where it was. The oldest request is never preempted and could have the whole pool, so it always
    gets on, and with it everyone in turn.
    """

    def __init__(self, limits: Limits, passes: Passes, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limits = limits
        self._passes = passes
        self._clock = clock
        self.pages = PagePool(limits)
        self.queue: deque[Request] = deque()
        self.slots: dict[int, Request] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preemptions = 0

    def status(self) -> EngineStatus:
        return EngineStatus(
            waiting=tuple(request.id for request in self.queue),
            running=tuple(sorted(request.id for request in self.slots.values())),
            kv_pages_total=self.pages.total,
            kv_pages_used=self.pages.used,
            kv_pages_cached=self.pages.cached,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
        )

    def decoding(self) -> list[Request]:
        """Running requests that are past their prefill, by slot."""
        return [self.slots[slot] for slot in sorted(self.slots) if self.slots[slot].ready]

    def prefilling(self) -> Request | None:
        """The oldest running request that does not decode yet."""
        return min((r for r in self.slots.values() if not r.ready), key=lambda request: request.id, default=None)

    # ---- coming and going ----

    def enqueue(self, request: Request) -> None:
        """Add a new request. Raises ValueError for one that could not finish even with the pool to itself."""
        wanted = self.pages.pages(len(request.prompt) + request.most)
        if wanted > self.pages.capacity:
            raise ValueError(
                f"request: {len(request.prompt)} prompt tokens and {request.most} to generate need {wanted} KV pages, "
                f"the engine has {self.pages.capacity}: lower max_tokens or build with more pages"
            )
        request.waited -= self._clock()
        self.queue.append(request)

    def admit(self) -> None:
        """Start as many waiting requests as fit, first come, first served."""
        while self.queue and len(self.slots) < self._limits.max_requests:
            request = self.queue[0]
            tokens = request.sequence()
            slot = min(set(range(self._limits.max_requests)) - set(self.slots))
            known = self.pages.open(slot, tokens, request.budget.most + 1, request.reuses_kv)
            if known is None:
                return
            self.queue.popleft()
            request.slot, request.context, request.goal = slot, known, len(tokens)
            request.waited += self._clock()
            self.slots[slot] = request
            self._reset_slot(request)

    def look_up(self, request: Request) -> None:
        """Before its first chunk: take from the prefix cache what others have left there since its admission."""
        if request.reuses_kv:
            request.context = self.pages.reopen(request.slot, request.prompt)
            self._reset_slot(request)
            self._prefix_queries += len(request.prompt)
            self._prefix_hits += request.context
        request.cached = request.context

    def release(self, request: Request, keep: bool = True) -> None:
        """Free slot and pages of a running request; keep: leave what it has written in the prefix cache."""
        self.pages.close(request.slot, request.sequence()[: request.context if keep else 0])
        del self.slots[request.slot]
        self._passes.clear_slot(request.slot)
        request.slot = -1

    def drop(self, request_id: int) -> None:
        """Forget a request, waiting or running; one that has ended is left alone."""
        self.queue = deque(request for request in self.queue if request.id != request_id)
        for running in [request for request in self.slots.values() if request.id == request_id]:
            self.release(running)

    # ---- pages ----

    def with_pages(self, decoding: Sequence[Request]) -> list[Request]:
        """Give each of `decoding` a page for its next token, oldest first, preempting the youngest where the pool is
        short. Gives those that are still running, in the order given."""
        for request in sorted(decoding, key=lambda request: request.id):
            while request.slot >= 0 and not self._reserve(request, request.context + 1):
                self._preempt(max(self.slots.values(), key=lambda other: other.id))
        return [request for request in decoding if request.slot >= 0]

    def tree_room(self, request: Request, nodes: int) -> int:
        """How many of `nodes` tree nodes find room behind the next token of `request`. Only pages that nobody uses are
        taken for them."""
        self._reserve(request, min(request.context + 1 + nodes, self._limits.max_context))
        return min(nodes, self.pages.reserved_tokens(request.slot) - request.context - 1)

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Room for `tokens` tokens of `request` in all; False where the pool is short."""
        if tokens <= self.pages.reserved_tokens(request.slot):
            return True
        if not self.pages.reserve(request.slot, tokens):
            return False
        self._passes.set_block_table(request.slot, self.pages.block_table(request.slot))
        return True

    def _preempt(self, request: Request) -> None:
        """Everything in the queue is younger, so the front is its place. What it has generated becomes part of what is
        prefilled when it returns; its KV stays in the prefix cache as long as nobody needs the pages."""
        self.release(request)
        request.preemptions += 1
        self._preemptions += 1
        request.waited -= self._clock()
        self.queue.appendleft(request)

    def _reset_slot(self, request: Request) -> None:
        slot = request.slot
        self._passes.reset_slot(request, self.pages.block_table(slot), self.pages.draft_start(slot))
