"""Replicas that misbehave: a real server over an engine that does what no engine should."""

from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from wsbatch.client import Client, open_client
from wsbatch.config import ServerConfig
from wsbatch.engine.stream import Stream
from wsbatch.errors import ModelError
from wsbatch.messages import GenerateRequest
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener, ScriptedEngine


class MisbehavingEngine(ScriptedEngine):
    """Says that it is of the kind of the virtual replicas, and has nothing to do. `befall` is told of each request."""

    def __init__(self, befall: Callable[["MisbehavingEngine", Stream], None] | None = None, *, submit_s: float = 0.0):
        super().__init__(submit_s=submit_s)
        self.info = replace(self.info, name="simulated", revision="simulated-1", dtype="float32", max_model_len=8192)
        self.befall = befall
        self.asked = 0

    async def submit(
        self,
        request: GenerateRequest,
        *,
        client: Hashable = None,
        on_event: Callable[[Stream], None] | None = None,
        checked: bool = False,
    ) -> Stream:
        self.asked += 1
        stream = await super().submit(request, client=client, on_event=on_event, checked=checked)
        if self.befall is not None:
            self.befall(self, stream)
        return stream


def fail(engine: MisbehavingEngine, stream: Stream) -> None:
    engine.fail(stream, ModelError("this device is broken"))


def shut_down(engine: MisbehavingEngine, stream: Stream) -> None:
    engine.finish(stream, "shutdown")


class Misbehaving:
    """A replica over such an engine; `dial` it."""

    def __init__(self, engine: MisbehavingEngine, config: ServerConfig | None = None) -> None:
        self.engine = engine
        self.server = Server(engine, config or ServerConfig(), addresses=[("127.0.0.1", 1)])
        self._listener = MemoryListener()

    async def run(self, *, task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED) -> None:
        await self.server.run([self._listener], task_status=task_status)

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Client]:
        async with open_client(await self._listener.connect(), "misbehaving", keepalive_s=None) as client:
            yield client
