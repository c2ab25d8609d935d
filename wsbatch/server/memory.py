"""Giving memory back to the system once what needed it is gone."""

import ctypes

import trio

_LATER_S = 1.0


class FreedMemory:
    """Gives back what was freed, once a second at most: `run` must be a task.

    glibc keeps what was freed for as long as anything lives that was allocated later. To give it back takes a quarter
    of a millisecond a MiB, for which nothing else runs.
    """

    def __init__(self) -> None:
        self._due = trio.Event()

    def note(self) -> None:
        """Much was freed, or is about to be."""
        self._due.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.wait()
            await trio.sleep(_LATER_S)
            self._due = trio.Event()
            give_back()


class Tide:
    """Follows a level, and tells when it has fallen to half of its height, from a height on that is `worth` noting."""

    def __init__(self, worth: int) -> None:
        self._worth = worth
        self._height = 0

    def falls(self, level: int) -> bool:
        """The level is this now; whether that is half of the height, which is then counted anew from here."""
        self._height = max(self._height, level)
        fallen = self._height >= self._worth and level <= self._height // 2
        if fallen:
            self._height = level
        return fallen


def give_back() -> None:
    """Return to the system what was freed, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
