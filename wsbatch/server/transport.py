"""Connections from their first byte: a bounded head, plain HTTP or an upgrade, and how they end.

Every connection is contained: whatever happens on it, nothing but cancellation comes out. docs/limits.md lists what
was found about the libraries.
"""

import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from wsbatch.config import ServerConfig
from wsbatch.errors import QueueFull, RequestError, TooLarge
from wsbatch.server.accepting import AcceptingListener
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Connection, Disconnected
from wsbatch.server.handshake import Upgrade, accept_upgrade
from wsbatch.server.http import Answer, Exchange, Head, HttpError, refused
from wsbatch.server.input_budget import InputBudget
from wsbatch.server.memory import FreedMemory, HighWaterMark
from wsbatch.server.metrics import ServerMetrics
from wsbatch.server.pending import PendingConnections
from wsbatch.server.tcp import RawStream, linger, reset
from wsbatch.server.websocket import WebSocket

LOG = logging.getLogger("wsbatch.transport")

_READ_BYTES = 16_384
_FEWEST_PENDING = _MOST_PROBES = 64
_WORTH_GIVING_BACK = 256  # connections, of 20 to 30 KiB
_REFUSALS = {1009: TooLarge.code, 1013: QueueFull.code}  # by close code
_UNEXPECTED = "a connection ended by an unexpected error"
# How a connection's end, from either side, looks from inside: no news to anybody.
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, Disconnected)


class Transport:
    """Takes connections from listeners, answers plain HTTP and hands WebSockets to `session`.

    Args:
        config: bounds, timeouts, auth and origins.
        session: serves one WebSocket to its end.
        plain: answers a request that is not an upgrade.
        probe: the same for connections that may only ask.
        refusal: why no connection may be upgraded now; None where one may.
        metrics: connections and refusals are counted here.
        memory: is told when much of it is free again.
        deadlines: for what clients have to do in time.
        tls: None serves in the clear.

    Attributes:
        budget: of the memory that clients' large messages take.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        session: Callable[[Connection], Awaitable[None]],
        plain: Callable[[Head], Answer],
        probe: Callable[[Head], Answer],
        refusal: Callable[[], RequestError | None],
        metrics: ServerMetrics,
        memory: FreedMemory,
        deadlines: ClientDeadlines,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._session = session
        self._plain = plain
        self._probe = probe
        self._refusal = refusal
        self._metrics = metrics
        self._tls = tls
        self.budget = InputBudget(config.max_input_bytes, memory)
        self._open = 0
        self._memory = memory
        self._deadlines = deadlines
        self._high_water = HighWaterMark(_WORTH_GIVING_BACK)
        self._websockets = 0
        self._pending = PendingConnections(max(config.max_connections, _FEWEST_PENDING))
        self._probes = PendingConnections(_MOST_PROBES)

    def __repr__(self) -> str:
        return f"<Transport {self._open} open, {self._websockets} of them WebSockets>"

    def full(self) -> QueueFull | None:
        """The refusal while `max_connections` WebSockets are open."""
        if self._websockets < self._config.max_connections:
            return None
        return QueueFull(f"{self._config.max_connections} connections are open, the most allowed", retry_after_ms=1000)

    def accepting(self, listener: trio.abc.Listener[RawStream]) -> AcceptingListener:
        """The listener, for `handle` or `handle_probe`: where there are no descriptors left it makes room."""
        return AcceptingListener(listener, self._pending)

    async def handle(self, raw: RawStream) -> None:
        """Serve one connection to its end. Whatever happens on it, nothing but cancellation comes out."""
        await self._contained(raw, self._converse)

    async def handle_probe(self, raw: RawStream) -> None:
        """The same for a connection that may only ask, in the clear, with room of its own."""
        await self._contained(raw, self._answer_probe)

    async def _contained(self, raw: RawStream, serve: Callable[[RawStream], Awaitable[None]]) -> None:
        self._count(1)
        try:
            await serve(raw)
        except* _ENDED:
            pass
        except* Exception:
            LOG.exception(_UNEXPECTED)
            self._metrics.count_refused("internal_error")
        finally:
            self._count(-1)
            await trio.aclose_forcefully(raw)

    def _count(self, change: int) -> None:
        self._open += change
        if self._high_water.halved(self._open):
            self._memory.note()

    async def _converse(self, raw: RawStream) -> None:
        opening = None
        with self._pending.one() as stay:
            opening = await self._open_up(raw, self._tls, self._answer_to)
        if opening is not None:
            await self._serve_websocket(raw, opening)
        elif stay.cancelled_caught:
            self._metrics.count_refused(QueueFull.code)
            await reset(raw)

    async def _answer_probe(self, raw: RawStream) -> None:
        with self._probes.one():
            await self._open_up(raw, None, self._probe)

    async def _open_up(
        self, raw: RawStream, tls: ssl.SSLContext | None, answer_to: Callable[[Head], Answer | Upgrade]
    ) -> "_Opening | None":
        """Read the head, and answer it unless it is an accepted upgrade: that is returned."""
        exchange = Exchange(max_head_bytes=self._config.max_head_bytes)
        stream: trio.abc.Stream = raw
        secured = True
        answer: Answer | Upgrade | None = None
        with self._deadlines.after(self._config.head_timeout_s) as scope:
            if tls is not None:
                secured = False
                stream = trio.SSLStream(raw, tls, server_side=True, https_compatible=True)
                await stream.do_handshake()
                secured = True
            answer = await self._read_head(stream, exchange, answer_to)
        if scope.cancelled_caught and secured:
            answer = HttpError(408, f"the request took longer than {self._config.head_timeout_s} s").answer
        if isinstance(answer, Upgrade):
            return _Opening(stream, exchange.upgrade(answer.headers), exchange.rest, answer.subprotocol)
        if answer is not None:
            with self._deadlines.after(self._config.close_timeout_s):
                await stream.send_all(exchange.answer(answer))
                if answer.status >= 400:
                    await linger(raw)
        return None

    async def _read_head(
        self, stream: trio.abc.Stream, exchange: Exchange, answer_to: Callable[[Head], Answer | Upgrade]
    ) -> Answer | Upgrade | None:
        """How to answer; None where the client left without a word."""
        try:
            head = None
            while head is None:
                data = await stream.receive_some(_READ_BYTES)
                if not data and not exchange.started:
                    return None
                head = exchange.feed(data)
            return answer_to(head)
        except HttpError as error:
            self._metrics.count_refused("bad_request")
            return error.answer
        except RequestError as error:
            self._metrics.count_refused(error.code)
            return refused(error)

    def _answer_to(self, head: Head) -> Answer | Upgrade:
        """Raises HttpError or RequestError."""
        if not head.wants_upgrade:
            return self._plain(head)
        upgrade = accept_upgrade(head, self._config)
        if (refusal := self._refusal()) is not None:
            raise refusal
        return upgrade

    async def _serve_websocket(self, raw: RawStream, opening: "_Opening") -> None:
        # Counted without a checkpoint since `_refusal` was asked, so that the bound holds exactly.
        self._websockets += 1
        self._metrics.connections.inc()
        try:
            with trio.fail_after(self._config.head_timeout_s):
                await opening.stream.send_all(opening.answer)
            async with trio.open_nursery() as nursery:
                websocket = WebSocket(
                    opening.stream,
                    opening.rest,
                    self._config,
                    raw=raw,
                    subprotocol=opening.subprotocol,
                    nursery=nursery,
                    budget=self.budget,
                    deadlines=self._deadlines,
                )
                nursery.start_soon(websocket.keep_alive)
                try:
                    await self._session(websocket)
                except Exception:
                    LOG.exception(_UNEXPECTED)
                    self._metrics.count_refused("internal_error")
                    await websocket.close(1011, "internal error")
                finally:
                    websocket.end()
                nursery.cancel_scope.cancel()
            if (code := websocket.refused) is not None:
                # Closing now would reset the connection, and the client, still writing, would never read why.
                self._metrics.count_refused(_REFUSALS.get(code, "bad_request"))
                with self._deadlines.after(self._config.close_timeout_s):
                    await linger(raw)
        finally:
            self._websockets -= 1
            self._metrics.connections.dec()


@dataclass(frozen=True, slots=True)
class _Opening:
    """An upgrade to be answered: on which stream, with which bytes, and what the client has sent after its head."""

    stream: trio.abc.Stream
    answer: bytes
    rest: bytes
    subprotocol: str | None
