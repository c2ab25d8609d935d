"""Replicas on a real Ray, on this machine alone, of the simulated model: killed, replaced, more and fewer."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from wsbatch.config import EngineConfig, FleetConfig, PoolConfig
from wsbatch.messages import Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.ray import Fleet, open_fleet

pytest.importorskip("ray", reason="needs the extra `ray`")
# Ray leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

PATIENCE_S = 120


@pytest.fixture(autouse=True)
def quiet_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@asynccontextmanager
async def fleet_of(count: int, *, address: str = "local", **settings: Any) -> AsyncIterator[Fleet]:
    engine = EngineConfig(model="simulated:tau_ms=5", scheduler="continuous", max_batch_size=16)
    config = FleetConfig(replicas=count, **{"replica_cpus": 0.25} | settings)
    with trio.fail_after(PATIENCE_S):
        async with open_fleet(engine, config, address=address, pool_config=PoolConfig(connections=2)) as fleet:
            await until(lambda: ready(fleet) == count)
            yield fleet


def ready(fleet: Fleet) -> int:
    return sum(replica.state == "ready" for replica in fleet.pool.replicas.values())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.02)


class Load:
    """Requests, one after another from several clients, and what they gave."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.answers: dict[int, set[str]] = {}
        self.served = 0
        self.failed: list[Any] = []

    async def client(self, number: int, count: int) -> None:
        for _ in range(count):
            sampling = SamplingParams(max_tokens=40, temperature=number % 2, seed=number)
            text, end = "", None
            async with self.fleet.pool.generate(GenerateRequest(prompt=f"p{number}", sampling=sampling)) as stream:
                async for event in stream:
                    if isinstance(event, Tokens | Finished):
                        text += event.text
                    end = event
            if not isinstance(end, Finished) or end.finish_reason != "length":
                self.failed.append(end)
            self.answers.setdefault(number, set()).add(text)
            self.served += 1

    def check(self, served: int) -> None:
        assert (self.served, self.failed) == (served, [])
        assert [texts for texts in self.answers.values() if len(texts) != 1] == []  # each client's are all the same


async def test_killed_replaced_and_resized_under_load() -> None:
    async with fleet_of(2) as fleet, trio.open_nursery() as nursery:
        load = Load(fleet)
        async with trio.open_nursery() as clients:
            for number in range(10):
                clients.start_soon(load.client, number, 30)
            await until(lambda: load.served >= 20)
            actor = fleet.actors["replica-1"]
            os.kill(await trio.to_thread.run_sync(lambda: fleet._ray.get(actor.pid.remote())), signal.SIGKILL)
            await until(lambda: ready(fleet) == 1)
            await until(lambda: ready(fleet) == 2)  # Ray has started it again
            await fleet.roll()
            assert sorted(fleet.actors) == ["replica-3", "replica-4"]
            await fleet.scale(3)
            await until(lambda: ready(fleet) == 3)
            await fleet.scale(1)
            assert len(fleet.pool.replicas) == len(fleet.actors) == 1
        load.check(300)
        nursery.cancel_scope.cancel()
