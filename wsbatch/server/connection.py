"""What a session needs of a transport."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from wsbatch.server.input_budget import Share
from wsbatch.wire import Message


class Disconnected(Exception):
    """The connection has ended, whoever ended it: no close frame is still to be written."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and its share of the memory for large ones."""

    data: Message
    share: Share | None = None

    def release(self) -> None:
        """It is not held any more."""
        if self.share is not None:
            self.share.release()


class Connection(Protocol):
    """What a session needs of a transport. One task receives, one sends."""

    @property
    def subprotocol(self) -> str | None:
        """The one agreed on; None where the client offered none."""
        ...

    @property
    def peer(self) -> Hashable:
        """Who is at the other end: connections of one peer share its room in the queue. None: nobody knows."""
        ...

    async def receive(self) -> Received:
        """Wait for the next message. Raises Disconnected."""
        ...

    async def send(self, message: bytes | str, *, last: bool = True) -> None:
        """Write one message, or a piece of one: more follow until the last.

        Raises Disconnected. Cancelled, it leaves a connection that can only be aborted.
        """
        ...

    async def close(self, code: int, reason: str) -> None:
        """Do the closing handshake, or see the client's own to its end, within the transport's own bound.

        Never raises.
        """
        ...

    async def abort(self) -> None:
        """Reset the connection now, whatever is unsent. Never raises."""
        ...
