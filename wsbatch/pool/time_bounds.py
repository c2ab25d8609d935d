"""The bounds on one request's time: when the pool must look at it again, and what for."""

from math import inf
from typing import Literal, TypeAlias

import trio

from wsbatch.config import PoolConfig
from wsbatch.messages import GenerateRequest
from wsbatch.pool.loop_clock import LoopClock

# A replica keeps a request's own timeouts, and knows better how it ended: the pool steps in after this.
_LATE_S = 0.25
# A replica must give so many tokens within `request_stall_s`, so that one which drips is seen like one which is silent.
_DUE_TOKENS = 32
_MOMENT_S = 0.001  # a rest of patience that is too small to be waited for

Due: TypeAlias = Literal["end", "give up", "time out", "time out in the queue", "move"]


class TimeBounds:
    """The bounds of one request, on trio's clock; inf for those that it does not have, or not now.

    Attributes:
        timeout_s: the whole request must have ended.
        queue_timeout_s: it must have begun.
        give_up_s: while no replica can take it: that has lasted too long.
        ending_by_s: its replica was asked to end it, and must have.
    """

    def __init__(self, request: GenerateRequest, config: PoolConfig, clock: LoopClock) -> None:
        now_s = trio.current_time()
        self.timeout_s = _after(now_s, request.timeout_ms)
        self.queue_timeout_s = _after(now_s, request.queue_timeout_ms)
        self.give_up_s = inf
        self.ending_by_s = inf
        self._looks_s = inf  # the next look that the pool was asked for
        self._config = config
        self._clock = clock
        self._silent_since_s: float | None = None  # on the patient clock; None while no replica has it
        self._silence_s = 0.0
        self._due_tokens = 0

    def sent(self) -> None:
        """A replica must accept or refuse it."""
        self._silence_s = self._config.accept_timeout_s
        self._silent_since_s = self._clock.now_s()

    def accepted(self) -> None:
        """The replica must go on with it: begin, and give a first token, within `request_stall_s` each."""
        self.give_up_s = inf
        self._silence_s = self._config.request_stall_s
        self._silent_since_s = self._clock.now_s()
        self._due_tokens = 1

    def started(self) -> None:
        """The replica has begun."""
        self._silent_since_s = self._clock.now_s()

    def got(self, tokens: int) -> None:
        """The replica has given so many tokens."""
        self._due_tokens -= tokens
        if self._due_tokens <= 0:
            self._due_tokens = _DUE_TOKENS
            self._silent_since_s = self._clock.now_s()

    def left(self) -> None:
        """No replica has it."""
        self._silent_since_s = None

    def due(self, *, begun: bool) -> Due | None:
        """A look: what is to be done now. `begun`: a replica has begun it. To end it where its replica was asked to and
        has not, and nothing else matters then; to move it where its replica has said too little of it for too long."""
        self._looks_s = inf
        now_s = trio.current_time()
        if self.ending_by_s < inf:
            return "end" if now_s >= self.ending_by_s else None
        if now_s >= self.give_up_s:
            return "give up"
        if now_s >= self.timeout_s:
            return "time out"
        if now_s >= self.queue_timeout_s:
            self.queue_timeout_s = inf
            if not begun:
                return "time out in the queue"
        if self._silent_since_s is not None and self._patience_s <= _MOMENT_S:
            return "move"
        return None

    def sooner_s(self) -> float | None:
        """When to look again, where that is sooner than what this said last; else None."""
        silent_s = inf if self._silent_since_s is None else trio.current_time() + max(0.0, self._patience_s)
        next_s = min(self.timeout_s, self.queue_timeout_s, self.give_up_s, self.ending_by_s, silent_s)
        if next_s >= self._looks_s:
            return None
        self._looks_s = next_s
        return next_s

    @property
    def _patience_s(self) -> float:
        assert self._silent_since_s is not None
        return self._silence_s - (self._clock.now_s() - self._silent_since_s)


def _after(now_s: float, ms: int | None) -> float:
    return inf if ms is None else now_s + ms / 1000 + _LATE_S
