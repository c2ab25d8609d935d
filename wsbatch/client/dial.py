"""From a URL to a server's hello on an open WebSocket. What fails on the way is one plain exception, no group."""

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import trio
import trio_websocket

from wsbatch.auth import without_secrets
from wsbatch.client.errors import ProtocolError, error_of, how_closed, refusal_of
from wsbatch.client.options import ConnectOptions
from wsbatch.client.progress import OTHER_FRAME_BYTES, read_frame
from wsbatch.errors import ConnectionLost
from wsbatch.messages import Failed, Hello
from wsbatch.wire import PROTOCOL_VERSION, Codec, DecodeError

# Answers are larger than requests: a `finished` with `stream: false` and log probabilities is one message.
MAX_ANSWER_BYTES = 64 * 2**20
_MAX_UPGRADE_BYTES = 128 * 2**10  # its head, a refusal's body, or the first frames


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `target` is path and query."""

    host: str
    port: int
    target: str
    tls: bool

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Raises ValueError for what is no ws:// or wss:// address."""
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(f"url must be ws://host[:port][/path] or wss://…, got {without_secrets(url)!r}")
    if not (parts.path + parts.query).isascii():
        raise ValueError(f"url must have its path and query percent-encoded, got {without_secrets(url)!r}")
    tls = parts.scheme == "wss"
    port = parts.port if parts.port is not None else 443 if tls else 80
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.hostname, port, target, tls)


async def open_stream(address: Address, ssl_context: ssl.SSLContext | None) -> trio.abc.Stream:
    """Connect TCP and, for wss, TLS. Raises ConnectionLost; cancelled, it leaves nothing open."""
    where = f"{address.host}:{address.port}"
    try:
        stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as exc:
        raise ConnectionLost(f"cannot connect to {where}: {exc}") from exc
    if not address.tls:
        return stream
    context = ssl_context if ssl_context is not None else ssl.create_default_context()
    tls_stream = trio.SSLStream(stream, context, server_hostname=address.host, https_compatible=True)
    try:
        await tls_stream.do_handshake()
    except BaseException as exc:
        await trio.aclose_forcefully(stream)
        if isinstance(exc, trio.BrokenResourceError):
            raise ConnectionLost(f"no TLS with {where}: {exc.__cause__ or exc}") from exc
        raise
    return tls_stream


async def upgrade(
    nursery: trio.Nursery, stream: trio.abc.Stream, host: str, target: str, options: ConnectOptions
) -> trio_websocket.WebSocketConnection:
    """Turn the stream into a WebSocket; its reader runs in `nursery` and never raises into it.

    Raises the server's refusal, ConnectionLost or ProtocolError; the stream is then of no more use, but still open.
    """
    bounded = _Bounded(stream)
    token = options.auth_token
    headers = [(b"Authorization", f"Bearer {token}".encode())] if token is not None else []
    reader = _Reader(nursery)
    websocket = None
    with reader.waiting:
        websocket = await trio_websocket.wrap_client_stream(
            # The library's annotations ask for more than it uses: start_soon of the one, any stream of the other.
            cast(trio.Nursery, reader),
            cast(trio.SocketStream, bounded),
            host,
            target,
            subprotocols=[options.subprotocol],
            extra_headers=headers,
            max_message_size=MAX_ANSWER_BYTES,
        )
    if websocket is None:
        if isinstance(reader.error, trio_websocket.ConnectionRejected):
            rejected = reader.error
            raise refusal_of(rejected.status_code, rejected.headers, rejected.body)
        if isinstance(reader.error, ProtocolError):
            raise reader.error
        what = "the connection closed" if reader.error is None else f"{reader.error}"
        raise ConnectionLost(f"no answer to the WebSocket upgrade: {what}") from reader.error
    bounded.lift()
    if websocket.subprotocol != options.subprotocol:
        raise ProtocolError(f"offered subprotocol {options.subprotocol}, the server chose {websocket.subprotocol}")
    return websocket


async def greet(websocket: trio_websocket.WebSocketConnection, codec: Codec) -> Hello:
    """Wait for the server's first frame. Raises ConnectionLost, ProtocolError, or what the server says instead."""
    try:
        message = read_frame(codec, await websocket.get_message(), OTHER_FRAME_BYTES)
    except trio_websocket.ConnectionClosed as exc:
        raise ConnectionLost(how_closed(exc)[0]) from None
    except DecodeError as exc:
        raise ProtocolError(f"the server's first frame cannot be read: {exc}") from None
    if isinstance(message, Failed):
        raise error_of(message)
    if not isinstance(message, Hello) or message.version != PROTOCOL_VERSION:
        raise ProtocolError(f"a hello of version {PROTOCOL_VERSION} was due, got {message}")
    return message


class _Bounded(trio.abc.Stream):
    """A stream of which only so much may be received, until that is lifted: the library bounds messages alone."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._left: int | None = _MAX_UPGRADE_BYTES

    def lift(self) -> None:
        """From here on anything may come."""
        self._left = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As of the stream. Raises ProtocolError where too much comes."""
        data = await self._stream.receive_some(max_bytes)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise ProtocolError(f"the answer to the WebSocket upgrade has more than {_MAX_UPGRADE_BYTES} bytes")
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As of the stream."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As of the stream."""
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """As of the stream."""
        await self._stream.aclose()


class _Reader:
    """Stands in for the nursery that the library starts its reader task in.

    The task raises what the handshake ran into, which would end the nursery as an exception group; and when it ends
    before the handshake has, nobody wakes `wrap_client_stream`. So: keep the exception, and end the wait.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.error: Exception | None = None
        self.waiting = trio.CancelScope()

    def start_soon(self, task: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(self._run, task)

    async def _run(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except Exception as exc:  # noqa: BLE001  (kept, and raised by upgrade)
            self.error = exc
        finally:
            self.waiting.cancel()
