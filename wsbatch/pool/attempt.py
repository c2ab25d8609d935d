"""One request on one replica: what its client connection delivers to."""

from dataclasses import replace
from typing import Protocol

import trio

from wsbatch.errors import WsbatchError
from wsbatch.messages import Event, Failed, Finished, GenerateRequest, RequestId, Tokens
from wsbatch.pool.replica import Blame, Replica


class Owner(Protocol):
    """Who makes attempts, one after another."""

    @property
    def attempt(self) -> "Attempt | None":
        """The one in force: what comes from others is ignored."""
        ...

    def deliver(self, event: Event) -> None:
        """Take an event of the attempt."""
        ...

    def lost(self, why: str, blame: Blame | None, *, with_replica: bool) -> None:
        """See `replica.Attempt`."""
        ...

    def broken(self, why: str) -> None:
        """The attempt's replica broke the protocol."""
        ...


class Attempt:
    """A `Sink` of the client's, and an `Attempt` of the replica's.

    Attributes:
        accepted: whether the replica has accepted it.
        sent_s: when it was made, on trio's clock.
        tokens: of output that it gave.
    """

    __slots__ = ("_owner", "accepted", "replica", "request", "sent_s", "tokens")

    def __init__(self, owner: Owner, replica: Replica, request: GenerateRequest) -> None:
        self.accepted = False
        self.replica = replica
        self.request = request
        self.sent_s = trio.current_time()
        self.tokens = 0
        self._owner = owner

    @property
    def tokens_left(self) -> int:
        """See `replica.Attempt`."""
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
        if self._owner.attempt is self:
            self._owner.deliver(event)

    def fail(self, error: WsbatchError) -> None:
        """See `Sink`."""
        self.replica.failed(self, error)

    def lost(self, why: str, blame: Blame | None, *, with_replica: bool) -> None:
        """See `replica.Attempt`."""
        if self._owner.attempt is self:
            self._owner.lost(why, blame, with_replica=with_replica)

    def broken(self, why: str) -> None:
        """See `replica.Attempt`."""
        if self._owner.attempt is self:
            self._owner.broken(why)
