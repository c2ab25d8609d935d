"""Clients that connect, ask for something and vanish, on real sockets: every manner of leaving without a word."""

import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from socket import IPPROTO_TCP, SO_LINGER, SOL_SOCKET, TCP_INFO

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import Request

from wsbatch.messages import GenerateRequest, Hello, SamplingParams
from wsbatch.testing import BareClient, Closed, Rejected
from wsbatch.wire import MSGPACK

_TOKENS = 5000  # more than anybody stays for


async def _begin(stream: trio.SocketStream) -> BareClient:
    """A connection with one live request, whose first frame has been read."""
    client = BareClient(stream)
    await client.open()
    assert isinstance(await client.receive(), Hello)
    await client.send(GenerateRequest(id=1, prompt="about to leave", sampling=SamplingParams(max_tokens=_TOKENS)))
    await client.receive()
    return client


def _reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))


async def reset(stream: trio.SocketStream) -> None:
    """RST in the middle of a stream of tokens."""
    await _begin(stream)
    _reset(stream)


async def close(stream: trio.SocketStream) -> None:
    """FIN, with tokens unread."""
    await _begin(stream)


async def half_close(stream: trio.SocketStream) -> None:
    """Say that nothing more comes, and go on reading for a while."""
    client = await _begin(stream)
    await stream.send_eof()
    with suppress(Closed):
        while True:
            await client.receive()


async def reset_before_accepted(stream: trio.SocketStream) -> None:
    """Ask, and be gone before the answer."""
    client = BareClient(stream)
    await client.open()
    await client.send(GenerateRequest(id=1, prompt="x" * 1000, sampling=SamplingParams(max_tokens=_TOKENS)))
    _reset(stream)


async def reset_in_a_frame(stream: trio.SocketStream) -> None:
    """Half of a second request, then RST."""
    await _begin(stream)
    frame = _frame()
    await stream.send_all(frame[: len(frame) // 2])
    _reset(stream)


async def silent_in_a_frame(stream: trio.SocketStream) -> None:
    """Half of a second request, then nothing at all: only the server's pings can end it. Waits for that."""
    await _begin(stream)
    frame = _frame()
    await stream.send_all(frame[: len(frame) // 2])
    await _until_dropped(stream)


async def silent(stream: trio.SocketStream) -> None:
    """Neither read nor write, nor answer a ping. Waits until the server has given it up."""
    await _begin(stream)
    await _until_dropped(stream)


async def reset_in_the_head(stream: trio.SocketStream) -> None:
    """Half of an HTTP head, then RST."""
    head = WSConnection(ConnectionType.CLIENT).send(Request(host="test", target="/"))
    await stream.send_all(head[: len(head) // 2])
    _reset(stream)


MANNERS: dict[str, Callable[[trio.SocketStream], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        reset,
        close,
        half_close,
        reset_before_accepted,
        reset_in_a_frame,
        reset_in_the_head,
        silent,
        silent_in_a_frame,
    )
}
"""By name. The silent ones take as long as the server's keepalive does."""


async def vanish(host: str, port: int, manner: str) -> None:
    """Connect, and leave in this manner. A server that refuses the connection, or ends it first, is no error."""
    stream = await trio.open_tcp_stream(host, port)
    try:
        with suppress(Closed, Rejected, trio.BrokenResourceError):
            await MANNERS[manner](stream)
    finally:
        await trio.aclose_forcefully(stream)


def _frame() -> bytes:
    """A frame with a request in it, masked with zeros."""
    payload = MSGPACK.encode_client(GenerateRequest(id=2, prompt="cut short"))
    assert isinstance(payload, bytes)
    assert len(payload) < 126
    return bytes([0x82, 0x80 | len(payload), 0, 0, 0, 0]) + payload


async def _until_dropped(stream: trio.SocketStream) -> None:
    """Wait for the end without reading from the connection."""
    # Nothing else tells: a stream says so only to who reads. The first byte is the state; 1: established.
    while stream.socket.getsockopt(IPPROTO_TCP, TCP_INFO, 1)[0] == 1:  # noqa: ASYNC110
        await trio.sleep(0.05)
