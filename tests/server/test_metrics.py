"""Metrics of a scripted engine, in Prometheus's text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from engine_runtime.server.wire import Snapshot
from engine_runtime.stats import DecodeStats, EngineStatus
from tests.server.harness import ScriptedEngine, live_server

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}


def samples(live) -> dict[tuple[str, str], float]:
    """(name, labels but the model's) -> value; parsed by Prometheus's own client."""
    found = {}
    for family in text_string_to_metric_families(live.client.get("/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name, ",".join(f"{name}={labels[name]}" for name in sorted(labels))] = sample.value
    return found


def test_reasons_times_and_sizes_of_requests() -> None:
    with live_server() as live:
        assert live.post(CHAT, HI).status_code == 200
        assert live.post(CHAT, {**HI, "max_tokens": 2}).status_code == 200
        assert live.post(CHAT, {**HI, "stop": "wor"}).status_code == 200  # of which the engine hears nothing
        assert live.post("/v1/completions", {"prompt": "x", "stop": ["wor"], "n": 2}).status_code == 200
        live.engine.finish, live.engine.error = "error", "broken"
        assert live.post(CHAT, HI).status_code == 500
        live.engine.failure = ValueError("prompt: not this")
        assert live.post(CHAT, HI).status_code == 400
        found = samples(live)
        reasons = {"stop": 4, "length": 1, "error": 1, "refused": 1}
        for reason, count in reasons.items():
            assert found["k2_requests_total", f"finished_reason={reason}"] == count
        assert found["vllm:request_success_total", "finished_reason=stop"] == 4
        assert ("vllm:request_success_total", "finished_reason=error") not in found
        assert ("k2_requests_total", "finished_reason=abort") not in found
        for prefix in ("k2_", "vllm:"):
            assert found[f"{prefix}time_to_first_token_seconds_count", ""] == 6
        assert found["vllm:request_queue_time_seconds_sum", ""] == 6 * 0.125
        assert found["vllm:request_decode_time_seconds_sum", ""] == found["k2_request_decode_seconds_sum", ""] == 9
        assert found["k2_http_requests_total", f"method=POST,route={CHAT},status=500"] == 1
        live.client.get("/some/path/nobody/has")
        assert samples(live)["k2_http_requests_total", "method=GET,route=other,status=404"] == 1


def test_counts_of_the_engine_under_both_names() -> None:
    stats = DecodeStats(3, prompt_tokens=50, generated_tokens=40, passes=10, tokens=39, rows=60, drafted_passes=9)
    stats.accepted, stats.reached = [8, 5, 1], [9, 8, 5]
    status = EngineStatus((7,), (3, 4), 200, 50, 20, 90, 30, 2)
    engine = ScriptedEngine(snapshot=Snapshot(status, stats))
    with live_server(engine) as live:
        found = samples(live)
        assert found["vllm:num_requests_running", ""] == found["k2_requests_running", ""] == 2
        assert found["vllm:num_requests_waiting", ""] == 1 and found["vllm:kv_cache_usage_perc", ""] == 0.25
        assert found["vllm:prefix_cache_queries_total", ""] == 90 and found["vllm:prefix_cache_hits_total", ""] == 30
        assert found["vllm:num_preemptions_total", ""] == 2
        assert found["vllm:generation_tokens_total", ""] == 40 and found["vllm:prompt_tokens_total", ""] == 50
        assert found["vllm:spec_decode_num_drafts_total", ""] == 9
        assert found["vllm:spec_decode_num_draft_tokens_total", ""] == found["k2_drafted_nodes_total", ""] == 50
        assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 14
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert [found[name, f"position={i}"] for i in range(3)] == [8, 5, 1]
        assert [found["k2_reached_by_depth_total", f"depth={i}"] for i in (1, 2, 3)] == [9, 8, 5]
        info = "block_size=64,enable_prefix_caching=True,num_gpu_blocks=256"
        assert found["vllm:cache_config_info", info] == 1
        assert found["k2_engine_ready", ""] == 1
        engine.state = "failed"
        assert samples(live)["k2_engine_ready", ""] == 0
