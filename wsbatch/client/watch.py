"""The live batch as the client sees it."""

from collections import deque

import trio

from wsbatch.errors import WsbatchError
from wsbatch.messages import BatchSnapshot

# Snapshots that a slow loop may leave unread, six seconds of them. The oldest go first: a watcher wants the present.
_MAX_UNREAD = 64


class BatchWatch:
    """Iterates over the server's snapshots as they come; made by `Client.watch`.

    A loop that is too slow misses the oldest ones. A cancelled iteration loses nothing. Raises ConnectionLost at the
    connection's end, after what has arrived.
    """

    def __init__(self) -> None:
        self._snapshots: deque[BatchSnapshot] = deque(maxlen=_MAX_UNREAD)
        self._wake = trio.Event()
        self._error: WsbatchError | None = None

    def __repr__(self) -> str:
        return f"<BatchWatch {'failed' if self._error else 'live'}, {len(self._snapshots)} snapshots unread>"

    def deliver(self, snapshot: BatchSnapshot) -> None:
        """Take a snapshot from the connection."""
        self._snapshots.append(snapshot)
        self._wake.set()

    def fail(self, error: WsbatchError) -> None:
        """End with an error."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> "BatchWatch":
        return self

    async def __anext__(self) -> BatchSnapshot:
        await trio.lowlevel.checkpoint()
        while not self._snapshots:
            if self._error is not None:
                raise self._error
            self._wake = trio.Event()
            await self._wake.wait()
        return self._snapshots.popleft()
