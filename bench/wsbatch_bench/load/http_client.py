"""One HTTP/1.1 exchange on a Trio stream, its answer streamed. No more than a bench needs of a client."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urlsplit

import h11
import trio

Dial = Callable[[], Awaitable[trio.abc.Stream]]
"""Opens a connection to the server."""


class HttpFailed(Exception):
    """The server answered with an error status, or broke off.

    Attributes:
        code: a word for the report, such as `http_503`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def dial_url(url: str) -> tuple[Dial, str, str]:
    """How to connect to this URL (http, https, ws, wss), its Host header, and its path. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ValueError(f"url must be http(s)://host[:port][/path] or ws(s)://…, got {url!r}")
    host = parts.hostname
    tls = parts.scheme in ("https", "wss")
    port = parts.port or (443 if tls else 80)

    async def dial() -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(host, port)
        if tls:
            return trio.SSLStream(stream, ssl.create_default_context(), server_hostname=host, https_compatible=True)
        return stream

    return dial, parts.netloc, parts.path or "/"


@asynccontextmanager
async def request(
    dial: Dial, host: str, target: str, *, body: bytes | None = None, headers: Iterable[tuple[str, str]] = ()
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Send a GET (a POST of JSON where there is a `body`) on a connection of its own; the chunks of the answer's body.

    Raises HttpFailed for a status of 400 and above, and where the answer breaks off; OSError where nobody listens.
    """
    stream = await dial()
    try:
        connection = h11.Connection(h11.CLIENT)
        fields = [("Host", host), ("Connection", "close"), *headers]
        if body is not None:
            fields += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        method = "GET" if body is None else "POST"
        data = connection.send(h11.Request(method=method, target=target, headers=fields)) or b""
        data += (connection.send(h11.Data(data=body)) or b"") if body is not None else b""
        await stream.send_all(data + (connection.send(h11.EndOfMessage()) or b""))
        answer = await _next(connection, stream)
        if not isinstance(answer, h11.Response):
            raise HttpFailed("http_broken", f"{host} did not answer with HTTP")
        async with aclosing(_chunks(connection, stream)) as chunks:
            if answer.status_code >= 400:
                text = b"".join([chunk async for chunk in chunks]).decode(errors="replace")
                what = f"{host}{target}: status {answer.status_code}: {text[:300]}"
                raise HttpFailed(f"http_{answer.status_code}", what)
            yield chunks
    finally:
        await trio.aclose_forcefully(stream)


async def get(dial: Dial, host: str, target: str) -> bytes:
    """The whole body. Raises as `request` does."""
    async with request(dial, host, target) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def _chunks(connection: h11.Connection, stream: trio.abc.Stream) -> AsyncGenerator[bytes, None]:
    while isinstance(event := await _next(connection, stream), h11.Data):
        yield bytes(event.data)


async def _next(connection: h11.Connection, stream: trio.abc.Stream) -> h11.Event:
    while True:
        try:
            event = connection.next_event()
            if isinstance(event, h11.InformationalResponse):
                continue
            if isinstance(event, h11.Event):
                return event
            connection.receive_data(bytes(await stream.receive_some(65_536)))
        except (h11.RemoteProtocolError, trio.BrokenResourceError) as error:
            raise HttpFailed("http_broken", f"the answer broke off: {error}") from None
