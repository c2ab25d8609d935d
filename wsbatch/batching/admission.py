"""Who may wait: the queue's bounds, the reservation made at the check, and an honest time to come back."""

from math import inf

from wsbatch.errors import QueueFull

_SHORTEST_RETRY_S = 0.05
_LONGEST_RETRY_S = 30.0
_RETURNS_PER_PLACE = 2
"""Refused clients that are told to come back in the time in which one is served. Clients spread themselves over once to
twice what they are told, so that with fewer of them the server would run dry."""
_RATE_DECAY = 0.9
_GUESSED_INTERVAL_S = 0.1


class Place:
    """One request's place in the queue, from the check to its first step or its end. Made by `Admission.reserve`.

    As a context manager it gives itself back where the block raises: afterwards it is for whoever took it over to do.

    Attributes:
        tokens: prompt tokens that it holds; 0 until it is filled.
        lent: taken while the queue was full, for a request that others may yet give way to. Filling it ends that.
    """

    __slots__ = ("_admission", "lent", "tokens")

    def __init__(self, admission: "Admission", *, lent: bool) -> None:
        self._admission = admission
        self.lent = lent
        self.tokens = 0

    def __repr__(self) -> str:
        return f"<Place of {self.tokens} tokens{', lent' if self.lent else ''}>"

    def fill(self, tokens: int) -> None:
        """Hold this many prompt tokens. `Admission.lacks` tells before whether there is room."""
        if self.lent:
            self.lent = False
            self._admission.lent -= 1
            self._admission.requests += 1
        self._admission.tokens += tokens - self.tokens
        self.tokens = tokens

    def leave(self) -> None:
        """Give the place back: the request has started, ended in the queue, or been refused. Call it once."""
        if self.lent:
            self._admission.lent -= 1
        else:
            self._admission.requests -= 1
        self._admission.tokens -= self.tokens

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.leave()


class Admission:
    """Counts what waits, from the check on: a place is taken before the prompt is tokenized, so a burst cannot pass.

    Args:
        max_requests, max_tokens: bounds on what waits.

    Attributes:
        requests: places taken, but for the lent ones.
        lent: places lent.
        tokens: prompt tokens in the places.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        self.lent = 0
        self.tokens = 0
        self._interval_s: float | None = None  # between two requests leaving the queue, a running mean
        self._last_left_s: float | None = None
        self._next_return_s = -inf  # when the next refused client should come back, if not sooner

    def __repr__(self) -> str:
        return (
            f"<Admission {self.requests}/{self._max_requests} requests, {self.lent} lent places, "
            f"{self.tokens}/{self._max_tokens} tokens>"
        )

    @property
    def full(self) -> bool:
        """Whether there is no room for one more request, whatever it holds."""
        return self.requests >= self._max_requests or self.tokens >= self._max_tokens

    def refusal(self, *, sheddable: int = 0) -> QueueFull | None:
        """Why one more request would be refused whatever it holds; None if it may be let in.

        A full queue lends places while fewer are lent than there are waiting requests that might give way for this one
        (`sheddable`). Nobody gives way before it is sure that the request can be let in.
        """
        if not self.full or self.lent < sheddable:
            return None
        if self.requests >= self._max_requests:
            return QueueFull(f"{self.requests} requests are waiting, the most allowed")
        return QueueFull(f"{self.tokens} prompt tokens are waiting; at most {self._max_tokens} may")

    def reserve(self, *, sheddable: int = 0) -> Place:
        """Take a place for a request whose length is not known yet. Raises QueueFull; see `refusal`."""
        if (refusal := self.refusal(sheddable=sheddable)) is not None:
            raise refusal
        lent = self.full
        if lent:
            self.lent += 1
        else:
            self.requests += 1
        return Place(self, lent=lent)

    def lacks(self, place: Place, tokens: int, *, less_requests: int = 0, less_tokens: int = 0) -> QueueFull | None:
        """Why this place cannot hold so many prompt tokens, even after so much has left the queue; None if it can."""
        if place.lent and self.requests - less_requests >= self._max_requests:
            return QueueFull(f"{self.requests} requests are waiting, the most allowed")
        waiting = self.tokens - less_tokens
        if waiting and waiting + tokens > self._max_tokens:
            return QueueFull(
                f"{waiting} prompt tokens are waiting; {tokens} more would pass the bound of {self._max_tokens}"
            )
        return None

    def started(self, count: int, now_s: float) -> None:
        """This many requests have just left the queue to run: the measured service rate."""
        if self._last_left_s is not None:
            interval_s = (now_s - self._last_left_s) / count
            known = self._interval_s
            self._interval_s = (
                interval_s if known is None else known * _RATE_DECAY**count + interval_s * (1 - _RATE_DECAY**count)
            )
        self._last_left_s = now_s if self.requests else None  # a pause in which nobody waits is no service time

    def retry_after_ms(self, now_s: float) -> int:
        """When a retry is worth making: half of the queue is served by then, and those who were told before are back.

        From 50 ms to half a minute: what comes later nobody knows.
        """
        wait_s = self._return_s(now_s) - now_s
        return round(1000 * max(_SHORTEST_RETRY_S, min(_LONGEST_RETRY_S, wait_s)))

    def reserve_retry_ms(self, now_s: float) -> int:
        """`retry_after_ms` for a client who is told it: the next one is told a later time."""
        told_ms = self.retry_after_ms(now_s)
        next_s = self._return_s(now_s) + self.interval_s / _RETURNS_PER_PLACE
        self._next_return_s = min(next_s, now_s + _LONGEST_RETRY_S)
        return told_ms

    def _return_s(self, now_s: float) -> float:
        return max(self._next_return_s, now_s + self.interval_s * self.requests / 2)

    @property
    def interval_s(self) -> float:
        """Mean time between two requests leaving the queue to run; a guess before the first."""
        return self._interval_s if self._interval_s is not None else _GUESSED_INTERVAL_S
