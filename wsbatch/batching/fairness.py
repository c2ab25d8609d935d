"""A fair share of the queue between clients."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Line:
    """One client's waiting requests: how many, and the turn of the last."""

    waiting: int = 0
    last_turn_s: float = float("-inf")


class FairShare:
    """Puts a client's n-th waiting request n service intervals after its arrival, never before its earlier ones.

    The idea is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with the measured service interval as the
    virtual clock's step, so that a request's place is fixed when it arrives: one client with a thousand requests is
    spread over the time that serving them alone would take, and another's single request goes between them.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def turn_s(self, client: Hashable, arrived_s: float, interval_s: float) -> float:
        """The virtual arrival of this client's next request, which waits from now on."""
        line = self._lines.setdefault(client, _Line())
        line.last_turn_s = max(line.last_turn_s, arrived_s + line.waiting * interval_s)
        line.waiting += 1
        return line.last_turn_s

    def leave(self, client: Hashable) -> None:
        """One of this client's requests has left the queue."""
        line = self._lines[client]
        line.waiting -= 1
        if not line.waiting:
            del self._lines[client]
