"""Prometheus metrics: this server's own names, and vLLM's for the dashboards and routers that read those.

Counts of the engine come from its last snapshot, times and sizes of requests from `Metered`, which every generation
passes, and why they ended from those who know: a text may end at a stop string, of which the engine hears nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_runtime.generation import GenerationRequest, Output
from engine_runtime.server.contract import Engine
from engine_runtime.server.engine_client import Health
from engine_runtime.server.wire import Snapshot
from plugins.core.state import Limits

disable_created_metrics()  # a series of its own for the time of birth of every other one

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 10, 50, 100, 500, 1000, 5000, 10000, 20000, 50000, 100000, 200000)


class Both:
    """One histogram under two names."""

    def __init__(self, registry: CollectorRegistry, names: Iterable[str], model: str, text: str, buckets: Any) -> None:
        histograms = [Histogram(name, text, ["model_name"], buckets=buckets, registry=registry) for name in names]
        self._series = [histogram.labels(model) for histogram in histograms]

    def observe(self, value: float) -> None:
        for series in self._series:
            series.observe(value)


class Metrics:
    """All metrics of one server. snapshot, health: as of now."""

    def __init__(
        self, model: str, limits: Limits, snapshot: Callable[[], Snapshot | None], health: Callable[[], Health]
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def both(name: str, vllm: str, text: str, buckets: Any) -> Both:
            return Both(self.registry, (f"k2_{name}", f"vllm:{vllm}"), model, text, buckets)

        self.first_token = both(
            "time_to_first_token_seconds", "time_to_first_token_seconds", "From request to first token.", _SECONDS
        )
        self.between = both(
            "inter_token_latency_seconds",
            "inter_token_latency_seconds",
            "Between outputs of a request, divided by the tokens that the later one brings.",
            _SECONDS,
        )
        self.whole = both("request_seconds", "e2e_request_latency_seconds", "From request to last token.", _SECONDS)
        self.queue = both("request_queue_seconds", "request_queue_time_seconds", "Waiting for a slot.", _SECONDS)
        self.prefill = both("request_prefill_seconds", "request_prefill_time_seconds", "In prefill passes.", _SECONDS)
        self.decode = both(
            "request_decode_seconds", "request_decode_time_seconds", "In draft and verify passes.", _SECONDS
        )
        self.prompt_tokens = both("request_prompt_tokens", "request_prompt_tokens", "Of each request.", _TOKENS)
        self.generated_tokens = both(
            "request_generated_tokens", "request_generation_tokens", "Of each request.", _TOKENS
        )
        self._finished = Counter(
            "k2_requests", "Requests that ended, by reason.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._success = Counter(
            "vllm:request_success", "As k2_requests.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._http = Counter(
            "k2_http_requests", "HTTP requests.", ["method", "route", "status"], registry=self.registry
        )
        self._http_seconds = Histogram(
            "k2_http_request_seconds", "Until the last byte.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_EngineCollector(model, limits, snapshot, health))

    def finished(self, reason: str) -> None:
        """A generation ended: "stop", "length", "tool_calls", "error", "abort" (left by its client) or "refused"."""
        self._finished.labels(self._model, reason).inc()
        if reason not in ("error", "refused"):  # vLLM knows no reason of its own for tool calls
            self._success.labels(self._model, "stop" if reason == "tool_calls" else reason).inc()

    def count_http(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE") else "other"
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)


class Metered:
    """`contract.Engine` that counts what passes through it."""

    def __init__(self, engine: Engine, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._metrics, self._clock = engine, metrics, clock

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        metrics, start = self._metrics, self._clock()
        latest: float | None = None
        last = Output()
        outputs = self._engine.generate(request)
        try:
            async with aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    now = self._clock()
                    last, count = output, len(output.tokens)
                    if count and latest is None:
                        metrics.first_token.observe(now - start)
                    elif count and latest is not None:
                        metrics.between.observe((now - latest) / count)
                    latest = now if count else latest
                    yield output
        finally:
            if last.usage is not None and last.timing is not None:
                metrics.whole.observe(self._clock() - start)
                metrics.queue.observe(last.timing.queue)
                metrics.prefill.observe(last.timing.prefill)
                metrics.decode.observe(last.timing.draft + last.timing.verify)
                metrics.prompt_tokens.observe(last.usage.prompt_tokens)
                metrics.generated_tokens.observe(last.usage.completion_tokens)


class _EngineCollector(Collector):
    """The engine's last snapshot, when asked."""

    def __init__(
        self, model: str, limits: Limits, snapshot: Callable[[], Snapshot | None], health: Callable[[], Health]
    ) -> None:
        self._model, self._limits, self._snapshot, self._health = model, limits, snapshot, health

    def collect(self) -> Iterable[Metric]:
        health = self._health()
        yield self._gauge("k2_engine_ready", "1 if the engine takes requests.", float(health.state == "ready"))
        yield self._counter("k2_engine_restarts", "Times that the engine was started anew.", health.restarts)
        if health.last_step_age_seconds is not None:
            text = "Since the step loop last gave a sign of life."
            yield self._gauge("k2_last_step_age_seconds", text, health.last_step_age_seconds)
        yield self._cache_info()
        snapshot = self._snapshot()
        if snapshot is None:
            return
        status, stats = snapshot.status, snapshot.stats
        usage = status.kv_pages_used / max(1, status.kv_pages_total)
        gauges = {
            "requests_running": ("num_requests_running", "Requests in a slot.", len(status.running)),
            "requests_waiting": ("num_requests_waiting", "Requests in the queue.", len(status.waiting)),
            "kv_usage_ratio": ("kv_cache_usage_perc", "KV pages of running requests, 0 to 1.", usage),
        }
        for name, (vllm, text, value) in gauges.items():
            yield self._gauge(f"k2_{name}", text, value)
            yield self._gauge(f"vllm:{vllm}", text, value)
        yield self._gauge("k2_kv_pages_cached", "Pages that only the prefix cache keeps.", status.kv_pages_cached)
        yield self._gauge("k2_kv_pages", "Pages of the pool.", status.kv_pages_total)
        counters = {
            "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up.", status.prefix_queries),
            "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found.", status.prefix_hits),
            "preemptions": ("num_preemptions", "Requests sent back to the queue.", status.preemptions),
            "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that got a token.", stats.prompt_tokens),
            "generated_tokens": ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            "drafted_passes": ("spec_decode_num_drafts", "Trees drafted.", stats.drafted_passes),
            "drafted_nodes": ("spec_decode_num_draft_tokens", "Tree nodes verified.", stats.rows - stats.passes),
            "accepted_nodes": ("spec_decode_num_accepted_tokens", "Tree nodes accepted.", sum(stats.accepted)),
        }
        for name, (vllm, text, value) in counters.items():
            yield self._counter(f"k2_{name}", text, value)
            yield self._counter(f"vllm:{vllm}", text, value)
        yield self._counter("k2_decode_passes", "Verify passes, counted for each request in them.", stats.passes)
        yield self._by_depth("k2_accepted_by_depth", "depth", 1, "Trees accepted to this depth.", stats.accepted)
        yield self._by_depth("k2_reached_by_depth", "depth", 1, "Walks that were offered this depth.", stats.reached)
        yield self._by_depth(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "position", 0, "As k2_accepted_by_depth.", stats.accepted
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by_depth(self, name: str, label: str, first: int, text: str, counts: list[int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for depth, count in enumerate(counts, first):
            family.add_metric([self._model, str(depth)], count)
        return family

    def _cache_info(self) -> Metric:
        names = ["model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"]
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV pool, as labels.", labels=names)
        values = [self._model, str(self._limits.page_size), str(self._limits.kv_pages - 1), "True"]
        family.add_metric(values, 1)
        return family
