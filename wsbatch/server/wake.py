"""Waking one task, again and again."""

import trio


class Wake:
    """Whoever holds it may wake the task that waits; it holds neither."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the task, if it waits."""
        self._event.set()

    async def wait(self) -> None:
        """For the next `set`."""
        self._event = trio.Event()
        await self._event.wait()
