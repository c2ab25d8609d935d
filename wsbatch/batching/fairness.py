"""A fair share of the queue between clients."""

from collections import Counter
from collections.abc import Hashable


class FairShare:
    """Puts a client's n-th waiting request n service intervals after its arrival: its turn.

    The idea is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with the measured service interval as the
    virtual clock's step, so that a request's place is fixed when it arrives: one client with a thousand requests is
    spread over the time that serving them alone would take, and another's single request goes between them.
    """

    def __init__(self) -> None:
        self._waiting: Counter[Hashable] = Counter()

    def turn_s(self, client: Hashable, arrived_s: float, interval_s: float) -> float:
        """The virtual arrival of this client's next request, which waits from now on."""
        turn_s = arrived_s + self._waiting[client] * interval_s
        self._waiting[client] += 1
        return turn_s

    def leave(self, client: Hashable) -> None:
        """One of this client's requests has left the queue."""
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]
