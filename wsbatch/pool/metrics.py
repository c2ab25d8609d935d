"""What a pool counts: of its requests what every engine does, and its replicas."""

from collections.abc import Callable

from wsbatch.engine.metrics import RequestMetrics


class PoolMetrics(RequestMetrics):
    """One pool's. Steps are its replicas', and on their pages.

    Args:
        running: how many requests are running; asked at every scrape, as the others are.
        waiting: how many wait.
        ready: how many replicas take requests.
        ejected: how many of those get none for a while.
    """

    def __init__(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        ready: Callable[[], float],
        ejected: Callable[[], float],
    ) -> None:
        super().__init__(running=running, waiting=waiting)
        self._gauge("replicas_ready", "Replicas that take requests").set_function(ready)
        self._gauge(
            "replicas_ejected", "Replicas that get no requests for a while: they fail what others do"
        ).set_function(ejected)
        self.moved = self._counter("requests_moved", "Requests without a token yet that went to another replica")
        self.resumed = self._counter("requests_resumed", "Streams that another replica went on with")
