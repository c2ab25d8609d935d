"""A fair share of the queue between clients: whose turn it is, and who has to give way."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wsbatch.batching.queue import ScheduledRequest


class Client(NamedTuple):
    """Whose a request is.

    Attributes:
        peer: who shares the room in the queue with other peers: the address that a connection comes from.
        connection: who takes turns with the other connections, of this peer and of others.
    """

    peer: Hashable = None
    connection: Hashable = None


NOBODY = Client()
"""Whose a request is that was made in this process."""


def sheddable(
    waiting: Iterable[tuple[Client, ScheduledRequest]], client: Client, *, priority: int, max_requests: int
) -> list[ScheduledRequest]:
    """The waiting requests that may be dropped for a request of this client, in the order in which they give way.

    They are less urgent than it. Requests of other peers are among them only while the client's peer waits with less
    than its share of the queue, an equal part of `max_requests`, and no more of each peer than it has beyond that
    share: nobody is driven out by somebody who calls everything urgent.
    """
    waiting = list(waiting)
    counts = Counter(other.peer for other, _ in waiting)
    peers = len(counts | Counter([client.peer]))
    share = max(1, max_requests // peers)
    beyond = {peer: max(0, count - share) for peer, count in counts.items()}
    own = counts[client.peer]
    requests: list[ScheduledRequest] = []
    for other, request in sorted(waiting, key=lambda each: (each[1].priority, each[1].order), reverse=True):
        if request.priority <= priority:
            break
        if other.peer == client.peer:
            requests.append(request)
        elif own < share and beyond[other.peer]:
            beyond[other.peer] -= 1
            requests.append(request)
    return requests


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
