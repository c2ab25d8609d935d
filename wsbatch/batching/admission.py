"""Who may wait: the queue's bounds, the reservation made at the check, and an honest time to come back."""

from wsbatch.errors import NeverFits, QueueFull

_LONGEST_RETRY_MS = 30_000
_RATE_DECAY = 0.9
_GUESSED_INTERVAL_S = 0.1


class Admission:
    """Counts what waits, from the check on: a place is taken before the prompt is tokenised, so a burst cannot pass.

    Args:
        max_requests, max_tokens: bounds on what waits.
        max_request_tokens: prompt plus output of one request, the smaller of what the model and the KV pool hold.
    """

    def __init__(self, *, max_requests: int, max_tokens: int, max_request_tokens: int) -> None:
        self.max_request_tokens = max_request_tokens
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self._interval_s: float | None = None  # between two requests leaving the queue, a running mean
        self._last_left_s: float | None = None

    def __repr__(self) -> str:
        return f"<Admission {self.requests}/{self._max_requests} requests, {self.tokens}/{self._max_tokens} tokens>"

    def refusal(self) -> QueueFull | None:
        """Why one more request would be refused whatever it holds; None if there is room."""
        if self.requests >= self._max_requests:
            return self._full(f"{self.requests} requests are waiting, the most allowed")
        if self.tokens >= self._max_tokens:
            return self._full(f"{self.tokens} prompt tokens are waiting; at most {self._max_tokens} may")
        return None

    def reserve(self) -> None:
        """Take a place for a request whose length is not known yet. Raises QueueFull."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        self.requests += 1

    def fill(self, tokens: int, max_new_tokens: int) -> None:
        """The reserved place turns out to hold this many prompt tokens. Raises NeverFits or QueueFull: then `leave`."""
        if tokens + max_new_tokens > self.max_request_tokens:
            raise NeverFits(
                f"prompt of {tokens} tokens plus max_tokens {max_new_tokens} is {tokens + max_new_tokens}: "
                f"at most {self.max_request_tokens} fit"
            )
        if self.tokens and self.tokens + tokens > self._max_tokens:
            raise self._full(
                f"{self.tokens} prompt tokens are waiting; {tokens} more would pass the bound of {self._max_tokens}"
            )
        self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """Give a place back, with the tokens it was filled with: started, ended in the queue, or refused."""
        self.requests -= 1
        self.tokens -= tokens

    def started(self, count: int, now_s: float) -> None:
        """This many requests have just left the queue to run: the measured service rate."""
        if self._last_left_s is not None:
            interval_s = (now_s - self._last_left_s) / count
            known = self._interval_s
            self._interval_s = (
                interval_s if known is None else known * _RATE_DECAY**count + interval_s * (1 - _RATE_DECAY**count)
            )
        self._last_left_s = now_s

    def retry_after_ms(self) -> int:
        """When a retry is worth making: by then half of the queue is served, and there is still work."""
        return max(50, min(_LONGEST_RETRY_MS, round(1000 * self.interval_s * self.requests / 2)))

    @property
    def interval_s(self) -> float:
        """Mean time between two requests leaving the queue to run; a guess before the first."""
        return self._interval_s if self._interval_s is not None else _GUESSED_INTERVAL_S

    def _full(self, message: str) -> QueueFull:
        return QueueFull(message, retry_after_ms=self.retry_after_ms())
