"""When requests run out of time: one deadline each, the earliest first."""

import heapq
from collections.abc import Iterator
from math import inf

_LEAST_STALE = 64


class Deadlines:
    """A time for each key, in seconds on the caller's clock. Setting and dropping cost O(log n), amortised.

    A deadline that was replaced or dropped stays in the heap until it comes up, or until such ones are the most of it:
    a request may have a deadline of a day, and end within a second.
    """

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._at_s)

    def __repr__(self) -> str:
        return f"<Deadlines of {len(self)}, the next at {self.next_s:g}>"

    @property
    def next_s(self) -> float:
        """The earliest; infinity where there is none."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else inf

    def set(self, key: int, at_s: float) -> None:
        """Give the key this deadline, in place of any other; infinity is none."""
        if at_s == inf:
            self.drop(key)
        elif self._at_s.get(key) != at_s:
            self._at_s[key] = at_s
            heapq.heappush(self._heap, (at_s, key))
            self._compact()

    def drop(self, key: int) -> None:
        """The key has no deadline any more."""
        if self._at_s.pop(key, None) is not None:
            self._compact()

    def due(self, now_s: float) -> Iterator[int]:
        """The keys whose deadline has passed, the earliest first; each is dropped as it is given."""
        while self.next_s <= now_s:
            _, key = heapq.heappop(self._heap)
            del self._at_s[key]
            yield key

    def _drop_stale(self) -> None:
        while self._heap and self._at_s.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._at_s) + _LEAST_STALE:
            self._heap = [(at_s, key) for key, at_s in self._at_s.items()]
            heapq.heapify(self._heap)
