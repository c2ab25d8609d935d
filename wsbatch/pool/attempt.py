"""One request on one replica: what its client connection delivers to."""

from dataclasses import replace
from typing import Protocol

from wsbatch.errors import WsbatchError
from wsbatch.messages import Event, Failed, Finished, GenerateRequest, RequestId
from wsbatch.pool.replica import Replica


class Owner(Protocol):
    """Who makes attempts, one after another."""

    @property
    def attempt(self) -> "Attempt | None":
        """The one in force: what comes from others is ignored."""
        ...

    def deliver(self, event: Event) -> None:
        """Take an event of the attempt. Raises ProtocolError."""
        ...

    def lost(self, why: str) -> None:
        """The attempt's replica is gone."""
        ...


class Attempt:
    """A `Sink` of the client's, and an `Attempt` of the replica's.

    Attributes:
        accepted: whether the replica has accepted it.
    """

    __slots__ = ("_owner", "accepted", "replica", "request")

    def __init__(self, owner: Owner, replica: Replica, request: GenerateRequest) -> None:
        self.accepted = False
        self.replica = replica
        self.request = request
        self._owner = owner

    def start(self, id: RequestId) -> None:
        """See `Sink`."""
        self.request = replace(self.request, id=id)

    def deliver(self, event: Event) -> None:
        """See `Sink`."""
        if isinstance(event, Finished | Failed):
            self.replica.done(self)
        if self._owner.attempt is self:
            self._owner.deliver(event)

    def fail(self, error: WsbatchError) -> None:
        """See `Sink`."""
        self.replica.failed(self, error)

    def lost(self, why: str) -> None:
        """See `replica.Attempt`."""
        if self._owner.attempt is self:
            self._owner.lost(why)
