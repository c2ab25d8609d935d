"""One request as its consumer sees it: events to wait for, and a way to cancel it."""

import logging
from collections import deque
from collections.abc import Callable

import trio

from wsbatch.engine.outbox import Outbox
from wsbatch.messages import Event, GenerateRequest, Terminal

_logger = logging.getLogger("wsbatch.engine")


class Stream(Outbox):
    """An outbox that can be waited for. Both sides run on the event loop, so nothing here needs a lock.

    Iterating yields the events and ends after the terminal one. Leaving `async with engine.generate(...)` cancels it.

    Args:
        request: what was asked.
        on_cancel: called with this stream when `cancel` is called while it is live.
        on_event: called with this stream each time it turns from empty to having something to take.

    Attributes:
        ended: set once there is a terminal event.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        on_cancel: Callable[["Stream"], None],
        on_event: Callable[["Stream"], None] | None = None,
    ) -> None:
        super().__init__(request)
        self.ended = trio.Event()
        self._on_cancel = on_cancel
        self._on_event = on_event
        self._wakeup = trio.Event()
        self._unread: deque[Event] = deque()  # taken by the iteration, and not yet given

    def cancel(self) -> None:
        """Ask the engine to end the request now, with `cancelled`. Does nothing once it has ended."""
        if self.live:
            self._on_cancel(self)

    async def wait(self) -> list[Event]:
        """Wait until `take` has something, and take it; an empty list once the terminal event was taken.

        Cancelling it loses nothing.
        """
        await trio.lowlevel.checkpoint()
        while not (events := self.take()):
            if self._terminal_taken:
                return []
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        return events

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        if not self._unread:
            self._unread.extend(await self.wait())
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.popleft()

    def _end(self, terminal: Terminal) -> None:
        super()._end(terminal)
        self.ended.set()

    def _notify(self) -> None:
        self._wakeup.set()
        if self._on_event is None:
            return
        try:
            self._on_event(self)
        except Exception:
            # Its consumer's fault, and no reason to end the requests of others with the engine's loop.
            _logger.exception("on_event of %r raised", self)
