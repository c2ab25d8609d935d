"""How a session ends: one state, from an open connection to its closing handshake."""

from enum import Enum
from math import inf
from typing import NamedTuple

GOING_AWAY = 1001


class Close(NamedTuple):
    """What the closing handshake says."""

    code: int
    reason: str


class Phase(Enum):
    """What a session is at; it only ever goes on to a later one."""

    OPEN = "open"
    DRAINING = "draining"  # closes once its live requests have ended
    ENDING = "ending"  # acts on nothing that arrives; writes what is left, and closes
    CLOSING = "closing"  # in the closing handshake, in which nothing can be received


class Ending:
    """The end of one session: whether it has come, how the connection closes, and when. Times are on trio's clock.

    Attributes:
        phase: where the session is.
        close: how the connection will be closed; None while nobody wants it closed.
        close_s: when to close, if no request is live then; infinity while the connection is to stay open.
        abort_s: what is not written by then never is.
    """

    def __init__(self) -> None:
        self.phase = Phase.OPEN
        self.close: Close | None = None
        self.close_s = inf
        self.abort_s = inf

    def __repr__(self) -> str:
        return f"<Ending {self.phase.value}{'' if self.close is None else f', {self.close.code}'}>"

    @property
    def deaf(self) -> bool:
        """Whether nothing that arrives is acted on any more."""
        return self.phase in (Phase.ENDING, Phase.CLOSING)

    def drain(self, open_until_s: float) -> None:
        """Close (1001) once no request is live, but not before this time."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.DRAINING
            self.close = Close(GOING_AWAY, "drained")
            self.close_s = open_until_s

    def end(self, code: int, reason: str, abort_s: float) -> None:
        """Close as soon as what is left is written. The first reason stays, but for one that is the server's own."""
        if self.phase is not Phase.CLOSING:
            self.phase = Phase.ENDING
        if self.close is None or (self.close.code == GOING_AWAY and code != GOING_AWAY):
            self.close = Close(code, reason)
        self.close_s = -inf
        self.abort_s = min(self.abort_s, abort_s)

    def begin_closing(self) -> Close:
        """The closing handshake begins; returns how."""
        assert self.close is not None
        self.phase = Phase.CLOSING
        return self.close
