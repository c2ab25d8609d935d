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


class HighWaterMark:
    """A high-water mark: tells when the level has fallen to half of it. A mark under `worth` is ignored."""

    def __init__(self, worth: int) -> None:
        self._worth = worth
        self._mark = 0

    def halved(self, level: int) -> bool:
        """The level is this now. True where that is half of the mark or less; the mark then starts again from here."""
        self._mark = max(self._mark, level)
        fallen = self._mark >= self._worth and level <= self._mark // 2
        if fallen:
            self._mark = level
        return fallen


def give_back() -> None:
    """Return to the system what was freed, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
