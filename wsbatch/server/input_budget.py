"""The memory that clients' large messages take: those that are arriving, and those that wait to become requests."""

from collections import deque
from math import inf

import trio

from wsbatch.server.memory import FreedMemory, HighWaterMark

_GRACE_S = 5.0
"""How long a message may take to arrive while others wait for the room that it has."""

_WORTH_GIVING_BACK_BYTES = 4 * 2**20


class Share:
    """One message's part of the budget, from where it begins to be large until it is a request.

    Attributes:
        held_bytes: taken for it.
        waiting: whether it waits for room.
        given_up: whether it must make room for others.
    """

    def __init__(self, budget: "InputBudget", timeout_s: float) -> None:
        self.held_bytes = 0
        self.waiting = False
        self.given_up = False
        self._budget = budget
        self._timeout_s = timeout_s
        self._began_s = trio.current_time()  # later, where it was made to wait
        self._reading: trio.CancelScope | None = None

    @property
    def overdue_at(self) -> float:
        """When others may have its room."""
        return self._began_s + _GRACE_S

    async def reserve(self, size: int) -> None:
        """Wait until it may have so many bytes in all."""
        asked_s, self.waiting = trio.current_time(), True
        try:
            await self._budget.reserve(self, size)
        finally:
            self.waiting = False
            self._began_s += trio.current_time() - asked_s

    def reading(self) -> trio.CancelScope:
        """For the time of one read: cancelled when the message takes too long, or is given up."""
        self._reading = trio.CancelScope(deadline=-inf if self.given_up else self._began_s + self._timeout_s)
        return self._reading

    def give_up(self) -> None:
        """Let others have its room."""
        self.given_up = True
        if self._reading is not None:
            self._reading.cancel()

    def complete(self, size: int) -> None:
        """All of it is there."""
        self._budget.complete(self, size)

    def resize(self, size: int) -> None:
        """It is so many bytes now."""
        self._budget.resize(self, size)

    def release(self) -> None:
        """It is gone. May be called again."""
        self._budget.release(self)


class _Waiter:
    def __init__(self, share: Share, size: int) -> None:
        self.share = share
        self.size = size
        self.granted = False
        self.woken = trio.Event()


class InputBudget:
    """Bytes of large messages, for all connections together.

    Where they are used up, messages wait to be read on, in turn. Two things keep this from lasting. The oldest message
    of all is read on in any case, so that there is always one that ends. And where somebody waits, a message that has
    been arriving for longer than a few seconds is given up, so that clients that send slowly, or not at all, do not
    keep the room. So no more is held than `most_bytes` and one message.

    Args:
        most_bytes: at least the size of a message.
        memory: is told when much of it is free again.
    """

    def __init__(self, most_bytes: int, memory: FreedMemory) -> None:
        self.used_bytes = 0
        self._most_bytes = most_bytes
        self._memory = memory
        self._high_water = HighWaterMark(_WORTH_GIVING_BACK_BYTES)
        self._shares: dict[Share, None] = {}  # the oldest first
        self._arriving: dict[Share, None] = {}  # those that are neither complete nor waiting
        self._waiters: deque[_Waiter] = deque()

    def __repr__(self) -> str:
        return f"<InputBudget {self.used_bytes} of {self._most_bytes} bytes in {len(self._shares)} messages>"

    def share(self, timeout_s: float) -> Share:
        """For a message that begins to be large, and must be complete within so long."""
        share = Share(self, timeout_s)
        self._shares[share] = None
        return share

    async def reserve(self, share: Share, size: int) -> None:
        """See `Share.reserve`."""
        self._arriving.pop(share, None)
        waiter = _Waiter(share, size)
        self._waiters.append(waiter)
        try:
            self._grant()
            while not waiter.granted:
                await self._wait(waiter)
        finally:
            if not waiter.granted:
                self._waiters.remove(waiter)
                self._grant()
        self._arriving[share] = None

    async def _wait(self, waiter: _Waiter) -> None:
        """For room; the first in the line looks for who can be given up."""
        slowest = next(iter(self._arriving), None) if waiter is self._waiters[0] else None
        if slowest is not None and slowest.overdue_at <= trio.current_time():
            del self._arriving[slowest]
            slowest.give_up()
            slowest = None
        waiter.woken = trio.Event()
        with trio.move_on_at(inf if slowest is None else slowest.overdue_at):
            await waiter.woken.wait()

    def complete(self, share: Share, size: int) -> None:
        """See `Share.complete`."""
        self._arriving.pop(share, None)
        self.resize(share, size)

    def resize(self, share: Share, size: int) -> None:
        """See `Share.resize`."""
        self._set(share, size)
        self._grant()

    def release(self, share: Share) -> None:
        """See `Share.release`."""
        if share not in self._shares:
            return
        del self._shares[share]
        self._arriving.pop(share, None)
        self.resize(share, 0)

    def _grant(self) -> None:
        """Let those read on for whom there is room, in turn; and the oldest, in any case."""
        while self._waiters and self._fits(self._waiters[0]):
            self._let(self._waiters.popleft())
        oldest = next(iter(self._shares), None)
        if oldest is not None and oldest.waiting:
            waiter = next((waiter for waiter in self._waiters if waiter.share is oldest), None)
            if waiter is not None:
                self._waiters.remove(waiter)
                self._let(waiter)
        if self._waiters:
            self._waiters[0].woken.set()

    def _fits(self, waiter: _Waiter) -> bool:
        return self.used_bytes - waiter.share.held_bytes + waiter.size <= self._most_bytes

    def _let(self, waiter: _Waiter) -> None:
        self._set(waiter.share, waiter.size)
        waiter.granted = True
        waiter.woken.set()

    def _set(self, share: Share, size: int) -> None:
        self.used_bytes += size - share.held_bytes
        share.held_bytes = size
        if self._high_water.halved(self.used_bytes):
            self._memory.note()
