"""Deadlines of many requests, watched by one task."""

import heapq
from collections.abc import Callable

import trio


class Timers:
    """A heap of (time, key). `expire(key)` is called once for each, on time; a key that is over by then ignores it."""

    def __init__(self, expire: Callable[[int], None]) -> None:
        self._expire = expire
        self._heap: list[tuple[float, int]] = []
        self._changed = trio.Event()

    def add(self, at_s: float, key: int) -> None:
        """Call `expire(key)` at this time, in seconds on trio's clock."""
        heapq.heappush(self._heap, (at_s, key))
        if self._heap[0] == (at_s, key):
            self._changed.set()

    async def run(self) -> None:
        """Watch the heap until cancelled."""
        while True:
            self._changed = trio.Event()
            next_s = self._heap[0][0] if self._heap else float("inf")
            with trio.move_on_at(next_s):
                await self._changed.wait()
            while self._heap and self._heap[0][0] <= trio.current_time():
                _, key = heapq.heappop(self._heap)
                self._expire(key)
