"""Deadlines of many requests, watched by one task."""

from collections.abc import Callable

import trio

from wsbatch.engine.deadlines import Deadlines


class Timers:
    """One time for each key. `expire(key)` is called once for each, on time, unless it was dropped."""

    def __init__(self, expire: Callable[[int], None]) -> None:
        self._expire = expire
        self._deadlines = Deadlines()
        self._wakes_s = float("inf")
        self._sooner = trio.Event()

    def set(self, key: int, at_s: float) -> None:
        """Call `expire(key)` at this time, in seconds on trio's clock, and not at one that was set before."""
        self._deadlines.set(key, at_s)
        if at_s < self._wakes_s:
            self._sooner.set()

    def drop(self, key: int) -> None:
        """Do not call `expire(key)` any more."""
        self._deadlines.drop(key)

    async def run(self) -> None:
        """Watch the deadlines until cancelled."""
        while True:
            for key in self._deadlines.due(trio.current_time()):
                self._expire(key)
            self._sooner = trio.Event()
            self._wakes_s = self._deadlines.next_s
            with trio.move_on_at(self._wakes_s):
                await self._sooner.wait()
