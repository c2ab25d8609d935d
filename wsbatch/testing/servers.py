"""A served engine on a real port of this machine, and streams to it that are closed at the end."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from wsbatch.config import ServerConfig
from wsbatch.messages import Hello
from wsbatch.nurseries import background_tasks
from wsbatch.server.serve import Server, serve
from wsbatch.testing.clients import BareClient
from wsbatch.testing.engines import ScriptedEngine
from wsbatch.wire import Codec


class Served:
    """What `serving` yields.

    Attributes:
        server: running on a free port.
        engine: behind it.
    """

    def __init__(self, server: Server, engine: ScriptedEngine) -> None:
        self.server = server
        self.engine = engine
        self._streams: list[trio.SocketStream] = []

    async def tcp(self) -> trio.SocketStream:
        """A new TCP connection."""
        self._streams.append(await trio.open_tcp_stream("127.0.0.1", self.server.port))
        return self._streams[-1]

    async def tls(self, trust: ssl.SSLContext) -> "trio.SSLStream[trio.SocketStream]":
        """A new TLS connection; its handshake is still to be done."""
        return trio.SSLStream(await self.tcp(), trust, server_hostname="127.0.0.1", https_compatible=True)

    async def client(self, codec: Codec | None = None) -> BareClient:
        """A new WebSocket whose hello has been read."""
        client = BareClient(await self.tcp(), codec)
        await client.open()
        assert isinstance(await client.receive(), Hello)
        return client

    async def aclose(self) -> None:
        """Close every stream that was opened here."""
        for stream in self._streams:
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def serving(
    config: ServerConfig, *, engine: ScriptedEngine | None = None, interval_s: float | None = 0.0
) -> AsyncIterator[Served]:
    """Serve while the block runs; every `interval_s` each live stream gets a token (None: none by itself)."""
    engine = engine or ScriptedEngine()
    async with background_tasks() as nursery:
        served = Served(await nursery.start(serve, engine, config), engine)
        if interval_s is not None:
            nursery.start_soon(lambda: engine.play(interval_s=interval_s))
        try:
            yield served
        finally:
            await served.aclose()
