"""Autoscaling in virtual time: Ray and the replicas are not there, what the pool says of them is."""

from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from wsbatch.config import EngineConfig, FleetConfig
from wsbatch.messages import Status
from wsbatch.pool.ray import Fleet

BUSY = Status("ready", 100, 4, 5000, 100, 4, queue_ms=60_000.0, step_ms=10.0)


class Growing(Fleet):
    """Its replicas load until told that they are ready."""

    def start(self) -> Any:
        name = f"replica-{len(self.actors) + 1}"
        self.actors[name] = None
        replica = self.pool.replicas[name] = SimpleNamespace(name=name, state="away")  # type: ignore[assignment]
        return replica


async def test_a_replica_that_loads_is_awaited_before_another_is_started(autojump_clock: MockClock) -> None:
    config = FleetConfig(replicas=1, min_replicas=1, max_replicas=8, scale_up_after_s=10.0, start_timeout_s=600.0)
    pool: Any = SimpleNamespace(replicas={}, status=lambda: BUSY)
    fleet = Growing(None, pool, config, EngineConfig(), drain_s=1.0)
    await fleet.scale(1)
    pool.replicas["replica-1"].state = "ready"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.autoscale)
        await trio.sleep(500)
        assert sorted(fleet.actors) == ["replica-1", "replica-2"]
        pool.replicas["replica-2"].state = "ready"
        await trio.sleep(5)
        assert len(fleet.actors) == 2  # its own effect is yet to be seen
        await trio.sleep(10)
        assert len(fleet.actors) == 3
        await trio.sleep(650)  # one that is never ready does not stop it for ever
        assert len(fleet.actors) == 4
        nursery.cancel_scope.cancel()
