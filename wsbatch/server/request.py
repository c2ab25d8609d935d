"""One request of a session."""

import sys

import trio

from wsbatch.engine.stream import Stream
from wsbatch.messages import GenerateRequest


class SessionRequest:
    """One request of a connection, from its frame to its terminal event.

    Attributes:
        stream: its events; None while the engine is still deciding.
        submitting: around the engine's decision.
        cancelled: whether it is to end.
    """

    __slots__ = ("cancelled", "stream", "submitting")

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.submitting = trio.CancelScope()
        self.cancelled = False

    def cancel(self) -> None:
        """End it, whether the engine has it yet or not."""
        self.cancelled = True
        if self.stream is not None:
            self.stream.cancel()
        else:
            self.submitting.cancel()


def held_bytes(request: GenerateRequest) -> int:
    """What its prompt takes, about: of an id, the pointer and the integer."""
    texts = [request.prompt or "", *(message.content for message in request.messages or ())]
    ids = len(request.token_ids or ()) + len(request.resume_token_ids)
    return sum(map(sys.getsizeof, texts)) + 36 * ids
