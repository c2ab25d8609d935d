"""Model steps that make no progress, watched by one task that discounts the time in which it did not run itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

_LOOK_S = 1.0
SUSPENDED_S = 0.1
"""A task that wakes later than this after it was due: no usual lateness, the process was suspended."""


class Watchdog:
    """Ends what is watched when it has lasted for `stall_s`: `run` must be a task.

    The time of a process that was suspended (SIGSTOP, a paused container, a laptop asleep) is not held against the
    step that was in flight: it made no progress because nothing did. A deadline would have passed when the process
    goes on, before the model had a chance to. So the watch sleeps in short naps, and what a nap is longer than it
    should be is added to the time that the step has.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._scope: trio.CancelScope | None = None
        self._give_up_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One step. Raises trio.TooSlowError when it has lasted too long."""
        with trio.CancelScope() as self._scope:
            self._give_up_s = trio.current_time() + self._stall_s
            try:
                yield
            finally:
                scope, self._scope = self._scope, None
        if scope.cancelled_caught:
            raise trio.TooSlowError

    async def run(self) -> None:
        """Watch until cancelled."""
        # No nap is longer than a step has, so that one that begins during a nap is not over before its end.
        longest_s = min(_LOOK_S, self._stall_s)
        while True:
            due_s = trio.current_time() + longest_s
            if self._scope is not None:
                due_s = min(due_s, self._give_up_s)
            await trio.sleep_until(due_s)
            late_s = trio.current_time() - due_s
            if late_s > SUSPENDED_S:
                self._give_up_s += late_s
            if self._scope is not None and trio.current_time() >= self._give_up_s:
                self._scope.cancel()
