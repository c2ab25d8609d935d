"""Where a setting is measured: the whole server in virtual time, or a server process with a real model."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import trio
from trio.testing import MockClock

from wsbatch.batching.costs import CostModel
from wsbatch.client import Client, connect, open_client
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener, VirtualWorker, open_virtual_engine
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.http_client import dial_url
from wsbatch_bench.load.server import server_process, wsbatch_command
from wsbatch_bench.load.target import WebSocketTarget, open_websocket_target
from wsbatch_bench.sweep.setting import Costs, Setting
from wsbatch_bench.trio_run import run_trio

_T = TypeVar("_T")
_HOST = "virtual"


class Stage(Protocol):
    """Runs a plan against a setting."""

    @property
    def name(self) -> str:
        """`virtual` or `real`."""
        ...

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """Start a server of this setting, put the load on it, end it. Blocks until then."""
        ...


@dataclass(frozen=True)
class VirtualStage:
    """Client, wire, server and scheduler as they are; a model that sleeps for a step's cost, on a clock that jumps."""

    costs: Costs
    name = "virtual"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. Equal runs give equal results."""

        async def main() -> LoadRun:
            config = setting.config(model="simulated")
            async with open_virtual_target(config, self.costs[setting.scheduler]) as (target, _):
                return await run_load(target, plan)

        return run_virtual(main)


@dataclass(frozen=True)
class RealStage:
    """`wsbatch serve` in a process of its own, on this machine; a fresh one for each run.

    Attributes:
        model: as `wsbatch serve --model` takes it.
        flags: further flags of `wsbatch serve`.
    """

    model: str
    flags: tuple[str, ...] = ()
    name = "real"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. Raises RuntimeError where the server does not start."""

        command = wsbatch_command("serve", "--model", self.model, *setting.measuring_flags(), *self.flags)
        with server_process(command) as server:
            return run_trio(load_url, server.url, plan)


async def load_url(url: str, plan: LoadPlan) -> LoadRun:
    """Put the load on the server that listens at `url`."""
    async with open_url_target(url, connections=plan.connections) as target:
        return await run_load(target, plan)


@asynccontextmanager
async def open_url_target(url: str, *, connections: int = 16) -> AsyncIterator[WebSocketTarget]:
    """Connect to the server that listens at `url`, ready for load."""
    dial, host, _ = dial_url(url)
    async with open_websocket_target(partial(connect, url), dial=dial, host=host, connections=connections) as target:
        yield target


def serve_command(model: str, setting: Setting, flags: Sequence[str] = ()) -> str:
    """What to type for a server of this setting; `flags` are those that it was measured with."""
    return " ".join(["wsbatch serve", "--model", model, *setting.flags(), *flags])


@asynccontextmanager
async def open_virtual_target(
    config: EngineConfig, costs: CostModel, *, connections: int = 1
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
    return run_trio(function, *args, clock=MockClock(autojump_threshold=0))


def _make_deterministic() -> None:
    """Tasks of one tick run in random order, on purpose. Two runs of one cell must give the same figures.

    There is no public switch. These two names are what pytest-trio sets for hypothesis, for the same reason.
    """
    internals: Any = trio._core._run
    internals._ALLOW_DETERMINISTIC_SCHEDULING = True
    internals._r.seed(0)
