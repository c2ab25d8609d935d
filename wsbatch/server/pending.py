"""Connections that are no WebSocket yet: no request has come, or it is being answered."""

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class PendingConnections:
    """At most so many: the oldest is closed for the newest, so that silent sockets keep nobody out.

    A client that wants something says so at once, and is answered at once: it is never the oldest for long.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._scopes: dict[trio.CancelScope, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def one(self) -> Iterator[trio.CancelScope]:
        """Be one of them while the block runs. The scope is cancelled where its room is needed."""
        with trio.CancelScope() as scope:
            self._scopes[scope] = None
            if len(self._scopes) > self._most:
                self.make_room()
            try:
                yield scope
            finally:
                self._scopes.pop(scope, None)

    def make_room(self) -> None:
        """Cancel the oldest, if there is one."""
        oldest = next(iter(self._scopes), None)
        if oldest is not None:
            del self._scopes[oldest]
            oldest.cancel()
