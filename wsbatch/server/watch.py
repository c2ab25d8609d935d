"""One connection's view of the batch: when the next snapshot is due. The session's writer takes and sends it."""

from collections.abc import Callable
from math import inf

import trio

from wsbatch.engine.interface import Engine
from wsbatch.engine.watch import WINDOW_S, Watcher
from wsbatch.messages import BatchSnapshot

# At most ten frames a second: a snapshot is small, and 32 watchers cost the event loop little.
INTERVAL_S = 0.1


class WatchPacer:
    """A subscription that can be started and stopped any number of times without a frame too many.

    What happens while the connection is busy gathers in the engine's own ring, bounded: the writer never finds more
    than one snapshot to send.

    Attributes:
        due: whether a snapshot is to be sent.
    """

    def __init__(self, engine: Engine, *, wake: Callable[[], None]) -> None:
        """`wake` is called when `due` turns true."""
        self.due = False
        self._engine = engine
        self._wake = wake
        self._watcher: Watcher | None = None
        self._scope: trio.CancelScope | None = None
        self._not_before_s = -inf
        self._changed = trio.Event()
        self._taken = trio.Event()
        self._lively = False

    def start(self, nursery: trio.Nursery) -> None:
        """Watch; the first snapshot is due as soon as the last one is old enough. Started already, it goes on."""
        if self._watcher is None:
            self._watcher = self._engine.watch(self._note)
            self._scope = trio.CancelScope()
            nursery.start_soon(self._pace, self._scope)

    def stop(self) -> None:
        """Watch no more; nothing is due."""
        if self._watcher is not None and self._scope is not None:
            self._watcher.close()
            self._scope.cancel()
            self._watcher = self._scope = None
            self.due = False

    def take(self) -> BatchSnapshot:
        """The snapshot that is due. Call only then."""
        assert self._watcher is not None
        self.due = False
        self._not_before_s = trio.current_time() + INTERVAL_S
        self._changed = trio.Event()
        snapshot = self._watcher.take(trio.current_time())
        self._lively = bool(snapshot.steps) or snapshot.waste_fraction is not None
        self._taken.set()
        return snapshot

    def _note(self) -> None:
        self._changed.set()

    async def _pace(self, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                await trio.sleep_until(self._not_before_s)
                self._taken = trio.Event()
                self.due = True
                self._wake()
                await self._taken.wait()
                # When all is quiet, one more tells that the rates are down to nothing.
                with trio.move_on_after(WINDOW_S if self._lively else inf):
                    await self._changed.wait()
