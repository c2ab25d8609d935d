"""One replica as its router sees it: a few connections, what it last said of its work, and the attempts on it."""

import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias

import trio

from wsbatch.client import Client
from wsbatch.client.stream import Sink
from wsbatch.config import PoolConfig
from wsbatch.errors import ConnectionLost, QueueFull, WsbatchError
from wsbatch.messages import Hello, Status

_logger = logging.getLogger("wsbatch.pool")

_FIRST_PAUSE_S = 0.1

Dial: TypeAlias = Callable[[], AbstractAsyncContextManager[Client]]
"""Opens one connection to a replica: `lambda: connect(url)`."""

ReplicaState = Literal["away", "ready", "draining"]
Kind: TypeAlias = tuple[str, str]
"""Revision of the weights, and dtype: streams go on only where both are equal, and known."""


class Attempt(Sink, Protocol):
    """One request on one replica."""

    def lost(self, why: str) -> None:
        """The replica is gone, and everything on it."""
        ...


class Replica:
    """Keeps its connections up while `run` runs; all else is synchronous.

    Args:
        name: for logs and metrics: its address.
        dial: opens one connection.
        config: how many connections, how often to ask, when to give it up.
        on_change: called with this replica when it has become ready, and after each of its answers about its work.
        on_lost: called with this replica when it is lost, before its attempts are told.
        admit: raises WsbatchError for a server that does not belong here, by its hello.
    """

    def __init__(
        self,
        name: str,
        dial: Dial,
        config: PoolConfig,
        *,
        admit: Callable[[Hello], None],
        on_change: Callable[["Replica"], None],
        on_lost: Callable[["Replica"], None],
    ) -> None:
        self.name = name
        self.scope = trio.CancelScope()  # cancel it to let go of the replica
        self.hello: Hello | None = None
        self.status: Status | None = None
        self._dial = dial
        self._config = config
        self._admit = admit
        self._on_change = on_change
        self._on_lost = on_lost
        self._clients: list[Client] = []
        self._attempts: dict[Attempt, Client] = {}
        self._gone = trio.Event()
        self._told = ""
        self._sent_tokens = 0  # of requests sent here since the last question, which its answer cannot know of

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.state}, {len(self._attempts)} live>"

    @property
    def state(self) -> ReplicaState:
        """away, ready or draining."""
        if self.status is None or not self._clients:
            return "away"
        if self.status.state != "ready" or any(client.draining for client in self._clients):
            return "draining"
        return "ready"

    @property
    def live(self) -> int:
        """Requests of this router that are on it."""
        return len(self._attempts)

    @property
    def work_tokens(self) -> int:
        """Tokens that it still has to compute: as it said last, and what was sent to it since."""
        status = self.status
        return self._sent_tokens + (status.queued_tokens + status.running_tokens if status is not None else 0)

    @property
    def retry_after_ms(self) -> int | None:
        """When to try again, where it would refuse; None where it would not, as far as is known."""
        if self.status is not None and self.status.retry_after_ms is not None:
            return self.status.retry_after_ms
        return None if self._free_client() is not None else 500

    @property
    def kind(self) -> Kind | None:
        """Of what it is, or was when it was there last; None where it never was."""
        return None if self.hello is None else (self.hello.revision, self.hello.dtype)

    def begin(self, attempt: Attempt, *, tokens: int) -> None:
        """Send a request. Raises QueueFull where every connection has as many requests as the replica allows,
        and what `Client.begin` raises."""
        client = self._free_client()
        if client is None:
            raise QueueFull("every connection to the replica is full", retry_after_ms=500)
        client.begin(attempt)
        self._attempts[attempt] = client
        self._sent_tokens += tokens

    def done(self, attempt: Attempt) -> None:
        """The attempt has had its terminal frame."""
        self._attempts.pop(attempt, None)

    def cancel(self, attempt: Attempt) -> None:
        """Ask for the attempt's end; its terminal frame is still delivered."""
        self._attempts[attempt].cancel(attempt.request.id)

    def abandon(self, attempt: Attempt) -> None:
        """End the attempt; nothing more of it is delivered."""
        if (client := self._attempts.pop(attempt, None)) is not None:
            client.abandon(attempt.request.id)

    def failed(self, attempt: Attempt, error: WsbatchError) -> None:
        """The attempt's connection has ended, or the server broke the protocol on it."""
        client = self._attempts.get(attempt)
        if client is not None and isinstance(error, ConnectionLost):
            self._ended(client, str(error))
        elif self._attempts.pop(attempt, None) is not None:
            attempt.lost(str(error))

    async def run(self) -> None:
        """Keep the replica connected until `scope` is cancelled; lost, it is tried again after a growing pause."""
        pause_s = _FIRST_PAUSE_S
        with self.scope:
            try:
                while True:
                    try:
                        await self._hold()
                        pause_s = _FIRST_PAUSE_S
                    except (WsbatchError, OSError) as error:
                        self._tell(f"cannot be used: {error}")
                    # Spread, so that many routers do not come back as one.
                    await trio.sleep(pause_s * (1 + random.random()) / 2)
                    pause_s = min(self._config.reconnect_max_s, 2 * pause_s)
            finally:
                self._lose("the router let go of it")

    async def _hold(self) -> None:
        """From the first connection to the loss of the last. Raises where it never became ready."""
        async with self._dial() as first:
            self._admit(first.hello)
            status = await self._ask(first)
            self.hello = first.hello
            self._gone = trio.Event()
            self._clients.append(first)
            self._tell(f"is there: {first.hello.model} in {first.hello.dtype}", logging.INFO)
            self._heard(status)
            async with trio.open_nursery() as nursery:
                for _ in range(self._config.connections - 1):
                    nursery.start_soon(self._hold_another)
                nursery.start_soon(self._watch, first)
                nursery.start_soon(self._poll)
                await self._gone.wait()
                nursery.cancel_scope.cancel()

    async def _hold_another(self) -> None:
        try:
            async with self._dial() as client:
                await self._ask(client)  # a connection that has asked is told when its requests start
                self._clients.append(client)
                await self._watch(client)
        except (WsbatchError, OSError) as error:
            _logger.warning("replica %s: no further connection: %s", self.name, error)

    async def _watch(self, client: Client) -> None:
        self._ended(client, str(await client.wait_lost()))

    async def _poll(self) -> None:
        while self._clients:
            await trio.sleep(self._config.status_interval_ms / 1000)
            known_tokens = self._sent_tokens
            for client in self._clients[:1]:
                try:
                    status = await self._ask(client)
                except WsbatchError as error:
                    self._ended(client, str(error))
                else:
                    self._sent_tokens -= known_tokens
                    self._heard(status)

    async def _ask(self, client: Client) -> Status:
        """Raises ConnectionLost where it is silent or stalled."""
        stall_s = self._config.stall_s
        with trio.move_on_after(stall_s):
            status = await client.status()
            if status.step_ms > stall_s * 1000:
                raise ConnectionLost(f"a step of it has been running for {status.step_ms / 1000:.3g} s")
            return status
        raise ConnectionLost(f"it has been silent for {stall_s:g} s")

    def _heard(self, status: Status) -> None:
        self.status = status
        self._on_change(self)

    def _ended(self, client: Client, why: str) -> None:
        """The loss of one connection is the loss of all: what killed one will kill the others within the second.

        Only a replica that drains closes them one by one, each when its last request has ended.
        """
        if client not in self._clients:
            return
        if client.draining is None or len(self._clients) == 1:
            self._lose(why)
            return
        self._clients.remove(client)
        for attempt in [attempt for attempt, where in self._attempts.items() if where is client]:
            del self._attempts[attempt]
            attempt.lost(why)

    def _lose(self, why: str) -> None:
        if not self._clients:
            return
        attempts, self._attempts = self._attempts, {}
        self._clients = []
        self.status = None
        self._sent_tokens = 0
        self._gone.set()
        self._tell(f"is lost with {len(attempts)} requests: {why}")
        self._on_lost(self)
        for attempt, client in attempts.items():
            client.abandon(attempt.request.id)  # where it still lives, it need not go on
        for attempt in attempts:
            attempt.lost(why)

    def _tell(self, what: str, level: int = logging.WARNING) -> None:
        """Log it, once: a replica that stays away would say the same every few seconds."""
        if what != self._told:
            self._told = what
            _logger.log(level, "replica %s %s", self.name, what)

    def _free_client(self) -> Client | None:
        """The connection with the fewest requests; None where all have as many as the replica allows."""
        client = min(self._clients, key=lambda client: client.live, default=None)
        if client is None or client.live >= client.hello.limits.max_live_requests:
            return None
        return client
