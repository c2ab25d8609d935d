"""Clients that connect, generate and vanish, over and over, on real sockets: a real engine is left as it was.

`python bench/lab/soak.py --vanish 1000` does the same against a server process.
"""

import os
import random
from collections import Counter
from collections.abc import Callable

import trio

from lab_tools.vanishing import MANNERS, vanish
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.open import open_engine
from wsbatch.server.serve import Server, serve

CYCLES = 300
AT_ONCE = 20


class Idle:
    """What an idle server holds, to be compared with what it holds when everybody has vanished."""

    def __init__(self, engine: BatchEngine, server: Server) -> None:
        value = engine.metrics.registry.get_sample_value
        admission, pool = engine.core._admission._places, engine.scheduler.pool  # type: ignore[attr-defined]
        self.held = {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "connections": server.metrics.registry.get_sample_value("wsbatch_connections"),
            "running": value("wsbatch_num_requests_running"),
            "waiting": value("wsbatch_num_requests_waiting"),
            "requests": (len(engine.core._requests), len(engine.scheduler.queue)),
            "places": (admission.requests, admission.tokens),
            "lines": len(engine.core._admission._fairness._lines),
            "blocks": (pool.used, pool.free + pool.cached),
            "server": repr(server),
        }


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await trio.sleep(0.01)


async def test_vanishing_clients_leave_a_server_as_it_was() -> None:
    engine_config = EngineConfig(
        model="simulated:tau_ms=1,alpha_ms=0,beta_ms=0", scheduler="continuous", max_batch_size=8, step_stall_s=30
    )
    server_config = ServerConfig(port=0, ping_interval_s=0.2, ping_timeout_s=0.2, close_timeout_s=0.2)
    manners = Counter[str]()

    async def cycle(server: Server, limiter: trio.CapacityLimiter, manner: str) -> None:
        async with limiter:
            await vanish("127.0.0.1", server.port, manner)
            manners[manner] += 1

    async with open_engine(engine_config) as engine, trio.open_nursery() as nursery:
        server: Server = await nursery.start(serve, engine, server_config)
        await vanish("127.0.0.1", server.port, "close")  # whatever the first connection makes for good
        await until(lambda: Idle(engine, server).held["connections"] == 0)
        await until(lambda: not engine.core._requests)
        before = Idle(engine, server).held
        limiter, source = trio.CapacityLimiter(AT_ONCE), random.Random(5)
        with trio.fail_after(60):
            async with trio.open_nursery() as clients:
                for _ in range(CYCLES):
                    clients.start_soon(cycle, server, limiter, source.choice(list(MANNERS)))
        assert set(manners) == set(MANNERS)
        with trio.move_on_after(10):
            await until(lambda: Idle(engine, server).held == before)
        assert Idle(engine, server).held == before
        refused = server.metrics.registry.get_sample_value("wsbatch_requests_refused_total", {"code": "internal_error"})
        assert refused is None
        engine.scheduler.check()  # type: ignore[attr-defined]
        nursery.cancel_scope.cancel()
