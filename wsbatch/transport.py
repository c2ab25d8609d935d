"""The server side of trio_websocket: accept, guard, keep alive, abort. Only `client` imports the library too.

What the library (0.12.2) does not hold against a hostile or a dead peer is held here: every connection is contained;
the library never sees a head that a client wrote, nor one that is not an upgrade; after a write that was cut short
nothing more is written; closing, pinging and writing are bounded. docs/operations.md lists what was found.
"""

import logging
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET

import trio
import trio_websocket
from wsproto.frame_protocol import FrameProtocol
from wsproto.utilities import ProtocolError

from wsbatch.config import ServerConfig
from wsbatch.errors import QueueFull, RequestError
from wsbatch.fragments import FragmentCounter, TooManyFragments
from wsbatch.handshake import accept_upgrade
from wsbatch.http import Answer, Exchange, Head, HttpError, refused
from wsbatch.metrics import EngineMetrics
from wsbatch.session import Connection, Disconnected
from wsbatch.watchdog import SUSPENDED_S

LOG = logging.getLogger("wsbatch.transport")

RawStream = trio.abc.HalfCloseableStream

_RECEIVE_BYTES = 65_536
_MAX_FRAGMENTS = 65_536
_CLOSE_FRAME = 0x88  # its first byte
_UNEXPECTED = "a connection ended by an unexpected error"
# How a connection's end, from either side, looks from inside: no news to anybody.
_ENDED = (
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
    trio_websocket.ConnectionClosed,
    ProtocolError,
    TooManyFragments,
)


class Transport:
    """Takes connections from listeners, answers plain HTTP and hands WebSockets to `session`.

    Args:
        config: bounds, timeouts, auth and origins.
        session: serves one WebSocket to its end.
        plain: answers a request that is not an upgrade.
        refusal: why no connection may be upgraded now; None where one may.
        metrics: connections and refusals are counted here.
        tls: None serves in the clear.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        session: Callable[[Connection], Awaitable[None]],
        plain: Callable[[Head], Answer],
        refusal: Callable[[], RequestError | None],
        metrics: EngineMetrics,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._session = session
        self._plain = plain
        self._refusal = refusal
        self._metrics = metrics
        self._tls = tls
        self._open = 0
        self._websockets = 0

    def __repr__(self) -> str:
        return f"<Transport {self._open} open, {self._websockets} of them WebSockets>"

    def full(self) -> QueueFull | None:
        """The refusal while `max_connections` WebSockets are open."""
        if self._websockets < self._config.max_connections:
            return None
        return QueueFull(f"{self._config.max_connections} connections are open, the most allowed", retry_after_ms=1000)

    async def handle(self, raw: RawStream) -> None:
        """Serve one connection to its end. Whatever happens on it, nothing but cancellation comes out."""
        self._open += 1
        try:
            # What has not said yet what it wants is bounded as well, or it would take every descriptor.
            if self._open > 2 * self._config.max_connections:
                self._metrics.count_refused(QueueFull.code)
                await _reset(raw)
            else:
                await self._converse(raw)
        except* _ENDED:
            pass
        except* Exception:
            LOG.exception(_UNEXPECTED)
            self._metrics.count_refused("internal_error")
        finally:
            self._open -= 1
            await trio.aclose_forcefully(raw)

    async def _converse(self, raw: RawStream) -> None:
        exchange = Exchange(max_head_bytes=self._config.max_head_bytes)
        stream: trio.abc.Stream = raw
        secured = True
        opening: Answer | tuple[str | None, bytes] | None = None
        with trio.move_on_after(self._config.head_timeout_s) as patience:
            if self._tls is not None:
                secured = False
                stream = trio.SSLStream(raw, self._tls, server_side=True, https_compatible=True)
                await stream.do_handshake()
                secured = True
            opening = await self._read_opening(stream, exchange)
        if patience.cancelled_caught and secured:
            opening = HttpError(408, f"the request took longer than {self._config.head_timeout_s} s").answer
        if isinstance(opening, Answer):
            with trio.move_on_after(self._config.close_timeout_s):
                await stream.send_all(exchange.answer(opening))
                if opening.status >= 400:
                    await _linger(raw)
        elif opening is not None:
            subprotocol, head_bytes = opening
            await self._serve_websocket(raw, _Replay(stream, head_bytes, exchange.rest), subprotocol)

    async def _read_opening(
        self, stream: trio.abc.Stream, exchange: Exchange
    ) -> Answer | tuple[str | None, bytes] | None:
        """What to answer, or the subprotocol and head of an upgrade; None where the client left without a word."""
        try:
            head = None
            while head is None:
                data = await stream.receive_some(_RECEIVE_BYTES)
                if not data and not exchange.started:
                    return None
                head = exchange.feed(data)
            if not head.wants_upgrade:
                return self._plain(head)
            opening = accept_upgrade(head, self._config)
            if (refusal := self._refusal()) is not None:
                raise refusal
            return opening
        except HttpError as error:
            self._metrics.count_refused("bad_request")
            return error.answer
        except RequestError as error:
            self._metrics.count_refused(error.code)
            return refused(error)

    async def _serve_websocket(self, raw: RawStream, replay: "_Replay", subprotocol: str | None) -> None:
        # Counted without a checkpoint since `_refusal` was asked, so that the bound holds exactly.
        self._websockets += 1
        self._metrics.connections.inc()
        try:
            async with trio.open_nursery() as nursery:
                with trio.fail_after(self._config.head_timeout_s):
                    request = await trio_websocket.wrap_server_stream(
                        nursery,
                        replay,
                        max_message_size=self._config.max_message_bytes,
                        receive_buffer_size=_RECEIVE_BYTES,
                    )
                    websocket = await request.accept(subprotocol=subprotocol)
                replay.begin()
                connection = _WebSocket(websocket, raw, replay, self._config, subprotocol)
                nursery.start_soon(connection.keep_alive)
                try:
                    await self._session(connection)
                except Exception:
                    LOG.exception(_UNEXPECTED)
                    self._metrics.count_refused("internal_error")
                    await connection.close(1011, "internal error")
                nursery.cancel_scope.cancel()
            await self._part(raw, replay, websocket.closed)
        finally:
            self._websockets -= 1
            self._metrics.connections.dec()

    async def _part(self, raw: RawStream, replay: "_Replay", closed: trio_websocket.CloseReason | None) -> None:
        """Tell a client that broke the protocol so, and see to it that it can read that."""
        forbidden = closed is not None and closed.code in (1002, 1007) and not replay.said_goodbye
        if closed is None or not (forbidden or closed.code == 1009):
            return
        self._metrics.count_refused("bad_request" if forbidden else "too_large")
        with trio.move_on_after(self._config.close_timeout_s), suppress(*_ENDED):
            if forbidden:
                await replay.send_all(FrameProtocol(client=False, extensions=[]).close(closed.code, closed.reason))
            # The library has stopped reading, perhaps in mid-message. Closing now would reset the connection, and the
            # client, still writing, would never read why.
            await _linger(raw)


class _WebSocket:
    """One open WebSocket; a session's `Connection`."""

    def __init__(
        self,
        websocket: trio_websocket.WebSocketConnection,
        raw: RawStream,
        replay: "_Replay",
        config: ServerConfig,
        subprotocol: str | None,
    ) -> None:
        self.subprotocol = subprotocol
        self._websocket = websocket
        self._raw = raw
        self._replay = replay
        self._config = config

    async def receive(self) -> bytes | str:
        try:
            return await self._websocket.get_message()
        except trio_websocket.ConnectionClosed:
            raise Disconnected from None

    async def send(self, message: bytes | str) -> None:
        try:
            await self._websocket.send_message(message)
        except _ENDED:
            raise Disconnected from None

    async def close(self, code: int, reason: str) -> None:
        # The library would wait a minute behind a blocked writer, and for ever for the client's answer.
        with trio.move_on_after(self._config.close_timeout_s), suppress(*_ENDED):
            await self._websocket.aclose(code, reason)

    async def abort(self) -> None:
        await _reset(self._raw)

    async def keep_alive(self) -> None:
        """Ping a silent client, and abort where it stays silent. Whatever arrives counts as life."""
        while True:
            heard_at = self._replay.heard_at
            # A time, not a duration: the difference of two floats can leave a rest too small to move the clock.
            ping_at = heard_at + self._config.ping_interval_s
            if trio.current_time() < ping_at:
                await trio.sleep_until(ping_at)
                continue
            # `ping` waits for the pong, and does not wake when the connection dies.
            give_up_at = trio.current_time() + self._config.ping_timeout_s
            with trio.move_on_at(give_up_at), suppress(*_ENDED):
                await self._websocket.ping()
            if self._replay.heard_at == heard_at:
                if trio.current_time() > give_up_at + SUSPENDED_S:
                    continue  # this process was suspended meanwhile: what the client says may be there, unread
                await self.abort()
                return


class _Replay(trio.abc.Stream):
    """A stream that begins with a head of our own making, and that writes nothing after a write was cut short.

    Attributes:
        heard_at: when something last arrived.
        said_goodbye: whether a close frame was written.
    """

    def __init__(self, stream: trio.abc.Stream, head: bytes, rest: bytes) -> None:
        self.heard_at = trio.current_time()
        self.said_goodbye = False
        self._stream = stream
        self._head = head
        self._rest = rest
        self._begun = trio.Event()
        self._fragments = FragmentCounter(_MAX_FRAGMENTS)
        self._writing = False

    def begin(self) -> None:
        """Let the client's own bytes through: before its answer is out, the library would lose them."""
        self._begun.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._head:
            head, self._head = self._head, b""
            return head
        await self._begun.wait()
        data: bytes | bytearray
        if self._rest:
            data, self._rest = self._rest, b""
        else:
            data = await self._stream.receive_some(max_bytes)
        self.heard_at = trio.current_time()
        self._fragments.feed(data)
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._writing:  # writers hold a lock, so this is a write that never finished
            raise trio.BrokenResourceError("an earlier write was cut short")
        self._writing = True
        self.said_goodbye = self.said_goodbye or data[0] == _CLOSE_FRAME
        await self._stream.send_all(data)
        self._writing = False

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        # Over what the RFC forbids the library closes without a word; then there is still something to say.
        if self.said_goodbye:
            await self._stream.aclose()


async def _reset(raw: RawStream) -> None:
    """Close at once and drop what is unsent: without a reset the kernel would go on offering it to a dead peer."""
    if isinstance(raw, trio.SocketStream):
        with suppress(OSError):  # closed already
            raw.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(raw)


async def _linger(raw: RawStream) -> None:
    """Say that nothing more comes, and read away what the client still sends: unread data would reset our answer."""
    await raw.send_eof()
    while await raw.receive_some(_RECEIVE_BYTES):
        pass
