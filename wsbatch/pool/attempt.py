"""One request on one replica: what its client connection delivers to."""

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from wsbatch.errors import WsbatchError
from wsbatch.messages import Accepted, Event, Failed, Finished, GenerateRequest, RequestId, Started, Tokens
from wsbatch.pool import outcome
from wsbatch.pool.outcome import Outcome
from wsbatch.pool.replica import Blame, Replica

if TYPE_CHECKING:
    from wsbatch.pool.route import Route


class Attempt:
    """A `Sink` of the client's. A route makes one after another, and only the one in force tells it anything.

    Attributes:
        accepted: whether the replica has accepted it.
        started: whether the replica has begun it, as far as is known.
        sent_s: when it was made, on trio's clock.
        tokens: of output that it gave.
    """

    __slots__ = ("_route", "accepted", "replica", "request", "sent_s", "started", "tokens")

    def __init__(self, route: "Route", replica: Replica, request: GenerateRequest) -> None:
        self.accepted = False
        self.started = False
        self.replica = replica
        self.request = request
        self.sent_s = trio.current_time()
        self.tokens = 0
        self._route = route

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.sampling.most_tokens - len(self.request.resume_token_ids) - self.tokens

    def start(self, id: RequestId) -> None:
        """See `Sink`."""
        self.request = replace(self.request, id=id)

    def deliver(self, event: Event) -> None:
        """See `Sink`."""
        if isinstance(event, Finished | Failed):
            self.replica.done(self)
        elif isinstance(event, Tokens):
            self.tokens += len(event.token_ids)
            self.replica.got(len(event.token_ids))
        if self._route.attempt is self:
            self._tell(event)

    def fail(self, error: WsbatchError) -> None:
        """See `Sink`."""
        self.replica.failed(self, error)

    def lost(self, why: str, blame: Blame | None, *, with_replica: bool) -> None:
        """What it was on is gone: the replica, or a connection to it alone. No blame: others are the likelier cause."""
        self._left(outcome.lost(why, blame, with_replica=with_replica, started=self.started))

    def broken(self, why: str) -> None:
        """The replica broke the protocol on it."""
        self._left(outcome.broken(why, self.replica))

    def stalled(self) -> None:
        """The replica has said too little of it for too long."""
        self.replica.abandon(self)
        self._left(outcome.stalled(self.replica, accepted=self.accepted))

    def _tell(self, event: Event) -> None:
        """Pass an event on: they are in order, as the client has seen to."""
        match event:
            case Tokens():
                self._start()
                self._route.got(event)
            case Accepted():
                self.accepted = True
                self._route.accepted(event)
            case Started():
                self._start()
            case Finished():
                self._left(outcome.of_finished(event, self.replica, self.request))
            case Failed():
                self._left(outcome.of_failed(event, self.replica, accepted=self.accepted, started=self.started))

    def _start(self) -> None:
        if not self.started:
            self.started = True
            self._route.started()

    def _left(self, found: Outcome) -> None:
        if self._route.attempt is self:
            self._route.left(found)
