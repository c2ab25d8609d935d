"""What arrives on a connection: received, glanced at, and decoded without holding up the event loop."""

import trio

from wsbatch.messages import ClientMessage, RequestId
from wsbatch.server.connection import Connection, Received
from wsbatch.wire import Codec


class Reader:
    """Reads one connection's messages.

    Args:
        connection: is received from.
        codec: decodes.
        decoding: held while a message is decoded that takes more than one step: shared by the sessions of a server, so
            that the event loop does one such step a turn, and there is one half-built message at a time.
    """

    def __init__(self, connection: Connection, codec: Codec, decoding: trio.Lock) -> None:
        self._connection = connection
        self._codec = codec
        self._decoding = decoding

    async def receive(self) -> Received:
        """Wait for the next message. Raises Disconnected."""
        return await self._connection.receive()

    def glance(self, received: Received) -> tuple[RequestId, int] | None:
        """The id and the priority of a `generate`, at a small part of what decoding it costs; None where that fails."""
        return self._codec.glance(received.data)

    async def decode(self, received: Received) -> ClientMessage:
        """Decode it, one step a turn where it is large. Raises DecodeError."""
        steps = self._codec.decoding(received.data)
        try:
            next(steps)
            async with self._decoding:
                while True:
                    next(steps)
                    await trio.lowlevel.checkpoint()
        except StopIteration as done:
            message: ClientMessage = done.value
            return message
