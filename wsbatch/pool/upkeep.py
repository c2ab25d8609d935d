"""Keeps a replica connected: a probe, which carries questions about its work alone, and the connections for requests.

A probe's answer on a connection of its own waits behind nobody's tokens. Whatever goes wrong here, be it an exception
that nobody expected, ends this replica's connections, which are then made anew, and nothing else.
"""

import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import trio

from wsbatch.client import Client
from wsbatch.client.errors import ProtocolError, printable
from wsbatch.config import PoolConfig
from wsbatch.errors import ConnectionLost, WsbatchError
from wsbatch.messages import Hello, Status
from wsbatch.nurseries import first_error
from wsbatch.pool.loop_clock import LoopClock
from wsbatch.pool.replica import Replica

_logger = logging.getLogger("wsbatch.pool")

_FIRST_PAUSE_S = 0.1
_WHILE_S = 1.0  # a replica that was there for so long is tried again soon
_LOOK_S = 1.0
_DOUBT_S = 1.0  # for a replica to say that it lives, when a connection to it has ended

Dial: TypeAlias = Callable[[], AbstractAsyncContextManager[Client]]
"""Opens one connection to a replica: `lambda: connect(url)`."""


class Upkeep:
    """The tasks of one replica.

    Args:
        replica: is told of all that happens.
        dial: opens one connection.
        config: how many connections, how often to ask, when to give up.
        clock: silences are measured on it.
        admit: raises WsbatchError for a server that does not belong here, by its hello.
    """

    def __init__(
        self,
        replica: Replica,
        dial: Dial,
        config: PoolConfig,
        *,
        clock: LoopClock,
        admit: Callable[[Hello], None],
    ) -> None:
        self._replica = replica
        self._dial = dial
        self._config = config
        self._clock = clock
        self._admit = admit

    async def run(self) -> None:
        """Keep the replica connected until its `scope` is cancelled; lost, it is tried again after a growing pause."""
        pauses = _Backoff(self._config.reconnect_max_s)
        with self._replica.scope:
            try:
                while True:
                    began_s = trio.current_time()
                    try:
                        await self._keep()
                    except* (WsbatchError, OSError) as errors:
                        self._replica.tell(f"cannot be used: {first_error(errors)}")
                    except* Exception:
                        _logger.exception("replica %s: an unexpected error", self._replica.name)
                    self._replica.lose("its connections ended")
                    if trio.current_time() - began_s >= _WHILE_S:
                        pauses.restart()
                    await pauses.sleep()
            finally:
                self._replica.lose("the router let go of it")

    async def _keep(self) -> None:
        """From the first connection to the loss of the replica. Raises where it never became ready."""
        async with self._dial() as probe:
            self._admit(probe.hello)
            status = await self._ask(probe)
            self._replica.joined(probe, status)
            async with trio.open_nursery() as nursery:
                for _ in range(self._config.connections):
                    nursery.start_soon(self._keep_connection)
                nursery.start_soon(self._watch_probe, probe)
                nursery.start_soon(self._poll, probe)
                nursery.start_soon(self._watch_silence, probe)
                await self._replica.gone.wait()
                nursery.cancel_scope.cancel()

    async def _keep_connection(self) -> None:
        """A connection for requests, made anew when it has ended, until the replica drains."""
        pauses = _Backoff(self._config.reconnect_max_s)
        told = ""
        while not self._replica.draining:
            try:
                async with self._dial() as client:
                    self._check_same(client.hello)
                    await self._ask(client)  # a connection that has asked is told when its requests start
                    self._replica.connected(client)
                    pauses.restart()
                    self._replica.disconnected(client, str(await client.wait_lost()))
            except (WsbatchError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    _logger.warning("replica %s: no further connection: %s", self._replica.name, printable(told))
            await pauses.sleep()

    def _check_same(self, hello: Hello) -> None:
        """It may have been replaced by another server since its probe was connected."""
        known = self._replica.hello
        if known is None or (hello.model, hello.revision, hello.dtype) != (known.model, known.revision, known.dtype):
            self._replica.lose("another server answers in its place")
            raise ProtocolError(f"another server answers in its place: {hello.model} {hello.revision} {hello.dtype}")

    async def _watch_probe(self, probe: Client) -> None:
        why = await probe.wait_lost()
        # One that drains closes connections without requests first.
        if not (self._replica.draining and self._replica.clients):
            self._replica.lose(str(why))

    async def _poll(self, probe: Client) -> None:
        replica = self._replica
        while True:
            with trio.move_on_after(self._config.status_interval_ms / 1000):
                await replica.in_doubt.wait()
            replica.in_doubt = trio.Event()
            known_tokens, stranded = replica.sent_tokens, list(replica.stranded)
            try:
                status = await probe.status()
                self._check_step(status)
            except ConnectionLost as error:
                if not probe.lost:
                    replica.lose(str(error))
                return
            replica.update_status(status, known_tokens=known_tokens)
            replica.release_connections(stranded)

    async def _watch_silence(self, probe: Client) -> None:
        """Any message, on any connection, is a sign of life."""
        stall_s = self._config.stall_s
        heard_s, since_s = 0.0, self._clock.now_s()
        while True:
            await trio.sleep(min(_LOOK_S, stall_s / 4))
            late_s = self._clock.now_s() - _DOUBT_S
            late = [client for client, since_s in self._replica.stranded.items() if since_s <= late_s]
            self._replica.release_connections(late, alive=False)
            last_s = max(client.heard_s for client in (probe, *self._replica.clients))
            if last_s != heard_s:
                heard_s, since_s = last_s, self._clock.now_s()
            elif self._clock.now_s() - since_s >= stall_s:
                self._replica.lose(f"it has been silent for {stall_s:g} s")

    async def _ask(self, client: Client) -> Status:
        """Raises ConnectionLost where it is silent or stalled."""
        with trio.move_on_after(self._config.stall_s):
            status = await client.status()
            self._check_step(status)
            return status
        raise ConnectionLost(f"it has been silent for {self._config.stall_s:g} s")

    def _check_step(self, status: Status) -> None:
        if status.step_ms > self._config.stall_s * 1000:
            raise ConnectionLost(f"a step of it has been running for {status.step_ms / 1000:.3g} s")


class _Backoff:
    """Pauses between attempts at a connection, each twice as long as the one before."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = _FIRST_PAUSE_S

    def restart(self) -> None:
        """The next one is short."""
        self._next_s = _FIRST_PAUSE_S

    async def sleep(self) -> None:
        # Spread, so that many routers do not come back as one.
        await trio.sleep(self._next_s * (1 + random.random()) / 2)
        self._next_s = min(self._longest_s, 2 * self._next_s)
