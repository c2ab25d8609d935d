"""For the tests on Ray: fleets on a cluster, and load that notices what is lost or altered."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from wsbatch.config import EngineConfig, FleetConfig, PoolConfig
from wsbatch.messages import Event, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.pool import EnginePool
from wsbatch.pool.ray import Fleet, open_fleet

# For whatever must happen: never waited out in a run that passes.
PATIENCE_S = 300


def add_node(cluster: Any) -> None:
    """One more node. In the main thread only: a node's processes end with the thread that started them."""
    cluster.add_node(
        num_cpus=1,
        node_ip_address="127.0.0.1",
        object_store_memory=78_643_200,  # the least that Ray allows
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )


@asynccontextmanager
async def fleet_of(
    count: int, engine: EngineConfig, cluster: Any, *, drain_s: float = 30.0, **settings: Any
) -> AsyncIterator[Fleet]:
    """So many replicas, all of them ready."""
    with trio.fail_after(PATIENCE_S):
        async with open_fleet(
            engine,
            FleetConfig(replicas=count, **settings),
            address=cluster.address,
            pool_config=PoolConfig(connections=2),
            drain_s=drain_s,
        ) as fleet:
            await all_ready(fleet, count)
            yield fleet


async def all_ready(fleet: Fleet, count: int) -> None:
    await until(lambda: ready(fleet) == count)


def ready(fleet: Fleet) -> int:
    return sum(replica.state == "ready" for replica in fleet.pool.replicas.values())


def resumed(pool: EnginePool) -> float:
    """Streams that another replica went on with."""
    value = pool.metrics.registry.get_sample_value("wsbatch_requests_resumed_total")
    assert value is not None
    return value


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.02)


async def pid_of(fleet: Fleet, name: str) -> int:
    """The process of a replica."""
    actor = fleet.actors[name]
    pid: int = await trio.to_thread.run_sync(lambda: fleet._ray.get(actor.pid.remote()))
    return pid


async def kill(fleet: Fleet, name: str) -> None:
    os.kill(await pid_of(fleet, name), signal.SIGKILL)


async def node_of(fleet: Fleet, name: str) -> int:
    """The process of the node that a replica is on."""
    return parent_of(await pid_of(fleet, name))


def parent_of(pid: int) -> int:
    """Of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Load:
    """Streams of a few different requests, greedy and seeded; each must give what it gave when nothing disturbed it.

    Attributes:
        begun, served: streams, of all clients.
        tokens: received so far.
        wrong: streams that failed, or whose text was another.
    """

    def __init__(self, pool: EnginePool, *, kinds: int, max_tokens: int) -> None:
        self.pool = pool
        self.begun = 0
        self.served = 0
        self.tokens = 0
        self.wrong: list[tuple[int, str, Event | None]] = []
        self._requests = [
            GenerateRequest(
                prompt=f"Request {number}:",
                sampling=SamplingParams(max_tokens=max_tokens, temperature=number % 2, seed=number, ignore_eos=True),
            )
            for number in range(kinds)
        ]
        self._undisturbed: list[str] = []
        self._enough = False

    async def __aenter__(self) -> "Load":
        """Note what each request gives undisturbed."""
        texts = [""] * len(self._requests)

        async def ask(number: int) -> None:
            texts[number], end = await self._ask(number)
            assert isinstance(end, Finished), end

        async with trio.open_nursery() as nursery:
            for number in range(len(texts)):
                nursery.start_soon(ask, number)
        self._undisturbed = texts
        self.tokens = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def running(self, clients: int, *, at_least: int = 0) -> AsyncIterator[None]:
        """Clients that ask one thing after another while the block runs, and until so many were asked."""
        self._enough = False
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(self._client, at_least)
            yield
            self._enough = True

    async def more_tokens(self, count: int) -> None:
        """Wait until so many more have come: those streams are under way."""
        due = self.tokens + count
        await until(lambda: self.tokens >= due)

    async def _client(self, at_least: int) -> None:
        while not self._enough or self.begun < at_least:
            number = self.begun % len(self._requests)
            self.begun += 1
            text, end = await self._ask(number)
            if not isinstance(end, Finished) or end.finish_reason != "length" or text != self._undisturbed[number]:
                self.wrong.append((number, text, end))
            self.served += 1

    async def _ask(self, number: int) -> tuple[str, Event | None]:
        text, end = "", None
        async with self.pool.generate(self._requests[number]) as stream:
            async for event in stream:
                if isinstance(event, Tokens | Finished):
                    text += event.text
                if isinstance(event, Tokens):
                    self.tokens += len(event.token_ids)
                end = event
        return text, end
