"""The whole server in virtual time: client, in-memory streams, transport, session, engine; a model that only sleeps."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from wsbatch.client import Client, open_client
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.model.simulated import StepCosts
from wsbatch.server import Server
from wsbatch.testing.streams import MemoryListener
from wsbatch.testing.worker import VirtualWorker, open_virtual_engine
from wsbatch_bench.target import WebSocketTarget, open_websocket_target

_T = TypeVar("_T")
_HOST = "virtual"


@asynccontextmanager
async def open_virtual_target(
    config: EngineConfig, costs: StepCosts, *, connections: int = 1
) -> AsyncIterator[tuple[WebSocketTarget, VirtualWorker]]:
    """A server over a simulated model, ready for load; so many connections are open, more follow on demand.

    Only under an autojump clock; see `run_virtual`.
    """
    listener = MemoryListener()
    server_config = ServerConfig(max_connections=65_536)
    async with open_virtual_engine(config, costs) as (engine, worker), trio.open_nursery() as nursery:
        server = Server(engine, server_config, addresses=[("127.0.0.1", 1)])
        await nursery.start(server.run, [listener])

        @asynccontextmanager
        async def connect() -> AsyncIterator[Client]:
            # A server that computes for a minute is silent for a minute: that is no reason to give it up here.
            async with open_client(await listener.connect(), _HOST, keepalive_s=None) as client:
                yield client

        async with open_websocket_target(connect, dial=listener.connect, host=_HOST, connections=connections) as target:
            yield target, worker
        nursery.cancel_scope.cancel()


def run_virtual(function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
    """`trio.run` on a clock that jumps whenever everybody waits, with the same order of tasks every time."""
    _make_deterministic()
    return trio.run(function, *args, clock=MockClock(autojump_threshold=0))


def _make_deterministic() -> None:
    """Tasks of one tick run in random order, on purpose. Two runs of one cell must give the same figures.

    There is no public switch. These two names are what pytest-trio sets for hypothesis, for the same reason.
    """
    internals: Any = trio._core._run
    internals._ALLOW_DETERMINISTIC_SCHEDULING = True
    internals._r.seed(0)
