"""One open WebSocket over a byte stream, on wsproto: messages in and out, pings, the closing handshake, its bounds.

wsproto is sans-IO and knows RFC 6455; everything about time, memory and turns is here.
"""

from collections import deque
from contextlib import suppress

import trio
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.utilities import LocalProtocolError

from wsbatch.config import ServerConfig
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Disconnected, Received
from wsbatch.server.frame_rate import FrameRate, TooManyFrames
from wsbatch.server.input_budget import InputBudget, Share
from wsbatch.server.peer import peer_of
from wsbatch.server.tcp import RawStream, reset
from wsbatch.wire import Text

FREE_BYTES = 16_384
"""A message has a share of the budget from this size on: smaller ones are never made to wait."""

_READ_BYTES = 65_536
_TURN_FRAMES = 32
"""Frames that are handled before others have their turn: half a millisecond of them."""
_MESSAGE_FRAMES = 8
"""What a message counts for among them: whoever receives it decodes it before the next."""
_MAX_UNSENT_PONGS = 16
_LOST = (trio.BrokenResourceError, trio.ClosedResourceError)


class _Refused(Exception):
    """The client has to go."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class WebSocket:
    """Implements `connection.Connection`. Whoever makes one calls `end` when it is over.

    Args:
        stream: carries frames from now on.
        rest: what of them came together with the handshake.
        raw: below `stream`.
        nursery: for the tasks that answer pings.
        budget: of the memory that large messages take.
        deadlines: for what the client has to do in time.

    Attributes:
        refused: the close code, where the client is closed for what it sent: it may be sending still.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        rest: bytes,
        config: ServerConfig,
        *,
        raw: RawStream,
        subprotocol: str | None,
        nursery: trio.Nursery,
        budget: InputBudget,
        deadlines: ClientDeadlines,
    ) -> None:
        self.subprotocol = subprotocol
        self.peer = peer_of(raw)
        self.refused: int | None = None
        self._stream = stream
        self._raw = raw
        self._config = config
        self._nursery = nursery
        self._budget = budget
        self._deadlines = deadlines
        self._protocol = Connection(ConnectionType.SERVER, trailing_data=rest)
        self._rate = FrameRate()
        self._frames = 0  # handled since others had their turn
        self._message = bytearray()  # what has come of the message that is arriving
        self._share: Share | None = None  # that message's, once it is large
        self._pongs: deque[Pong] = deque(maxlen=_MAX_UNSENT_PONGS)  # the latest will do: RFC 6455, 5.5.3
        self._answering = False
        self._receiving = trio.Lock()
        self._sending = trio.StrictFIFOLock()
        self._cut_short = False
        self._ended = False
        self._heard_at = trio.current_time()
        self._reads = 0

    async def receive(self) -> Received:
        """See `connection.Connection`."""
        await _acquire(self._receiving)
        try:
            try:
                while not self._ended:
                    for event in self._protocol.events():
                        if (received := await self._handle(event)) is not None:
                            return received
                    if not self._ended:
                        await self._read()
            except _Refused as refusal:
                await self._refuse(refusal)
            except _LOST:
                pass
            self._ended = True
            raise Disconnected
        finally:
            self._receiving.release()

    async def send(self, message: bytes | str, *, last: bool = True) -> None:
        """See `connection.Connection`."""
        if self._protocol.state is not ConnectionState.OPEN:
            # Whoever receives is about to write a close frame. Told that the connection has ended, the sender would
            # end the session, and the client would never read that frame.
            await self._until_closed()
        if isinstance(message, Text):
            message = message.decode()
        if isinstance(message, str):
            await self._send(TextMessage(data=message, message_finished=last))
        else:
            await self._send(BytesMessage(data=message, message_finished=last))

    async def close(self, code: int, reason: str) -> None:
        """See `connection.Connection`."""
        with self._deadlines.after(self._config.close_timeout_s), suppress(Disconnected):
            if self._protocol.state is ConnectionState.OPEN:
                await self._send(CloseConnection(code=code, reason=reason))
            await self._until_closed()

    async def _until_closed(self) -> None:
        """Wait for the end of the closing handshake, whoever began it: raises Disconnected then.

        Whoever is receiving is given no more messages.
        """
        while True:
            await self.receive()

    async def abort(self) -> None:
        """See `connection.Connection`."""
        await reset(self._raw)

    async def keep_alive(self) -> None:
        """Ping a silent client, and abort where it stays silent. Whatever arrives counts as life."""
        while True:
            # A time, not a duration: the difference of two floats can leave a rest too small to move the clock.
            ping_at = self._heard_at + self._config.ping_interval_s
            if trio.current_time() < ping_at:
                await trio.sleep_until(ping_at)
                continue
            reads = self._reads
            with self._deadlines.after(self._config.ping_timeout_s):
                with suppress(Disconnected):
                    await self._send(Ping())
                await trio.sleep_forever()
            if self._reads == reads and not self._makes_wait():
                await self.abort()
                return

    def end(self) -> None:
        """Let go of all that is held."""
        self._ended = True
        self._message = bytearray()
        if self._share is not None:
            self._share.release()
        # wsproto's parser is a generator that holds itself: what it has buffered would stay until a full collection.
        with suppress(AttributeError):
            self._protocol._proto._parse_more.close()

    def _makes_wait(self) -> bool:
        """Whether it is we who do not read."""
        return self._share is not None and self._share.waiting

    async def _read(self) -> None:
        """Wait for more bytes. Raises _Refused where those of a large message do not come in time."""
        if len(self._message) < FREE_BYTES:
            data = await self._stream.receive_some(FREE_BYTES)
        else:
            data = await self._read_large()
        self._frames = 0
        if not data:
            self._ended = True
            return
        self._heard_at = trio.current_time()
        self._reads += 1
        self._protocol.receive_data(bytes(data))

    async def _read_large(self) -> bytes | bytearray:
        if self._share is None:
            self._share = self._budget.share(self._config.message_timeout_s)
        await self._share.reserve(len(self._message) + _READ_BYTES)
        with self._share.reading() as scope, self._deadlines.includes(scope):
            return await self._stream.receive_some(_READ_BYTES)
        if self._share.given_up:
            raise _Refused(1013, "the message came too slowly for a server that is short of room")
        raise _Refused(1008, f"the message was not complete within {self._config.message_timeout_s:g} s")

    async def _handle(self, event: Event) -> Received | None:
        """Returns a message where one is complete: that is not lost to a cancellation. Raises _Refused."""
        if self._frames >= _TURN_FRAMES:
            self._frames = 0
            await trio.lowlevel.checkpoint()
        self._frames += 1
        received = None
        try:
            match event:
                case TextMessage() | BytesMessage():
                    received = self._gather(event)
                case Ping():
                    self._rate.control(trio.current_time())
                    self._answer(event.response())
                case Pong():
                    self._rate.control(trio.current_time())
                case CloseConnection():
                    await self._part(event)
        except TooManyFrames as flood:
            raise _Refused(1008, str(flood)) from None
        return received

    def _gather(self, event: TextMessage | BytesMessage) -> Received | None:
        if self._protocol.state is not ConnectionState.OPEN:
            return None
        if not self._message:
            self._message = Text() if isinstance(event, TextMessage) else bytearray()
        self._message += event.data.encode() if isinstance(event.data, str) else event.data
        most = self._config.max_message_bytes
        if len(self._message) > most:
            raise _Refused(1009, f"a message may have {most} bytes")
        if event.message_finished:
            # Not copied: that would take ten milliseconds for the largest.
            message, self._message = self._message, bytearray()
            share, self._share = self._share, None
            self._frames += _MESSAGE_FRAMES - 1
            if share is not None:
                share.complete(len(message))
            return Received(message, share)
        if event.frame_finished:
            self._rate.fragment(trio.current_time())
        return None

    def _answer(self, pong: Pong) -> None:
        """In a task: what is received does not wait for what is sent."""
        self._pongs.append(pong)
        if not self._answering:
            self._answering = True
            self._nursery.start_soon(self._send_pongs)

    async def _send_pongs(self) -> None:
        with suppress(Disconnected):
            while self._pongs:
                await self._send()
        self._answering = False

    async def _part(self, event: CloseConnection) -> None:
        """The client closes, has answered our close, or has sent what RFC 6455 forbids, which raises _Refused."""
        if self._protocol.state is ConnectionState.OPEN:
            raise _Refused(event.code, event.reason or "")
        if self._protocol.state is ConnectionState.REMOTE_CLOSING:
            with self._deadlines.after(self._config.close_timeout_s), suppress(Disconnected):
                await self._send(event.response())
        self._ended = True

    async def _refuse(self, refusal: _Refused) -> None:
        self.refused = refusal.code
        with self._deadlines.after(self._config.close_timeout_s), suppress(Disconnected):
            await self._send(CloseConnection(code=refusal.code, reason=refusal.reason))

    async def _send(self, *events: Event) -> None:
        """Raises Disconnected. Nothing is written after a write that was cut short: half a frame may be out.

        Pongs that are due go first: no answer to what came after a ping overtakes the answer to the ping.
        """
        due = [*self._pongs, *events]
        self._pongs.clear()
        try:
            data = b"".join([self._protocol.send(event) for event in due])
        except LocalProtocolError:
            raise Disconnected from None
        await _acquire(self._sending)
        try:
            if self._cut_short:
                raise Disconnected
            self._cut_short = True
            await self._stream.send_all(data)
            self._cut_short = False
        except _LOST:
            raise Disconnected from None
        finally:
            self._sending.release()


async def _acquire(lock: trio.Lock | trio.StrictFIFOLock) -> None:
    """Without giving up this task's turn where the lock is free: a turn is a tenth of what a short message costs."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()
