"""What an engine counts: of its requests, whoever runs their steps, and of its steps, where it runs them itself.

One Prometheus registry per engine, so that two engines in a process do not collide. Names follow vLLM's with the
prefix `wsbatch_`, so dashboards carry over by a search and replace.
"""

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wsbatch.batching.costs import StepCost
from wsbatch.batching.scheduler import CacheStats
from wsbatch.errors import BY_CODE
from wsbatch.messages import Finished, FinishReason

_REFUSAL_CODES = {*BY_CODE, "internal_error"}
_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _CacheCollector(Collector):
    """The KV pool's numbers, read from the scheduler when they are asked for."""

    def __init__(self, cache: Callable[[], CacheStats | None]) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        stats = self._cache()
        if stats is None:
            return
        usage = stats.used_blocks / stats.total_blocks
        yield GaugeMetricFamily("wsbatch_kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", usage)
        for name, text, value in (
            ("num_preemptions", "Running requests that gave way to others", stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.queried_tokens),
            ("prefix_cache_hits", "Prompt tokens found there", stats.hit_tokens),
            ("prefix_cache_evictions", "Cached KV blocks given up for new use", stats.evictions),
        ):
            yield CounterMetricFamily(f"wsbatch_{name}", text, value)


class Metrics:
    """A registry of its own, open for whoever embeds its owner, and in it what was refused."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refused = self._counter("requests_refused", "Requests and connections refused or failed", ("code",))

    def count_refused(self, code: str) -> None:
        """Count one refusal or failure. A code that only a replica knows is `other`: peers choose no labels here."""
        self.refused.labels(code if code in _REFUSAL_CODES else "other").inc()

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"wsbatch_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"wsbatch_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"wsbatch_{name}", text, buckets=buckets, registry=self.registry)


class RequestMetrics(Metrics):
    """What every engine counts of its requests.

    Args:
        running: how many are running; asked at every scrape.
        waiting: how many wait.
    """

    def __init__(self, *, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        super().__init__()
        self._gauge("num_requests_running", "Requests in the running batch").set_function(running)
        self._gauge("num_requests_waiting", "Requests in the queue").set_function(waiting)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated for requests")
        self.success = self._counter("request_success", "Requests finished", ("finished_reason",))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _LATENCY_BUCKETS_S
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between a request's tokens", _TPOT_BUCKETS_S
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _LATENCY_BUCKETS_S)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first step", _LATENCY_BUCKETS_S)

    def observe_finished(self, finished: Finished) -> None:
        """Count one request that ran to its end."""
        timing, tokens = finished.timing, finished.usage.completion_tokens
        known = finished.finish_reason in get_args(FinishReason)
        self.success.labels(finished.finish_reason if known else "other").inc()
        self.generation_tokens.inc(tokens)
        self.queue_time.observe(timing.queue_ms / 1000)
        self.e2e_latency.observe(timing.total_ms / 1000)
        if tokens:
            self.time_to_first_token.observe(timing.ttft_ms / 1000)
        if tokens > 1:
            self.time_per_output_token.observe((timing.total_ms - timing.ttft_ms) / 1000 / (tokens - 1))


class EngineMetrics(RequestMetrics):
    """The same of an engine that runs steps, and what it counts of these.

    Args:
        running: how many requests are running; asked at every scrape.
        waiting: how many wait.
        cache: the KV pool's numbers; None where there is no such pool.
    """

    def __init__(
        self, *, running: Callable[[], float], waiting: Callable[[], float], cache: Callable[[], CacheStats | None]
    ) -> None:
        super().__init__(running=running, waiting=waiting)
        self.batch_size = self._histogram("batch_size", "Rows computed in a step", _SIZE_BUCKETS)
        self.step_seconds = self._histogram("step_seconds", "Time of a model step", _TPOT_BUCKETS_S)
        self.hol_delay = self._histogram(
            "head_of_line_delay_seconds", "Batch end minus a request's own end, dynamic batches", _LATENCY_BUCKETS_S
        )
        self.issued_tokens = self._counter("issued_tokens", "Token slots computed, padding included", ("phase",))
        self.useful_tokens = self._counter("useful_tokens", "Token slots computed that somebody asked for", ("phase",))
        self.slot_utilization = self._gauge("slot_utilization", "Live rows over rows computed, last decode step")
        self.registry.register(_CacheCollector(cache))

    def observe_step(self, cost: StepCost) -> None:
        """Count one step."""
        self.batch_size.observe(cost.rows)
        self.step_seconds.observe(cost.seconds)
        self.issued_tokens.labels("prefill").inc(cost.prefill_tokens)
        self.useful_tokens.labels("prefill").inc(cost.useful_prefill_tokens)
        self.issued_tokens.labels("decode").inc(cost.decode_slots)
        self.useful_tokens.labels("decode").inc(cost.useful_decode_slots)
        if cost.decode_slots:
            self.slot_utilization.set(cost.useful_decode_slots / cost.decode_slots)
