"""Counters and histograms under the names that dashboards of such servers already use.

Requests are followed by their events, so that every latency counts from arrival, the queue included;
what the engine knows (running, waiting, pages, steps) is read from one snapshot at each scrape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from jaxserve.errors import ConfigError
from jaxserve.types import (
    STEP_TIME_BOUNDS_S,
    Durations,
    EngineStats,
    Event,
    FinishReason,
    KernelsInUse,
    MemoryUse,
    Request,
    WaitReason,
)

DEFAULT_PREFIX = "jaxserve:"
REJECTION_REASONS = (
    *("queue_full", "queue_tokens_full", "unavailable", "context_length_exceeded", "model_not_found"),
    *("invalid_api_key", "too_many_requests", "grammar_queue_full", "invalid"),
)

_TOKEN_BUCKETS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIME_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


_MEMORY = {  # fields of MemoryUse
    "weights_bytes": "Memory of the weights, as the backend keeps them.",
    "kv_bytes": "Memory of the KV cache.",
    "kv_bytes_per_token": "Of it, what a token takes in all layers.",
    "kv_tokens": "Tokens that the KV cache holds.",
    "max_model_len": "Tokens that a request may have, prompt and answer.",
    "num_full_requests": "Requests of that length that the KV cache holds at a time.",
}


class Metrics:
    """One server's metrics in a registry of their own.

    `engine_stats` and `compilations_after_warmup` are called at each scrape; `memory` and `kernels`
    stay as they are. Raises ConfigError for a prefix that Prometheus would not take.
    """

    def __init__(
        self,
        model_name: str,
        *,
        prefix: str = DEFAULT_PREFIX,
        engine_stats: Callable[[], EngineStats],
        compilations_after_warmup: Callable[[], int] | None = None,
        memory: MemoryUse | None = None,
        kernels: KernelsInUse | None = None,
    ):
        check_prefix(prefix)
        disable_created_metrics()
        self.registry = CollectorRegistry()
        label = {"model_name": model_name}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(prefix + name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(**label)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.").labels(**label)
        self.prompt_tokens_cached = counter(
            "prompt_tokens_cached", "Prompt tokens that the prefix cache gave."
        ).labels(**label)
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").labels(**label)
        self.embeddings = counter("embeddings", "Texts embedded.").labels(**label)
        success = counter("request_success", "Requests ended, by reason.", "finished_reason")
        self.finished = {
            reason: success.labels(**label, finished_reason=reason)
            for reason in get_args(FinishReason)
        }
        rejections = counter("admission_rejections", "Requests refused, by reason.", "reason")
        self.rejected = {reason: rejections.labels(**label, reason=reason) for reason in REJECTION_REASONS}
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", _TOKEN_TIME_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            _TOKEN_TIME_BUCKETS,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_TIME_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "From arrival to a slot.", _REQUEST_TIME_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From a slot to the first token.", _REQUEST_TIME_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_TIME_BUCKETS
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "From a slot to the last token.", _REQUEST_TIME_BUCKETS
        )
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKEN_BUCKETS
        )
        for name, text in _MEMORY.items() if memory is not None else ():
            gauge = Gauge(prefix + name, text, ["model_name"], registry=self.registry)
            gauge.labels(**label).set(getattr(memory, name))
        if kernels is not None:
            info = Gauge(
                prefix + "backend_info", "1, and in labels what attention and linear layers run on.",
                ["model_name", *KernelsInUse._fields], registry=self.registry,
            )  # fmt: skip
            info.labels(**label, **kernels._asdict()).set(1)
        self.registry.register(_EngineCollector(model_name, prefix, engine_stats, compilations_after_warmup))
        ProcessCollector(registry=self.registry)

    def track(self, request: Request) -> RequestTrack:
        return RequestTrack(self, request)

    def reject(self, code: str | None) -> None:
        """Count a request that was refused; codes beyond REJECTION_REASONS are the client's mistakes."""
        (self.rejected.get(code or "") or self.rejected["invalid"]).inc()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of a scrape, in the format that the Accept header prefers."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class RequestTrack:
    """Follows one request from its submission to its last event."""

    __slots__ = ("_arrival_s", "_last_s", "_metrics", "_num_prompt")

    def __init__(self, metrics: Metrics, request: Request):
        self._metrics = metrics
        self._arrival_s = request.arrival_s
        self._num_prompt = len(request.prompt_ids)
        self._last_s: float | None = None  # when the last token came

    def event(self, event: Event) -> None:
        metrics = self._metrics
        if num_tokens := len(event.token_ids):
            metrics.generation_tokens.inc(num_tokens)
            if self._last_s is None:
                metrics.prompt_tokens.inc(self._num_prompt)
                metrics.prompt_tokens_cached.inc(event.num_cached_tokens)
                metrics.time_to_first_token.observe(event.time_s - self._arrival_s)
            else:
                each_s = (event.time_s - self._last_s) / num_tokens
                for _ in range(num_tokens):
                    metrics.inter_token_latency.observe(each_s)
            self._last_s = event.time_s
        elif event.finish_reason == "length" and self._last_s is None:  # only the prompt was to be computed
            metrics.prompt_tokens.inc(self._num_prompt)
            metrics.prompt_tokens_cached.inc(event.num_cached_tokens)
        if event.embedding is not None:
            metrics.embeddings.inc()
        if event.finish_reason is not None:
            self._finish(event)

    def abandoned(self) -> None:
        self._metrics.finished["abort"].inc()

    def _finish(self, event: Event) -> None:
        metrics, times, num_output = self._metrics, event.timeline, event.num_output_tokens
        assert event.finish_reason is not None
        metrics.finished[event.finish_reason].inc()
        if event.finish_reason not in ("stop", "length"):
            return  # a request that was cut off says nothing about how long requests take
        metrics.request_prompt_tokens.observe(self._num_prompt)
        metrics.request_generation_tokens.observe(num_output)
        if times is None:
            return
        metrics.e2e_latency.observe((times.finished_s or event.time_s) - times.arrival_s)
        if times.admitted_s is None:
            return
        metrics.queue_time.observe(times.admitted_s - times.arrival_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        metrics.prefill_time.observe(times.first_token_s - times.admitted_s)
        metrics.decode_time.observe(times.last_token_s - times.first_token_s)
        metrics.inference_time.observe(times.last_token_s - times.admitted_s)
        if num_output > 1:
            decode_s = times.last_token_s - times.first_token_s
            metrics.time_per_output_token.observe(decode_s / (num_output - 1))


class _EngineCollector(Collector):
    """What one snapshot of the engine says, taken when it is asked for."""

    def __init__(
        self,
        model_name: str,
        prefix: str,
        engine_stats: Callable[[], EngineStats],
        compilations_after_warmup: Callable[[], int] | None,
    ):
        self._model_name = model_name
        self._prefix = prefix
        self._engine_stats = engine_stats
        self._compilations = compilations_after_warmup

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering must not ask an engine that is still starting

    def collect(self) -> Iterator[Metric]:
        stats = self._engine_stats()
        used = stats.num_pages_used / stats.num_pages_total if stats.num_pages_total else 0.0
        yield self._gauge("num_requests_running", "Requests that hold a slot.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield self._gauge(
            "num_queued_tokens", "Prompt tokens of the requests in the queue.", stats.num_queued_tokens
        )
        yield self._gauge(
            "tokens_per_second", "Prompt and output tokens a second lately, while busy.", stats.tokens_per_s
        )
        waiting = GaugeMetricFamily(
            self._prefix + "num_requests_waiting_by_reason",
            "Requests in the queue, by what the first of them waits for.",
            labels=["model_name", "reason"],
        )
        for reason in get_args(WaitReason):
            count = stats.num_waiting if stats.wait_reason == reason else 0
            waiting.add_metric([self._model_name, reason], count)
        yield waiting
        yield self._counter(
            "num_preemptions", "Requests that lost their pages to others for a while.", stats.num_preemptions
        )
        yield self._gauge("kv_cache_usage_perc", "Used part of the KV pages; 1 is full.", used)
        yield self._gauge(
            "kv_cache_cached_perc",
            "Part of the KV pages that is free but still known to the prefix cache.",
            stats.num_pages_cached / stats.num_pages_total if stats.num_pages_total else 0.0,
        )
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_queried_tokens
        )
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_hit_tokens
        )
        yield self._counter("engine_host_time_seconds", "Engine thread at work.", stats.host_time_s)
        yield self._counter(
            "engine_device_wait_seconds", "Engine thread waiting for the device.", stats.device_wait_s
        )
        yield self._histogram(
            "engine_step_host_time_seconds", "Engine thread at work, by step.", stats.host_times
        )
        yield self._histogram(
            "engine_step_device_time_seconds",
            "From a step's launch, or the end of the one before, until its ids are on the host.",
            stats.device_times,
        )
        steps = CounterMetricFamily(
            self._prefix + "engine_steps", "Compiled calls, by kind.", labels=["model_name", "kind"]
        )
        for kind, count in stats.num_steps.items():
            steps.add_metric([self._model_name, kind], count)
        yield steps
        yield self._counter(
            "slow_steps", "Steps that took longer than the limit (--step-timeout).", stats.num_slow_steps
        )
        yield self._counter(
            "invariant_violations", "Times that an idle engine missed slots or pages.", stats.num_faults
        )
        if self._compilations is not None:
            yield self._gauge(
                "compilations_after_warmup",
                "Compilations while serving; 0 unless a shape was missed.",
                self._compilations(),
            )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, text: str, durations: Durations) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=["model_name"])
        bounds = (*map(str, STEP_TIME_BOUNDS_S), "+Inf")
        buckets = list(zip(bounds, accumulate(durations.counts)))
        family.add_metric([self._model_name], buckets, durations.sum_s)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def check_prefix(prefix: str) -> None:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise ConfigError(
            f"metrics prefix {prefix!r} is not possible: letters, digits, '_' and ':', no digit first"
        )
