"""The server: which tasks there are, in what order they start, and how they end."""

import ssl
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

import trio

from wsbatch.config import ServerConfig
from wsbatch.engine.interface import Engine, Mortal
from wsbatch.errors import Draining, RequestError
from wsbatch.nurseries import background_tasks
from wsbatch.server.accepting import addresses_of, local_host, open_listeners, tls_context
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Connection
from wsbatch.server.handshake import probe_refusal, readable_by
from wsbatch.server.http import Answer, Head, plain_answer
from wsbatch.server.memory import FreedMemory
from wsbatch.server.metrics import ServerMetrics
from wsbatch.server.page import page_answer
from wsbatch.server.session import Session
from wsbatch.server.tcp import RawStream
from wsbatch.server.transport import Transport
from wsbatch.wire import CODECS, SUBPROTOCOLS, WireLimits

# What a server that is told to stop at once, or is cancelled, takes to tell its clients.
_SHUTDOWN_S = 0.5
# A connection that drains stays open at least this long, for what was on its way when the client was told.
_LAST_WORDS_S = 0.5
_NAP_S = 0.005


async def serve(
    engine: Engine, config: ServerConfig, *, task_status: trio.TaskStatus["Server"] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve `engine` until `Server.drain` or `Server.shutdown` is done: `server = await nursery.start(serve, …)`.

    The port is bound at every host before the server is handed out. Raises OSError where it cannot be, ValueError for
    a certificate that cannot be loaded, and EngineDead when the engine has died (after every client was told).
    Cancelled, it tells its clients (1001) and ends within half a second.
    """
    tls = None if config.certfile is None else tls_context(config.certfile, config.keyfile)
    listeners = await open_listeners(config.hosts, config.port)
    probed: list[trio.SocketListener] = []
    if config.probe_port is not None:
        try:
            probed = await open_listeners(config.hosts, config.probe_port)
        except OSError:
            for listener in listeners:
                listener.socket.close()
            raise
    server = Server(engine, config, addresses=addresses_of(listeners), probe_addresses=addresses_of(probed), tls=tls)
    async with background_tasks() as nursery:
        nursery.start_soon(server.metrics.watch_loop)
        with server.deadlines.watching():
            await server.run(listeners, probed, task_status=task_status)


class Server:
    """One engine on one port.

    Attributes:
        addresses: (host, port) of every socket it listens on.
        probe_addresses: of those for probes alone.
        metrics: what it counts; `/metrics` shows the engine's as well.
        deadlines: for what clients have to do in time.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        addresses: list[tuple[str, int]],
        probe_addresses: Sequence[tuple[str, int]] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.addresses = addresses
        self.probe_addresses = list(probe_addresses)
        self.metrics = ServerMetrics()
        self.deadlines = ClientDeadlines()
        self._engine = engine
        self._config = config
        self._tls = tls is not None
        limits = WireLimits(max_message_bytes=config.max_message_bytes)
        self._codecs = {name: codec(limits) for name, codec in CODECS.items()}
        self._decoding = trio.Lock()
        self._memory = FreedMemory()
        self._sessions: set[Session] = set()
        self._transport = Transport(
            config,
            session=self._serve_session,
            plain=self._plain,
            probe=self._probe,
            refusal=self._refuse_connection,
            metrics=self.metrics,
            memory=self._memory,
            deadlines=self.deadlines,
            tls=tls,
        )
        self._scope = trio.CancelScope(shield=True)
        self._drain_by: float | None = None
        self._goodbyes_s = 0.0  # of the grace, kept for closing connections
        self._stopping = trio.Event()
        self._idle = trio.Event()
        self._done = trio.Event()

    def __repr__(self) -> str:
        return f"<Server {self.url}: {self._transport!r}>"

    @property
    def port(self) -> int:
        """The first port it listens on."""
        return self.addresses[0][1]

    @property
    def url(self) -> str:
        """Where a client on this machine finds it."""
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """The same for each of its addresses."""
        return [f"{'wss' if self._tls else 'ws'}://{local_host(host)}:{port}" for host, port in self.addresses]

    @property
    def held_input_bytes(self) -> int:
        """What clients' large messages take, arriving ones and those that are becoming requests."""
        return self._transport.budget.used_bytes

    def refusal(self) -> RequestError | None:
        """Why a connection made now would be refused: draining, dead, or full. None where it would be let in."""
        return self._stopped() or self._engine.refusal() or self._transport.full()

    def _refuse_connection(self) -> RequestError | None:
        return self._stopped() or self._engine.refuse_early() or self._transport.full()

    def _stopped(self) -> Draining | None:
        if self._stopping.is_set() and self._engine.state != "dead":
            return Draining("the server is shutting down", retry_after_ms=1000)
        return None

    async def drain(self, grace_s: float | None = None) -> None:
        """Admit nothing more, let live requests finish, end the rest, close: all of it within `grace_s` (`drain_s`).

        The end of the grace is for the goodbyes, which take half a second at least. Returns when `serve` is about to.
        Cancelling it does not stop the draining.
        """
        if self._drain_by is None:
            grace_s = self._config.drain_s if grace_s is None else grace_s
            self._drain_by = trio.current_time() + max(grace_s, _SHUTDOWN_S)
        self._stopping.set()
        await self._done.wait()

    def shutdown(self) -> None:
        """End at once: clients are told (1001), and have half a second."""
        for session in self._sessions:
            session.end(1001, "the server is shutting down", within_s=_SHUTDOWN_S)
        self._scope.deadline = min(self._scope.deadline, trio.current_time() + _SHUTDOWN_S)
        self._stopping.set()

    async def run(
        self,
        listeners: Sequence[trio.abc.Listener[RawStream]],
        probed: Sequence[trio.abc.Listener[RawStream]] = (),
        *,
        task_status: trio.TaskStatus["Server"] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve these listeners to the end, some for probes alone; see `serve`. Closes them."""
        transport = self._transport
        try:
            async with trio.open_nursery() as outer:
                # The connections are shielded, so that a cancelled server can still say goodbye; this task is not.
                outer.start_soon(self._shutdown_when_cancelled)
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._memory.run)
                        for handle, some in ((transport.handle, listeners), (transport.handle_probe, probed)):
                            if some:
                                accepting = [transport.accepting(listener) for listener in some]
                                await nursery.start(partial(trio.serve_listeners, handle, accepting))
                        task_status.started(self)
                        await self._until_stopped()
                        nursery.cancel_scope.cancel()
                outer.cancel_scope.cancel()
        finally:
            self._done.set()
        if isinstance(self._engine, Mortal) and self._engine.state == "dead":
            raise await self._engine.wait_dead()

    async def _until_stopped(self) -> None:
        """Wait for a reason to end, then see every session to its own end."""
        async with trio.open_nursery() as nursery:
            if isinstance(self._engine, Mortal):
                nursery.start_soon(self._stop_when_dead, self._engine)
            await self._stopping.wait()
            nursery.cancel_scope.cancel()
        if self._drain_by is not None:
            await self._drain(self._drain_by)
        code, reason = (1011, "the engine died") if self._engine.state == "dead" else (1001, "drained")
        for session in list(self._sessions):
            session.end(code, reason, within_s=inf)
        await self._until_idle_at_most(self._closing_s())
        for session in list(self._sessions):
            session.end(code, reason, within_s=0.0)
        await self._until_idle()

    async def _drain(self, by_s: float) -> None:
        """Let live requests finish, and end those that have not when there is just time left to close by `by_s`."""
        left_s = max(0.0, by_s - trio.current_time())
        # Of a short grace half, so that requests have some of it, too.
        closing_s = max(_SHUTDOWN_S, min(_LAST_WORDS_S + self._config.close_timeout_s, left_s / 2))
        grace_s = max(0.0, left_s - closing_s)
        for session in self._sessions:
            session.drain(deadline_ms=round(grace_s * 1000), open_s=_LAST_WORDS_S)
        last_words_s = min(_LAST_WORDS_S, closing_s / 2)
        self._goodbyes_s = closing_s - last_words_s
        # The engine keeps the grace itself; the second bound is for one that hangs.
        with trio.move_on_at(by_s - self._goodbyes_s):
            await self._engine.drain(grace_s)
            with trio.move_on_after(_LAST_WORDS_S):
                await self._until_idle()

    def _closing_s(self) -> float:
        """How long a connection may take to close, from now on: at least what was kept for that."""
        left_s = inf if self._drain_by is None else self._drain_by - trio.current_time()
        return min(self._config.close_timeout_s, max(left_s, self._goodbyes_s))

    async def _until_idle_at_most(self, at_most_s: float) -> None:
        """Wait so long for the sessions to end. Time in which the loop was held does not count, as long as frames go
        out: it is not the clients who are late."""
        left_s, sent = at_most_s - 2 * _NAP_S, -1
        while left_s > 0:
            napping_s = trio.current_time()
            with trio.move_on_after(_NAP_S):
                await self._until_idle()
                return
            held = trio.current_time() - napping_s >= 2 * _NAP_S
            before, sent = sent, sum(session.sent_frames for session in self._sessions)
            if not held or sent == before:
                left_s -= _NAP_S

    async def _until_idle(self) -> None:
        while self._sessions:
            self._idle = trio.Event()
            await self._idle.wait()

    async def _stop_when_dead(self, engine: Mortal) -> None:
        await engine.wait_dead()
        self._stopping.set()

    async def _shutdown_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.shutdown()

    async def _serve_session(self, connection: Connection) -> None:
        codec = self._codecs[connection.subprotocol or SUBPROTOCOLS[0]]
        session = Session(
            connection,
            self._engine,
            self._config,
            codec=codec,
            decoding=self._decoding,
            deadlines=self.deadlines,
            metrics=self.metrics,
        )
        self._sessions.add(session)
        if self._stopping.is_set():  # during its handshake
            session.end(1001, "the server is shutting down", within_s=self._closing_s())
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._idle.set()

    def _plain(self, head: Head) -> Answer:
        return page_answer(head) or self._probe(head)

    def _probe(self, head: Head) -> Answer:
        unready = probe_refusal(head, self._config) or self.refusal()
        answer = plain_answer(head, self._engine, self.metrics, unready=unready)
        if head.path == "/readyz":
            answer = replace(answer, headers=(*answer.headers, *readable_by(head, self._config)))
        return answer
