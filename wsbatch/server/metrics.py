"""What a server counts of its connections and its event loop, and the page that shows the engine's metrics as well."""

from collections.abc import Iterable

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from wsbatch.engine.metrics import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TICK_S = 0.005
_TICKS_A_COUNT = 200


class ServerMetrics(Metrics):
    """One server's; what it refuses itself is counted here, what its engine refuses there."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = self._gauge("connections", "Open WebSocket connections")
        self.event_loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late a 5 ms ticker on the event loop was", _LAG_BUCKETS_S
        )
        self.trio_tasks = self._gauge("trio_tasks", "Tasks of the event loop")

    async def watch_loop(self) -> None:
        """Measure how late the event loop runs: what holds it up holds up every client's tokens.

        Not part of `Server.run`: in virtual time a ticker would only be work.
        """
        while True:
            # Seldom: it looks at every open connection.
            self.trio_tasks.set(trio.lowlevel.current_statistics().tasks_living)
            for _ in range(_TICKS_A_COUNT):
                due_s = trio.current_time() + _TICK_S
                await trio.sleep_until(due_s)
                self.event_loop_lag.observe(trio.current_time() - due_s)

    def page(self, engine: Metrics) -> bytes:
        """What both count, in Prometheus' text format; `CONTENT_TYPE` is its media type."""
        return generate_latest(Joined(engine.registry, self.registry))


class Joined(Collector):
    """Several registries as one: of a counter that stands in more than one, the sum."""

    def __init__(self, *registries: CollectorRegistry) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples = _added(known.samples, family.samples)
        return families.values()


def _added(left: list[Sample], right: list[Sample]) -> list[Sample]:
    """The samples of one counter in two registries, which was made when the first of the two was."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in (*left, *right):
        key = sample.name, tuple(sorted(sample.labels.items()))
        if (known := values.get(key)) is not None:
            value = min(known.value, sample.value) if sample.name.endswith("_created") else known.value + sample.value
            sample = sample._replace(value=value)
        values[key] = sample
    return list(values.values())
