"""In-memory network: streams whose buffers fill up, as a socket's do when nobody reads, and a listener for them."""

import trio


class _Pipe:
    """One direction."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.data = bytearray()
        self.ended = False  # no more will be written
        self.unread = False  # nobody will read
        self.changed = trio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a connection in memory.

    A peer that does not call `receive_some` is a slow reader: `send_all` blocks once `capacity_bytes` are unread.
    """

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Wait until all is in the peer's buffer. Raises BrokenResourceError once the peer has closed."""
        pipe = self._outgoing
        await trio.lowlevel.checkpoint()
        remaining = bytes(data)
        while True:
            if self.closed or pipe.ended:
                raise trio.ClosedResourceError
            if pipe.unread:
                raise trio.BrokenResourceError("the peer has closed")
            room = pipe.capacity_bytes - len(pipe.data)
            if room > 0 and remaining:
                taken, remaining = remaining[:room], remaining[room:]
                pipe.data += taken
                pipe.notify()
            if not remaining:
                return
            await pipe.changed.wait()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait for room in the peer's buffer."""
        await trio.lowlevel.checkpoint()
        while len(self._outgoing.data) >= self._outgoing.capacity_bytes and not self._outgoing.unread:
            await self._outgoing.changed.wait()

    async def send_eof(self) -> None:
        """The peer reads to the end of what was sent; this end can still receive."""
        await trio.lowlevel.checkpoint()
        if self.closed:
            raise trio.ClosedResourceError
        self._outgoing.ended = True
        self._outgoing.notify()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for data; b"" at the end of it."""
        pipe = self._incoming
        await trio.lowlevel.checkpoint()
        while not pipe.data:
            if self.closed:
                raise trio.ClosedResourceError
            if pipe.ended:
                return b""
            await pipe.changed.wait()
        if self.closed:
            raise trio.ClosedResourceError
        data = bytes(pipe.data[:max_bytes])
        del pipe.data[: len(data)]
        pipe.notify()
        return data

    async def aclose(self) -> None:
        """Both directions end; the peer still reads what it was sent."""
        self.cut()
        await trio.lowlevel.checkpoint()

    def cut(self) -> None:
        """`aclose`, as a process that is killed does it: without a checkpoint."""
        self.closed = True
        self._outgoing.ended = True
        self._incoming.unread = True
        self._outgoing.notify()
        self._incoming.notify()


def memory_stream_pair(capacity_bytes: int = 65_536) -> tuple[MemoryStream, MemoryStream]:
    """Two ends of one connection; each direction holds `capacity_bytes` unread bytes."""
    one, other = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return MemoryStream(one, other), MemoryStream(other, one)


class MemoryListener(trio.abc.Listener[MemoryStream]):
    """Accepts what `connect` opens. `faults` are raised by the next calls of `accept`."""

    def __init__(self, capacity_bytes: int = 65_536) -> None:
        self.faults: list[OSError] = []
        self._capacity_bytes = capacity_bytes
        self._send, self._receive = trio.open_memory_channel[MemoryStream](1024)

    async def connect(self, *, capacity_bytes: int | None = None) -> MemoryStream:
        """The client's end of a new connection. Raises BrokenResourceError once the listener is closed."""
        client, server = memory_stream_pair(capacity_bytes or self._capacity_bytes)
        await self._send.send(server)
        return client

    async def accept(self) -> MemoryStream:
        """Wait for a connection."""
        await trio.lowlevel.checkpoint()
        if self.faults:
            raise self.faults.pop(0)
        return await self._receive.receive()

    async def aclose(self) -> None:
        """Connect no more."""
        self._receive.close()
        await trio.lowlevel.checkpoint()
