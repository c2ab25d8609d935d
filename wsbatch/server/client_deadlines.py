"""Clients' deadlines, which do not count the time in which this process did not run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from wsbatch.engine.watchdog import SUSPENDED_S

_LOOK_S = 0.5


class ClientDeadlines(trio.abc.Instrument):
    """A client that reads all along must not seem stuck because the server was suspended, or its event loop was held.

    Both look the same when it goes on: every deadline has passed, and the loop would act on that before it reads what
    has come meanwhile. So it is looked at before it acts on deadlines, which an instrument of the loop can do: where
    more time has gone by than it waited for, the deadlines of all scopes here are put off by that.

    Args:
        now: seconds on a clock that runs on while the process does not.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._scopes: set[trio.CancelScope] = set()
        self._since_s = 0.0  # when it was looked at last

    @contextmanager
    def after(self, seconds: float) -> Iterator[trio.CancelScope]:
        """`trio.move_on_after`, put off as all scopes here are."""
        with trio.move_on_after(seconds) as scope, self.includes(scope):
            yield scope

    @contextmanager
    def includes(self, scope: trio.CancelScope) -> Iterator[None]:
        """Put off this scope's deadline too, whatever it is at the time."""
        self._scopes.add(scope)
        try:
            yield
        finally:
            self._scopes.discard(scope)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while the block runs; without this no deadline is put off."""
        looking = trio.CancelScope()
        self._since_s = self._now()
        trio.lowlevel.add_instrument(self)
        trio.lowlevel.spawn_system_task(self._look, looking)
        try:
            yield
        finally:
            looking.cancel()
            trio.lowlevel.remove_instrument(self)

    def put_off(self, seconds: float) -> None:
        """Move all deadlines by so much time."""
        for scope in self._scopes:
            scope.deadline += seconds

    def before_io_wait(self, timeout: float) -> None:
        """See `trio.abc.Instrument`."""
        self._passed(0.0)

    def after_io_wait(self, timeout: float) -> None:
        """See `trio.abc.Instrument`."""
        self._passed(timeout)

    def _passed(self, expected_s: float) -> None:
        now_s = self._now()
        late_s = now_s - self._since_s - expected_s
        self._since_s = now_s
        if late_s > SUSPENDED_S:
            self.put_off(late_s)

    async def _look(self, looking: trio.CancelScope) -> None:
        """Keep the loop from waiting for long: what it meant to wait anyhow is not put off."""
        with looking:
            while True:  # noqa: ASYNC110 (there is nothing to wait for)
                await trio.sleep(_LOOK_S)
