"""The waiting set: order, ageing, sums of tokens."""

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from wsbatch.messages import SamplingParams

AGEING_S = 5.0
"""A request is passed by one that is a class more urgent only if that one arrives within this time after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """A request as a scheduler sees it.

    Attributes:
        key: the engine's own number for it, never used twice.
        token_ids: the prompt, and after it what was already generated elsewhere.
        max_new_tokens: tokens still to generate at most; at least 1.
        sampling: how its tokens are chosen.
        priority: 0 (most urgent) to 9.
        arrived_s: when it arrived, on the engine's clock.
        turn_s: its fair turn among its client's requests, see `fairness`; None is its arrival.
    """

    key: int
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    priority: int
    arrived_s: float
    turn_s: float | None = None

    @property
    def order(self) -> tuple[float, int]:
        """The sort key: a virtual arrival time.

        Each class costs AGEING_S: a static key that gives priority, first come first served within a class (and a
        client), and a bounded wait at once: nobody passes whose turn is more than 9 * AGEING_S after this one's.
        """
        turn_s = self.arrived_s if self.turn_s is None else self.turn_s
        return (turn_s + self.priority * AGEING_S, self.key)


class WaitingQueue:
    """The waiting requests in the order in which they should be served."""

    def __init__(self) -> None:
        self._ordered: list[ScheduledRequest] = []
        self._by_key: dict[int, ScheduledRequest] = {}
        self._tokens = 0
        self._of_class: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._ordered)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self)} requests, {self._tokens} tokens>"

    @property
    def tokens(self) -> int:
        """Prompt tokens waiting."""
        return self._tokens

    @property
    def least_urgent(self) -> int:
        """The least urgent class among the waiting; -1 where nobody waits."""
        return max(self._of_class, default=-1)

    def add(self, request: ScheduledRequest) -> None:
        """Put a request in its place. The key must be new."""
        if request.key in self._by_key:
            raise ValueError(f"key {request.key} is already waiting")
        bisect.insort(self._ordered, request, key=lambda item: item.order)
        self._by_key[request.key] = request
        self._tokens += len(request.token_ids)
        self._of_class[request.priority] += 1

    def get(self, key: int) -> ScheduledRequest | None:
        """The waiting request with this key, if there is one."""
        return self._by_key.get(key)

    def remove(self, key: int) -> ScheduledRequest | None:
        """Take a request out; None if it is not here."""
        request = self._by_key.pop(key, None)
        if request is not None:
            index = bisect.bisect_left(self._ordered, request.order, key=lambda item: item.order)
            del self._ordered[index]
            self._tokens -= len(request.token_ids)
            self._of_class -= Counter([request.priority])
        return request
