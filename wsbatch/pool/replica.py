"""One replica as its router sees it: its connections, what it last said of its work, and the attempts on it."""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, TypeAlias

import trio

from wsbatch.client import Client
from wsbatch.client.errors import printable
from wsbatch.config import PoolConfig
from wsbatch.errors import ConnectionLost, QueueFull, WsbatchError
from wsbatch.messages import Hello, Limits, Status
from wsbatch.pool.loop_clock import LoopClock
from wsbatch.pool.outlier import Outlier

if TYPE_CHECKING:
    from wsbatch.pool.attempt import Attempt

_logger = logging.getLogger("wsbatch.pool")

ReplicaState = Literal["away", "ready", "draining"]
Kind: TypeAlias = tuple[str, str]
"""Revision of the weights, and dtype: streams go on only where both are equal, and known."""


class Blame:
    """A replica's failure of a request, or of many at once. It counts when another replica has done one of them."""

    def __init__(self, replica: "Replica") -> None:
        self._replica = replica
        self._confirmed = False

    def confirm(self, by: "Replica") -> None:
        """That one has done the request."""
        if not self._confirmed and by is not self._replica:
            self._confirmed = True
            if self._replica.health.failed(trio.current_time()):
                self._replica.tell("gets no requests for a while: it fails what others do")


class Replica:
    """What is known of it; `Upkeep` keeps its connections. All of it is synchronous.

    Args:
        name: for logs and metrics: its address.
        config: when it is given up.
        clock: silences are measured on it.
        on_change: called with this replica when it has become ready, and after each of its answers about its work.
        on_lost: called with this replica when it is lost, before its attempts are told.

    Attributes:
        scope: cancel it to let go of the replica.
        hello: what it said of itself, now or when it was there last.
        status: what it last said of its work; None while it is lost.
        health: whether it does what it is asked.
        clients: connections that carry requests.
        probe: the connection that carries questions about its work, and nothing else.
        gone: set when it is lost.
        in_doubt: set when a connection has ended: whether the replica has, too, is to be asked.
        stranded: connections that have ended, and when: what was on them goes on once that is known.
    """

    def __init__(
        self,
        name: str,
        config: PoolConfig,
        *,
        clock: LoopClock,
        on_change: Callable[["Replica"], None],
        on_lost: Callable[["Replica"], None],
    ) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.hello: Hello | None = None
        self.status: Status | None = None
        self.health = Outlier()
        self.clients: list[Client] = []
        self.probe: Client | None = None
        self.gone = trio.Event()
        self.in_doubt = trio.Event()
        self.stranded: dict[Client, float] = {}
        self._config = config
        self._clock = clock
        self._on_change = on_change
        self._on_lost = on_lost
        self._attempts: dict[Attempt, Client] = {}
        self._told = ""
        self._answered_s = 0.0
        self._sent_tokens = 0  # of requests sent here since the last question, which its answer cannot know of
        self._own_tokens = 0  # that the attempts may still generate

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state}, {len(self._attempts)} live>"

    @property
    def state(self) -> ReplicaState:
        """away, ready or draining. One that has left its probes unanswered for `stall_s` is away to new requests."""
        if self.status is None or not self.clients:
            return "away"
        if self.draining:
            return "draining"
        return "ready" if self._clock.now_s() - self._answered_s < self._config.stall_s else "away"

    @property
    def draining(self) -> bool:
        """Whether it has said so."""
        if self.status is not None and self.status.state != "ready":
            return True
        return any(client.draining for client in (self.probe, *self.clients) if client is not None)

    @property
    def live(self) -> int:
        """Requests of this router that are on it."""
        return len(self._attempts)

    @property
    def work_tokens(self) -> int:
        """Tokens that it still has to compute: as it said last, and what was sent to it since; but no less than this
        router alone waits for, whatever it says."""
        status = self.status
        said = self._sent_tokens + (status.queued_tokens + status.running_tokens if status is not None else 0)
        return max(said, self._own_tokens)

    @property
    def retry_after_ms(self) -> int | None:
        """When to try again, where it would refuse; None where it would not, as far as is known."""
        if self.status is not None and self.status.retry_after_ms is not None:
            return self.status.retry_after_ms
        return None if self._free_client() is not None else 500

    @property
    def limits(self) -> Limits | None:
        """Of what it takes, as it said."""
        return None if self.hello is None else self.hello.limits

    @property
    def kind(self) -> Kind | None:
        """Of what it is, or was when it was there last; None where it never was."""
        return None if self.hello is None else (self.hello.revision, self.hello.dtype)

    def begin(self, attempt: "Attempt", *, tokens: int) -> None:
        """Send a request. Raises QueueFull where every connection has as many requests as the replica allows,
        and what `Client.begin` raises."""
        client = self._free_client()
        if client is None:
            raise QueueFull("every connection to the replica is full", retry_after_ms=500)
        client.begin(attempt)
        self._attempts[attempt] = client
        self._sent_tokens += tokens
        self._own_tokens += attempt.tokens_left

    def got(self, tokens: int) -> None:
        """An attempt has had so many tokens."""
        self._own_tokens -= tokens

    def done(self, attempt: "Attempt") -> None:
        """The attempt has had its terminal frame."""
        self._drop(attempt)

    def cancel(self, attempt: "Attempt") -> None:
        """Ask for the attempt's end; its terminal frame is still delivered."""
        self._attempts[attempt].cancel(attempt.request.id)

    def abandon(self, attempt: "Attempt") -> None:
        """End the attempt; nothing more of it is delivered."""
        if (client := self._drop(attempt)) is not None:
            client.abandon(attempt.request.id)

    def failed(self, attempt: "Attempt", error: WsbatchError) -> None:
        """The attempt's connection has ended, or the server broke the protocol on it."""
        client = self._attempts.get(attempt)
        if client is not None and isinstance(error, ConnectionLost):
            self.disconnected(client, str(error))
        elif self._drop(attempt) is not None:
            attempt.broken(str(error))

    def joined(self, probe: Client, status: Status) -> None:
        """It is there."""
        self.hello = probe.hello
        self.probe = probe
        self.gone = trio.Event()
        self.tell(f"is there: {probe.hello.model} in {probe.hello.dtype}", logging.INFO)
        self.update_status(status)

    def connected(self, client: Client) -> None:
        """There is a connection for requests."""
        self.clients.append(client)
        self._on_change(self)

    def update_status(self, status: Status, *, known_tokens: int = 0) -> None:
        """It has said what it has to do; `known_tokens` of the `sent_tokens` had been sent before it was asked."""
        self.status = status
        self._answered_s = self._clock.now_s()
        self._sent_tokens -= known_tokens
        self._on_change(self)

    @property
    def sent_tokens(self) -> int:
        """Of requests sent here that its last answer does not know of."""
        return self._sent_tokens

    def disconnected(self, client: Client, why: str) -> None:
        """A connection for requests has ended. Whether that is the end of the replica its probe will tell."""
        if client not in self.clients:
            return
        if self.draining and len(self.clients) == 1:
            self.lose(why)  # it closes each when its last request has ended
            return
        self.clients.remove(client)
        self.stranded[client] = self._clock.now_s()
        self.in_doubt.set()
        if self.draining:
            self.release_connections([client])

    def release_connections(self, clients: Iterable[Client], *, alive: bool = True) -> None:
        """These connections have ended, and the replica is alive all the same, or does not say. What was on them goes
        on."""
        for client in clients:
            if self.stranded.pop(client, None) is None:
                continue
            attempts = [attempt for attempt, where in self._attempts.items() if where is client]
            # What ends a connection of a server that lives is what it was only just reading.
            read = [attempt for attempt in attempts if alive and not attempt.accepted]
            blame = Blame(self)
            for attempt in attempts:
                self._drop(attempt)
            for attempt in attempts:
                attempt.lost(
                    "a connection broke", blame if not read or attempt in read else None, with_replica=not alive
                )

    def lose(self, why: str) -> None:
        """It is lost, and everything on it. Does nothing where it is already."""
        if self.status is None:
            return
        attempts, self._attempts = self._attempts, {}
        self.clients = []
        self.stranded = {}
        self.probe = None
        self.status = None
        self._sent_tokens = self._own_tokens = 0
        self.gone.set()
        self.tell(f"is lost with {len(attempts)} requests: {why}")
        self._on_lost(self)
        for attempt, client in attempts.items():
            client.abandon(attempt.request.id)  # where it still lives, it need not go on
        blame = Blame(self)
        for attempt in attempts:
            attempt.lost(why, blame, with_replica=True)

    def tell(self, what: str, level: int = logging.WARNING) -> None:
        """Log it, once: a replica that stays away would say the same every few seconds."""
        if what != self._told:
            self._told = what
            _logger.log(level, "replica %s %s", self.name, printable(what))

    def _drop(self, attempt: "Attempt") -> Client | None:
        client = self._attempts.pop(attempt, None)
        if client is not None:
            self._own_tokens -= attempt.tokens_left
        return client

    def _free_client(self) -> Client | None:
        """The connection with the fewest requests; None where all have as many as the replica allows."""
        client = min(self.clients, key=lambda client: client.live, default=None)
        if client is None or client.live >= client.hello.limits.max_live_requests:
            return None
        return client
