from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.metrics import Metrics
from jaxserve.server.lifecycle import ServerOptions
from jaxserve.types import (
    STEP_TIME_BOUNDS_S,
    Durations,
    EngineStats,
    Event,
    KernelsInUse,
    MemoryUse,
    Request,
    SamplingParams,
    Timeline,
)
from tests.server.running import RunningServer, raw_post

BODY = {"prompt": "hello", "max_tokens": 6, "seed": 1}
NAMES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "prompt_tokens_cached_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "kv_cache_cached_perc", "num_queued_tokens", "tokens_per_second",
    "slow_steps_total", "invariant_violations_total", "num_preemptions_total",
    "num_requests_waiting_by_reason",
    "generation_tokens_total", "embeddings_total", "request_success_total", "admission_rejections_total",
    "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count", "request_inference_time_seconds_count",
    "request_prompt_tokens_count", "request_generation_tokens_count", "engine_host_time_seconds_total",
    "engine_device_wait_seconds_total", "engine_steps_total", "compilations_after_warmup",
    "engine_step_host_time_seconds_count", "engine_step_device_time_seconds_count",
]  # fmt: skip


def metrics(stats: EngineStats | None = None, **kwargs: object) -> Metrics:
    return Metrics("m", engine_stats=lambda: stats or EngineStats(), **kwargs)  # type: ignore[arg-type]


def sample(made: Metrics, name: str, **labels: str) -> float:
    value = made.registry.get_sample_value(f"jaxserve:{name}", {"model_name": "m", **labels})
    assert value is not None, name
    return value


def request(num_prompt: int = 3, arrival_s: float = 100.0) -> Request:
    return Request("r", (1,) * num_prompt, SamplingParams(max_tokens=9), arrival_s)


def test_every_name_that_dashboards_know_is_served_with_the_prefix():
    with RunningServer() as running:
        running.post("/v1/completions", BODY)
        for name in NAMES:
            running.metric(f"jaxserve:{name}")
        _, headers, raw = running.request("GET", "/metrics")
        assert headers["Content-Type"].startswith("text/plain")
        assert b"_created" not in raw


def test_another_prefix_can_be_asked_for():
    options = ServerOptions(port=0, metrics_prefix="vllm:")
    with RunningServer(options=options) as running:
        assert running.metric("vllm:num_requests_running") == 0
        _, _, raw = running.request("GET", "/metrics")
        assert b"jaxserve:" not in raw


@pytest.mark.parametrize("prefix", ["", "9a:", "a b", "a-b", "é"])
def test_a_prefix_that_prometheus_would_not_take_is_an_error(prefix):
    with pytest.raises(ConfigError, match="prefix"):
        metrics(prefix=prefix)


def test_tokens_and_requests_are_counted():
    with RunningServer() as running:
        running.post("/v1/completions", BODY)
        running.stream("/v1/completions", {**BODY, "prompt": ["a", "hello"]})
        running.post("/v1/completions", {"prompt": ""})
        running.post("/v1/completions", {"prompt": "x" * 300})
        running.post("/v1/completions", {"prompt": "x", "model": "gpt-4"})
        for name, value in {
            "prompt_tokens_total": 11,
            "prompt_tokens_cached_total": 4,
            "prefix_cache_queries_total": 11,
            "prefix_cache_hits_total": 4,
            "generation_tokens_total": 18,
            "request_success_total": 3,
            "admission_rejections_total": 3,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 15,
            "e2e_request_latency_seconds_count": 3,
            "request_generation_tokens_sum": 18,
            "request_prompt_tokens_sum": 11,
        }.items():
            assert running.metric(f"jaxserve:{name}") == value, name
        _, _, raw = running.request("GET", "/metrics")
        for reason in (b"context_length_exceeded", b"model_not_found", b"invalid"):
            assert b'model_name="fake-model",reason="%s"} 1.0' % reason in raw


def test_running_waiting_and_cache_usage_show_what_is_and_go_back_to_zero():
    with RunningServer() as running:
        running.runner.hold()
        connections = [running.connect() for _ in range(6)]
        for connection in connections:
            connection.sendall(raw_post("/v1/completions", BODY, headers="Connection: close\r\n"))
        running.wait(lambda: running.server.num_open == 6)
        running.wait(lambda: running.metric("jaxserve:num_requests_waiting") >= 2)
        assert running.metric("jaxserve:num_requests_running") == 6 - running.metric(
            "jaxserve:num_requests_waiting"
        )
        assert 0 < running.metric("jaxserve:kv_cache_usage_perc") < 1
        running.runner.release()
        for connection in connections:
            while connection.recv(1 << 16):
                pass
            connection.close()
        running.wait_idle()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert running.metric(f"jaxserve:{name}") == 0


def test_latencies_count_from_arrival_and_are_split_at_the_stages():
    made = metrics()
    track = made.track(request())
    track.event(Event("r", 104.0, token_ids=(5,), num_output_tokens=1))
    track.event(Event("r", 104.5, token_ids=(5, 6), num_output_tokens=3))
    times = Timeline(100.0, admitted_s=103.0, first_token_s=104.0, last_token_s=104.5, finished_s=105.0)
    track.event(Event("r", 105.0, finish_reason="stop", num_output_tokens=3, timeline=times))
    assert sample(made, "time_to_first_token_seconds_sum") == 4
    assert sample(made, "inter_token_latency_seconds_sum") == 0.5
    assert sample(made, "inter_token_latency_seconds_count") == 2
    assert sample(made, "request_queue_time_seconds_sum") == 3
    assert sample(made, "request_prefill_time_seconds_sum") == 1
    assert sample(made, "request_decode_time_seconds_sum") == 0.5
    assert sample(made, "request_inference_time_seconds_sum") == 1.5
    assert sample(made, "request_time_per_output_token_seconds_sum") == 0.25
    assert sample(made, "e2e_request_latency_seconds_sum") == 5
    assert sample(made, "request_success_total", finished_reason="stop") == 1
    assert sample(made, "prompt_tokens_total") == 3


def test_a_request_that_was_cut_off_is_counted_but_tells_no_latency():
    made = metrics()
    made.track(request()).abandoned()
    made.track(request()).event(Event("r", 1.0, finish_reason="error", error="x"))
    assert sample(made, "request_success_total", finished_reason="abort") == 1
    assert sample(made, "request_success_total", finished_reason="error") == 1
    assert sample(made, "e2e_request_latency_seconds_count") == 0
    assert sample(made, "prompt_tokens_total") == 0


def test_the_figures_of_the_engine_are_one_snapshot_at_the_scrape():
    stats = EngineStats(
        num_running=2, num_waiting=3, wait_reason="pages", num_preemptions=6,
        num_slow_steps=8, num_faults=9,
        num_pages_total=8, num_pages_used=2,
        num_steps={"prefill": 4, "decode": 5}, host_time_s=1.5, device_wait_s=2.5,
    )  # fmt: skip
    made = metrics(stats, compilations_after_warmup=lambda: 7)
    assert sample(made, "num_requests_running") == 2
    assert sample(made, "num_requests_waiting") == 3
    assert sample(made, "num_requests_waiting_by_reason", reason="pages") == 3
    assert sample(made, "num_requests_waiting_by_reason", reason="slots") == 0
    assert sample(made, "num_preemptions_total") == 6
    assert sample(made, "slow_steps_total") == 8
    assert sample(made, "invariant_violations_total") == 9
    assert sample(made, "kv_cache_usage_perc") == 0.25
    assert sample(made, "engine_steps_total", kind="decode") == 5
    assert sample(made, "engine_host_time_seconds_total") == 1.5
    assert sample(made, "engine_device_wait_seconds_total") == 2.5
    assert sample(made, "compilations_after_warmup") == 7


def test_memory_is_told_by_every_figure_of_it():
    made = metrics(EngineStats(), memory=MemoryUse(12, 34, 5, 67, 8, 9))
    figures = {"weights_bytes": 12, "kv_bytes": 34, "kv_bytes_per_token": 5, "kv_tokens": 67,
               "max_model_len": 8, "num_full_requests": 9}  # fmt: skip
    assert {name: sample(made, name) for name in figures} == figures


def test_what_it_runs_on_is_told_by_labels():
    kernels = KernelsInUse("native", "xla", "C++ kernels for avx9")
    assert sample(metrics(EngineStats(), kernels=kernels), "backend_info", **kernels._asdict()) == 1


def test_times_by_step_are_histograms_over_all_sizes():
    counts = tuple(range(len(STEP_TIME_BOUNDS_S) + 1))
    made = metrics(EngineStats(host_times=Durations(counts, 1.5), device_times=Durations(counts, 2.5)))
    for name, total_s in (("host", 1.5), ("device", 2.5)):
        name = f"engine_step_{name}_time_seconds"
        assert sample(made, f"{name}_sum") == total_s
        assert sample(made, f"{name}_count") == sum(counts)
        assert sample(made, f"{name}_bucket", le="0.001") == 0 + 1 + 2 + 3 + 4
        assert sample(made, f"{name}_bucket", le="60.0") == sum(counts[:-1])
        assert sample(made, f"{name}_bucket", le="+Inf") == sum(counts)


def test_a_refusal_for_an_unlisted_reason_is_counted_as_invalid():
    made = metrics()
    for code in ("queue_full", "something_new", None):
        made.reject(code)
    assert sample(made, "admission_rejections_total", reason="queue_full") == 1
    assert sample(made, "admission_rejections_total", reason="invalid") == 2
