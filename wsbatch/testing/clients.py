"""A WebSocket client over any stream that does nothing by itself: no pongs, no closing handshake, no reading ahead."""

from collections.abc import Mapping

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from wsbatch.messages import ClientMessage, ServerMessage
from wsbatch.wire import MSGPACK, Codec


class Closed(Exception):
    """The connection has ended: with a close frame's code and reason, or with 1006 and no word."""

    def __init__(self, code: int, reason: str | None = None) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class Rejected(Exception):
    """The server answered the handshake with plain HTTP."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.headers = headers
        self.body = body


class BareClient:
    """Speaks the wire over `stream`, one call at a time.

    Args:
        stream: a connection to a server.
        codec: of the subprotocol that `open` offers; None offers none and speaks msgpack.
    """

    def __init__(self, stream: trio.abc.Stream, codec: Codec | None = None) -> None:
        self.stream = stream
        self.codec = codec or MSGPACK
        self.pings = 0
        self._offer = codec is not None
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._partial: list[bytes | str] = []

    async def open(self, target: str = "/", *, headers: Mapping[str, str] | None = None) -> None:
        """Do the opening handshake. Raises Rejected."""
        extra = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        offers = [self.codec.subprotocol] if self._offer else []
        await self.send_event(Request(host="test", target=target, extra_headers=extra, subprotocols=offers))
        event = await self.next_event()
        if isinstance(event, AcceptConnection):
            return
        assert isinstance(event, RejectConnection)
        body = b""
        while event.has_body:
            part = await self.next_event()
            assert isinstance(part, RejectData)
            body += part.data
            if part.body_finished:
                break
        raise Rejected(event.status_code, {key.decode(): value.decode() for key, value in event.headers}, body)

    async def send(self, message: ClientMessage | bytes | str) -> None:
        """Send a message, or these bytes or this text as one."""
        data = message if isinstance(message, bytes | str) else self.codec.encode_client(message)
        await self.send_event(TextMessage(data=data) if isinstance(data, str) else BytesMessage(data=data))

    async def receive(self) -> ServerMessage:
        """Wait for the next message. Raises Closed. Pings are counted and not answered."""
        while True:
            event = await self.next_event()
            match event:
                case Message():
                    self._partial.append(event.data)
                    if event.message_finished:
                        parts, self._partial = self._partial, []
                        data = parts[0][:0].join(parts)  # type: ignore[arg-type]  # all bytes, or all str
                        message = self.codec.decode_server(bytes(data) if isinstance(data, bytearray) else data)
                        assert message is not None
                        return message
                case Ping():
                    self.pings += 1
                case CloseConnection(code=code, reason=reason):
                    raise Closed(code, reason)

    async def close(self, code: int = 1000) -> None:
        """Send a close frame; the answer is left to be read."""
        await self.send_event(CloseConnection(code=code))

    async def send_event(self, event: Event) -> None:
        """Send any wsproto event."""
        await self.stream.send_all(self._protocol.send(event))

    async def next_event(self) -> Event:
        """Wait for any wsproto event. Raises Closed (1006) at the end of the stream."""
        while True:
            for event in self._protocol.events():
                return event
            try:
                data = await self.stream.receive_some(65_536)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                raise Closed(1006)
            self._protocol.receive_data(bytes(data))
