"""CPU time that a router takes for each frame and token: client, servers and router in one process, over memory.

CPU time of one thread is hardly moved by what else the machine does, unlike latencies: it says how much one router
process can carry when it has a core to itself.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import trio

from lab_tools.stamped import StampedEngine
from wsbatch.client import Client, open_client
from wsbatch.config import ServerConfig
from wsbatch.messages import Tokens
from wsbatch.pool import open_pool
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener

_STREAMS = 32


def cpu_us_per_frame(*, tokens_per_frame: int, frames: int, routed: bool) -> float:
    """Microseconds of CPU for each frame on its whole way, every frame with so many tokens."""
    return trio.run(_measure, tokens_per_frame, frames, routed)


class _Frames:
    """How many frames of tokens have come since `count` was set."""

    def __init__(self) -> None:
        self.count = 0
        self._came = trio.Event()

    async def read(self, client: Client) -> None:
        """Read a stream without end."""
        async with client.generate("x", max_tokens=1_000_000) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    self.count += 1
                    self._came.set()

    async def wait(self, count: int) -> None:
        """Wait until there are so many."""
        while self.count < count:
            self._came = trio.Event()
            await self._came.wait()


async def _measure(tokens_per_frame: int, frames: int, routed: bool) -> float:
    config = ServerConfig(frame_interval_ms=0.0)
    engine = StampedEngine()
    received = _Frames()
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        listener = MemoryListener()
        nursery.start_soon(Server(engine, config, addresses=[("127.0.0.1", 1)]).run, [listener])
        if routed:
            pool = await stack.enter_async_context(open_pool({"one": partial(_dial, listener)}))
            listener = MemoryListener()
            nursery.start_soon(Server(pool, config, addresses=[("127.0.0.1", 1)]).run, [listener])
        client = await stack.enter_async_context(_dial(listener))
        for _ in range(_STREAMS):
            nursery.start_soon(received.read, client)
        await engine.wait_live(_STREAMS)
        began_s = 0.0
        for turn in range(-20, frames // _STREAMS):  # the first ones warm it up
            if turn == 0:
                began_s = time.process_time()
            received.count = 0
            for stream in list(engine.live):
                for _ in range(tokens_per_frame):
                    engine.push(stream)
            await received.wait(_STREAMS)
        used_s = time.process_time() - began_s
        nursery.cancel_scope.cancel()
    return used_s / (frames // _STREAMS * _STREAMS) * 1e6


@asynccontextmanager
async def _dial(listener: MemoryListener) -> AsyncIterator[Client]:
    async with open_client(await listener.connect(), "memory", keepalive_s=None) as client:
        yield client
