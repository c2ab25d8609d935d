"""What a pool counts beside what every engine does."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class PoolMetrics:
    """Registered with an engine's own metrics, so that one scrape has both."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], float]) -> None:
        """`ready` counts the replicas that take requests."""
        gauge = Gauge("wsbatch_replicas_ready", "Replicas that take requests", registry=registry)
        gauge.set_function(ready)
        self.moved = Counter(
            "wsbatch_requests_moved", "Requests without a token yet that went to another replica", registry=registry
        )
        self.resumed = Counter(
            "wsbatch_requests_resumed", "Streams that another replica went on with", registry=registry
        )
