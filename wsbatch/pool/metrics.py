"""What a pool counts beside what every engine does."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class PoolMetrics:
    """Registered with an engine's own metrics, so that one scrape has both."""

    def __init__(
        self, registry: CollectorRegistry, *, ready: Callable[[], float], ejected: Callable[[], float]
    ) -> None:
        """`ready` counts the replicas that take requests, `ejected` those of them that get none for a while."""
        for name, text, count in (
            ("replicas_ready", "Replicas that take requests", ready),
            ("replicas_ejected", "Replicas that get no requests for a while: they fail what others do", ejected),
        ):
            Gauge(f"wsbatch_{name}", text, registry=registry).set_function(count)
        self.moved = Counter(
            "wsbatch_requests_moved", "Requests without a token yet that went to another replica", registry=registry
        )
        self.resumed = Counter(
            "wsbatch_requests_resumed", "Streams that another replica went on with", registry=registry
        )
