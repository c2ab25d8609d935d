"""One end of a WebSocket without a WebSocket: what a `Session` talks to, in a test's hands."""

from collections.abc import Hashable

import trio

from wsbatch.messages import ClientMessage, ServerMessage
from wsbatch.server.connection import Disconnected, Received
from wsbatch.server.input_budget import Share
from wsbatch.wire import MSGPACK, Codec


class MemoryConnection:
    """Implements `connection.Connection`. The test is the client: `say`, `hear`, `hold`, `disconnect`.

    Attributes:
        peer: who the client is, for the room in the queue.
        closed: (code, reason) once the session has closed it.
        aborted: whether the session has aborted it.
        frames: messages sent so far, decoded.
        send_s: how long `send` takes to return once the client has the message.
        share: of the memory for large messages, that each message brings.
        piece_s: how long it takes for a piece of a message that has more.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self.subprotocol = codec.subprotocol if codec else None
        self.peer: Hashable = None
        self.closed: tuple[int, str] | None = None
        self.aborted = False
        self.frames: list[ServerMessage] = []
        self.send_s = self.piece_s = 0.0
        self.share: Share | None = None
        self._codec = codec or MSGPACK
        self._send, self._receive = trio.open_memory_channel[bytes | str](1)
        self._heard = 0
        self._pieces: list[bytes | str] = []  # of the message that is being sent
        self._changed = trio.Event()
        self._open_gate = trio.Event()
        self._open_gate.set()

    async def say(self, message: ClientMessage | bytes | str) -> None:
        """Send to the session; waits until it is read, but for the last one. Raises BrokenResourceError at its end."""
        await self._send.send(message if isinstance(message, bytes | str) else self._codec.encode_client(message))

    async def hear(self) -> ServerMessage:
        """Wait for the session's next message."""
        while len(self.frames) <= self._heard:
            await self._changed.wait()
        self._heard += 1
        return self.frames[self._heard - 1]

    def hold(self) -> None:
        """Read no more: the next `send` blocks."""
        self._open_gate = trio.Event()

    def release(self) -> None:
        """Read again."""
        self._open_gate.set()

    def disconnect(self) -> None:
        """Vanish."""
        self._send.close()

    async def receive(self) -> Received:
        """See `connection.Connection`."""
        try:
            return Received(await self._receive.receive(), self.share)
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise Disconnected from None

    async def send(self, message: bytes | str, *, last: bool = True) -> None:
        """See `connection.Connection`."""
        if self.closed or self.aborted:
            raise Disconnected
        await trio.lowlevel.checkpoint()
        await self._open_gate.wait()
        self._pieces.append(message)
        if not last:
            await trio.sleep(self.piece_s)
            return
        pieces, self._pieces = self._pieces, []
        frame = self._codec.decode_server(pieces[0][:0].join(pieces))  # type: ignore[arg-type]  # all bytes, or all str
        assert frame is not None
        self.frames.append(frame)
        self._notify()
        await trio.sleep(self.send_s)

    async def close(self, code: int, reason: str) -> None:
        """See `connection.Connection`."""
        await trio.lowlevel.checkpoint()
        self.closed = self.closed or (code, reason)
        self._receive.close()
        self._notify()

    async def abort(self) -> None:
        """See `connection.Connection`."""
        await trio.lowlevel.checkpoint()
        self.aborted = True
        self._receive.close()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
