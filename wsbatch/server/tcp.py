"""How a TCP connection ends where more than closing it is to be done."""

import struct
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET

import trio

RawStream = trio.abc.HalfCloseableStream

_READ_BYTES = 65_536


async def reset(raw: RawStream) -> None:
    """Close at once and drop what is unsent: without a reset the kernel would go on offering it to a dead peer."""
    if isinstance(raw, trio.SocketStream):
        with suppress(OSError):  # closed already
            raw.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(raw)


async def linger(raw: RawStream) -> None:
    """Say that nothing more comes, and read away what the client still sends: unread data would reset our answer."""
    await raw.send_eof()
    while await raw.receive_some(_READ_BYTES):
        pass
