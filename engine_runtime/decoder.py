"""The step loop: request slots, admission, chunked prefill, speculative decoding.

Every rank runs one `Decoder` on its own executor. Given the same calls, all ranks make the same decisions:
nothing here depends on the clock. What the device advances (`context_len`, `anchor`, `remaining`) is only
read back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from engine_runtime.batch import Batch
from engine_runtime.budget import CostTable, TreeBudget, TreeResult
from engine_runtime.constraints import make_rules
from engine_runtime.executor import Executor
from engine_runtime.generation import GenerationRequest, Output, TokenLogprobs
from engine_runtime.grammar import Grammars
from engine_runtime.guard import Guard
from engine_runtime.logprobs import token_logprobs
from engine_runtime.passes import Passes
from engine_runtime.penalties import check_bias
from engine_runtime.prefix_cache import PrefixMatch
from engine_runtime.request import Request, check_prompt, stop_ids
from engine_runtime.stats import DecodeStats, EngineStatus, TimeSplit
from engine_runtime.trace import read_trace
from plugins.core.state import (
    FINISH_DEAD_END,
    FINISH_LENGTH,
    FINISH_NAN,
    FINISH_NONE,
    FINISH_STOP,
    SAMPLED_NAN,
    Limits,
)

FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_NAN: "error", FINISH_DEAD_END: "error"}
NAN_ERROR = "the model's logits were not numbers (NaN)"


@dataclass(frozen=True)
class Event:
    """News of the request with id `request`."""

    request: int
    output: Output


class Decoder:
    """Runs requests on one executor. `costs` switches `Speculation(budget=None)` to the measured cost rule;
    `calibrate` keeps per-depth calibration in fixed-budget mode too. `grammars`: of the model's tokenizer, for requests
    with a grammar. `clock`: seconds, for timings only."""

    def __init__(
        self,
        executor: Executor,
        costs: CostTable | None = None,
        calibrate: bool = False,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        plan = executor.plan
        self._executor = executor
        self.limits = Limits(**plan.settings["limits"])
        self.model = plan.settings["model"]
        self._costs = costs
        self._calibrate = calibrate
        self._clock = clock
        self._passes = Passes(executor, self.limits)
        self._batch = Batch(self.limits, self._passes, clock)
        self._grammars = grammars
        self._guard = Guard(executor, self.limits)
        self._next_id = 0
        self.prefilled = 0  # prompt tokens of the last step
        self.stats = DecodeStats(self.limits.draft_depth)
        self.seconds = TimeSplit()

    def use_costs(self, costs: CostTable | None) -> None:
        """Take `costs` for requests that are submitted from now on."""
        self._costs = costs

    @property
    def prefill_buckets(self) -> list[int]:
        """Sizes of a prefill chunk, ascending."""
        return self._passes.buckets["prefill"]

    # ---- requests ----

    def submit(self, given: GenerationRequest) -> int:
        """Queue a request and return its id (0, 1, 2, ..).

        Raises ValueError, scheduling nothing, for a prompt that is empty, too long, or has an id out of
        range, for a bias or a constraint that is wrong, and for a request that the KV pool could never hold.
        """
        vocab_size = self.model["vocab_size"]
        prompt = check_prompt(given.prompt, self.limits, vocab_size)
        check_bias(given.params, vocab_size)
        ends = stop_ids(given, self.model)
        rules = make_rules(given, ends, vocab_size, self._grammars)
        room = self.limits.max_context - len(prompt)
        most = room if given.params.max_tokens is None else min(given.params.max_tokens, room)
        budget = TreeBudget(self.limits, given.speculation, self._costs, self._calibrate)
        request = Request(self._next_id, given, prompt, ends, most, budget, rules=rules)
        self._batch.enqueue(request)
        self._next_id += 1
        return request.id

    def cancel(self, request: int) -> None:
        """Drop a request and free what it has, at once; no further event of it comes. One that has ended is left alone.

        Raises ValueError for an id that was never given out.
        """
        if not 0 <= request < self._next_id:
            raise ValueError(f"request {request}: no such request")
        self._batch.drop(request)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._batch.queue or self._batch.slots)

    @property
    def decoding(self) -> int:
        """Requests that the next step decodes, unless one of them is preempted."""
        return len(self._batch.decoding())

    @property
    def remaining(self) -> int:
        """Tokens that the next prompt to be prefilled lacks, 0 where none waits; what the prefix cache has of a
        request that is not admitted yet is not taken off."""
        prefilling = self._batch.prefilling()
        if prefilling is not None:
            return prefilling.goal - prefilling.context
        return self._batch.queue[0].length if self._batch.queue else 0

    def status(self) -> EngineStatus:
        """Queue, running requests, pages and cache counts."""
        return self._batch.status()

    def match(self, prompt: Sequence[int]) -> PrefixMatch:
        """What a request with the prompt `prompt` would find in the prefix cache; changes nothing."""
        return self._batch.pages.match(check_prompt(prompt, self.limits, self.model["vocab_size"]))

    def clear_cache(self) -> None:
        """Forget the cached text that no running request reads."""
        self._batch.pages.clear_cache()

    # ---- the step ----

    def step(self, prefill: int | None = None) -> list[Event]:
        """Admit what fits, prefill up to `prefill` tokens (None: a whole chunk) of the oldest request that needs it,
        decode all others once."""
        self._batch.admit()
        events: list[Event] = []
        self.prefilled = 0
        prefilling = self._batch.prefilling()
        if prefilling is not None and prefill != 0:
            events += self._prefill(prefilling, prefill)
        decoding = self._batch.with_pages(self._batch.decoding())
        if decoding:
            events += self._decode(decoding)
        return events

    def _end(self, request: Request, news: Output, reason: int) -> Event:
        """`news` as the last event of `request`, which gives up its slot and pages; `reason`: FINISH_*."""
        self._batch.release(request, keep=reason != FINISH_NAN)  # KV that led to NaN must not be found again
        error = {FINISH_NAN: NAN_ERROR, FINISH_DEAD_END: request.dead_end}.get(reason)
        return self._event(request, replace(news, finish=FINISH_REASONS[reason], error=error))

    @staticmethod
    def _event(request: Request, news: Output) -> Event:
        """`news` with the counts and times of `request` so far."""
        return Event(request.id, replace(news, usage=request.usage(), timing=request.timing()))

    @contextmanager
    def _measure(self, part: str, requests: Sequence[Request]) -> Iterator[None]:
        """Add the time of the body to `part` of the whole, and equal shares of it to the requests."""
        start = self._clock()
        yield
        seconds = self._clock() - start
        self.seconds.add(part, seconds)
        for request in requests:
            request.seconds.add(part, seconds / len(requests))

    # ---- prefill ----

    def _prefill(self, request: Request, most: int | None) -> list[Event]:
        if request.cached is None:
            self._batch.look_up(request)
        if request.scoring:
            return self._score(request, most)
        start = request.context
        chunk = request.sequence()[start : request.goal][: self.prefill_buckets[-1]][:most]
        kv_slots = self._batch.pages.slots(request.slot, np.arange(start, start + len(chunk)))
        if start + len(chunk) == request.goal:
            self._guard.before_prefill(request)
        with self._measure("prefill", [request]):
            self._passes.prefill(request.slot, chunk, start, kv_slots)
            self._prefilled(request, len(chunk), kv_slots)
            self._executor.synchronize()
        return [self._first_token(request)] if request.ready else []

    def _prefilled(self, request: Request, count: int, kv_slots: np.ndarray) -> None:
        """The target has seen `count` more tokens of `request`; the drafter's context of them."""
        if self.limits.draft_depth:  # whether it drafts or not: those that find its pages may
            self._passes.append_prefill(count, request.context, kv_slots)
        self.prefilled = count
        request.context += count

    def _score(self, request: Request, most: int | None) -> list[Event]:
        """Score the next chunk of a prompt: the logits after a token say how probable the next one was. What comes
        after the last token is left to the prefill."""
        start = request.context
        chunk = request.prompt[start:-1][: self._passes.score_rows][:most]
        request.scores = request.scores[: start + 1] or [None]
        if len(chunk):
            kv_slots = self._batch.pages.slots(request.slot, np.arange(start, start + len(chunk)))
            with self._measure("prefill", [request]):
                logits = self._passes.score(request.slot, chunk, start, kv_slots)
                if not np.isfinite(logits.max()):
                    return [self._end(request, Output(), FINISH_NAN)]
                following = request.prompt[start + 1 : start + 1 + len(chunk)].tolist()
                request.scores += token_logprobs(logits, following, request.given.prompt_logprobs or 0)
                self._prefilled(request, len(chunk), kv_slots)
                self._executor.synchronize()
        if request.most or len(request.scores) < len(request.prompt):
            return []
        self.stats.prompt_tokens += len(request.prompt)
        return [self._end(request, Output(prompt_logprobs=tuple(request.scores)), FINISH_LENGTH)]

    def _first_token(self, request: Request) -> Event:
        """What the last prefill chunk has drawn."""
        token = int(self._executor.read("sampled")[0])
        scores = None
        if not request.generated:  # else it was preempted, and goes on
            self.stats.prompt_tokens += len(request.prompt)
            scores = tuple(request.scores) or None
        if token < 0:
            reason = FINISH_NAN if token == SAMPLED_NAN else FINISH_DEAD_END
            return self._end(request, Output(prompt_logprobs=scores), reason)
        self._batch.pages.share(request.slot, request.sequence())
        request.extend([token])
        self.stats.generated_tokens += 1
        news = Output((token,), self._logprobs(request, [0], [token]), scores)
        if token in request.stop_ids:
            return self._end(request, news, FINISH_STOP)
        if len(request.generated) == request.most:
            return self._end(request, news, FINISH_LENGTH)
        self._passes.activate(request.slot, token)
        return self._event(request, news)

    def _logprobs(
        self, request: Request, rows: Sequence[int], tokens: Sequence[int]
    ) -> tuple[TokenLogprobs, ...] | None:
        """Of `tokens`, which were drawn after `rows` of the last pass, where `request` asks for them."""
        if request.given.logprobs is None:
            return None
        first = min(rows)
        logits = self._executor.read("logits", slice(first, max(rows) + 1))  # a request's rows lie together
        return token_logprobs(logits[[row - first for row in rows]], tokens, request.given.logprobs)

    # ---- decode ----

    def _decode(self, decoding: list[Request]) -> list[Event]:
        drafting = self._spread_budget(decoding)
        with self._measure("draft", drafting or decoding):
            rows = self._passes.draft([request.slot for request in drafting])
            rows = self._guard.before_verify(decoding, rows)
        with self._measure("verify", decoding):
            self._passes.verify(rows)
            self._executor.synchronize()
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
            nodes = min(request.budget.most, share) if request in wanting else 0
            nodes = self._batch.tree_room(request, nodes)
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
        reasons = self._executor.read("finish").tolist()
        # before the next pass, which overwrites the rows that this one tapped; and first of all, so that a device works
        # on it while the host reads the rest
        wanting = [request for request in decoding if request.drafts]
        if wanting:
            with self._measure("draft", wanting):
                self._passes.append(sum(counts[request.slot] for request in decoding))
        news: dict[int, Output] = {}
        for request in decoding:
            count = counts[request.slot]
            goes_on = reasons[request.slot] == FINISH_NONE
            if count == 0 and goes_on:
                raise RuntimeError(f"request {request.id}: a decode pass gave no token and no reason to end")
            tokens = emitted[request.slot][:count]
            request.extend(tokens)
            self._count(request, request.id in drafted, goes_on)
            rows = self._executor.read("path_rows")[request.slot, :count].tolist()
            trace = read_trace(self._executor, request.slot) if request.given.trace else None
            news[request.id] = Output(tuple(tokens), self._logprobs(request, rows, tokens), trace=trace)
        for request in decoding:
            count = counts[request.slot]
            if not wanting:
                self._batch.pages.skip_draft(request.slot, request.context, request.context + count)
            request.context += count
        events = []
        for request in decoding:
            reason = reasons[request.slot]
            if reason == FINISH_NONE:
                events.append(self._event(request, news[request.id]))
            else:
                events.append(self._end(request, news[request.id], reason))
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
