"""Replicas in virtual time: whole servers over a simulated model, which a test can kill, drain, stall and restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import trio

from wsbatch.batching.costs import CostModel
from wsbatch.client import Client, open_client
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.errors import ConnectionLost
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch.server.serve import Server
from wsbatch.steps import StepPlan, StepResult
from wsbatch.testing import MemoryListener, MemoryStream, VirtualWorker, open_virtual_engine


class _Listener(MemoryListener):
    """Remembers the server's ends, so that they can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[MemoryStream] = []

    async def accept(self) -> MemoryStream:
        stream = await super().accept()
        self.accepted.append(stream)
        return stream


class VirtualReplica:
    """A server that lives until it is killed or drained, and can be started again.

    Args:
        config: of its engine.
        costs: of its steps.
        revision: of its weights, which are the same whatever it says.

    Attributes:
        engine, worker: of the present or last life.
        lives: how often it was started.
        dials: connections made to it, in all its lives.
    """

    engine: BatchEngine
    worker: VirtualWorker
    server: Server

    def __init__(
        self, config: EngineConfig, *, costs: CostModel = DEFAULT_COSTS, revision: str = "simulated-1"
    ) -> None:
        self.config = config
        self.costs = costs
        self.revision = revision
        self.lives = 0
        self.dials = 0
        self.stall_s = 0.0
        self._scope: trio.CancelScope | None = None
        self._listener: _Listener | None = None

    @property
    def alive(self) -> bool:
        """Whether it listens."""
        return self._listener is not None

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Client]:
        """A pool's way to connect to it."""
        self.dials += 1
        await trio.lowlevel.checkpoint()
        if self._listener is None:
            raise ConnectionLost("nobody listens")
        async with open_client(await self._listener.connect(), "virtual", keepalive_s=None) as client:
            yield client

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """One life: until `kill`, or the end of a `drain`."""
        self.lives += 1
        self.stall_s = 0.0
        listener = self._listener = _Listener()
        server_config = ServerConfig(max_connections=65_536, close_timeout_s=1.0)
        with trio.CancelScope() as self._scope:
            async with open_virtual_engine(self.config, self.costs) as (engine, worker):
                engine.info = replace(engine.info, revision=self.revision)
                self.engine, self.worker = engine, worker
                self._hinder(worker)
                self.server = Server(engine, server_config, addresses=[("127.0.0.1", 1)])
                task_status.started()
                try:
                    await self.server.run([listener])
                finally:
                    if self._listener is listener:
                        self._listener = None

    def kill(self) -> None:
        """As SIGKILL: what was written still arrives; nothing more is said."""
        if self._listener is not None and self._scope is not None:
            listener, self._listener = self._listener, None
            for stream in listener.accepted:
                stream.cut()
            self._scope.cancel()

    async def drain(self, grace_s: float) -> None:
        """As SIGTERM."""
        await self.server.drain(grace_s)

    def _hinder(self, worker: VirtualWorker) -> None:
        step = worker.step

        async def stalling(plan: StepPlan) -> StepResult:
            await trio.sleep(self.stall_s)
            return await step(plan)

        worker.step = stalling  # type: ignore[method-assign]
