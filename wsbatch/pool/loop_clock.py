"""A clock that runs only while this process's event loop does: what is late here is not late there."""

import trio

from wsbatch.engine.watchdog import SUSPENDED_S

_NAP_S = 0.1


class LoopClock:
    """Trio's clock, less the time in which the loop was held or the process suspended. Run `run` in a task.

    A peer that was heard of last before the loop was held may have spoken meanwhile, and nobody has read it. So a
    silence is measured on this clock. A hold counts from where it is longer than a tenth of a second.
    """

    def __init__(self) -> None:
        self._held_s = 0.0
        self._due_s: float | None = None

    def now_s(self) -> float:
        """The time, in seconds; only differences mean anything."""
        return trio.current_time() - self._held_s - self._late_s()

    async def run(self) -> None:
        """Watch the loop until cancelled."""
        while True:
            self._due_s = trio.current_time() + _NAP_S
            await trio.sleep_until(self._due_s)
            self._held_s += self._late_s()

    def _late_s(self) -> float:
        if self._due_s is None:
            return 0.0
        return max(0.0, trio.current_time() - self._due_s - SUSPENDED_S)
