"""One connection: its requests. `Reader` receives, `Writer` sends, `Ending` says until when."""

import trio

from wsbatch import __version__
from wsbatch.batching.fairness import Client
from wsbatch.config import ServerConfig
from wsbatch.engine.interface import Engine
from wsbatch.errors import BadRequest, DuplicateId, QuotaExceeded, RequestError
from wsbatch.messages import (
    NO_BATCH,
    Accepted,
    Cancel,
    ClientMessage,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    GetStatus,
    Hello,
    Limits,
    Ping,
    Pong,
    RequestId,
    ServerMessage,
    Timing,
    Unwatch,
    Usage,
    Watch,
)
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Connection, Disconnected, Received
from wsbatch.server.ending import Ending, Phase
from wsbatch.server.metrics import ServerMetrics
from wsbatch.server.reader import Reader
from wsbatch.server.request import SessionRequest, held_bytes
from wsbatch.server.wake import Wake
from wsbatch.server.watch import WatchPacer
from wsbatch.server.writer import Writer
from wsbatch.wire import PROTOCOL_VERSION, Codec, DecodeError

# Answers (errors, pongs) that a client may leave unread before it is taken for a flood.
MAX_BACKLOG = 1024


class Session:
    """The requests of one connection.

    It reads all the time: what its `Reader` gives is decided upon at once, and whatever takes time runs in a task of
    its own. The `Writer` alone sends, and the `Ending` says when that is over.

    Args:
        decoding: see `Reader`.
        deadlines: for what the client has to read in time.
        metrics: what is refused here is counted there.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        config: ServerConfig,
        *,
        codec: Codec,
        decoding: trio.Lock | None = None,
        deadlines: ClientDeadlines | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._codec = codec
        self._client = Client(connection.peer, object())  # not the session: that would be a cycle
        self._metrics = metrics or ServerMetrics()
        self._reader = Reader(connection, codec, decoding or trio.Lock())
        self._live: dict[RequestId, SessionRequest] = {}
        self._tells_starts = False
        wake = Wake()
        self._watch = WatchPacer(engine, wake=wake.set)  # not itself: a cycle would outlive the connection
        self._ending = Ending()
        self._writer = Writer(
            connection,
            codec,
            config,
            deadlines=deadlines or ClientDeadlines(),
            ending=self._ending,
            live=self._live,
            watch=self._watch,
            wake=wake,
        )
        self._writer.answer(self._hello())

    def __repr__(self) -> str:
        return f"<Session {len(self._live)} live, {self._ending!r}, {self._writer!r}>"

    @property
    def sent_frames(self) -> int:
        """Written so far."""
        return self._writer.sent_frames

    @property
    def backlog(self) -> int:
        """See `Writer.backlog`."""
        return self._writer.backlog

    async def run(self) -> None:
        """Serve the connection until either side ends it. Leaves no live request and no open connection behind."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                await self._read(nursery)
                # At once, not when the tasks have unwound: nobody reads these streams any more.
                self._cancel_live()
                if self._ending.phase is not Phase.CLOSING:
                    nursery.cancel_scope.cancel()
        finally:
            self._watch.stop()
            self._cancel_live()
            self._live.clear()  # their streams hold the writer
            self._writer.clear()

    def drain(self, deadline_ms: int, *, open_s: float) -> None:
        """Tell the client, and close (1001) once its live requests have ended.

        The connection stays open for `open_s` in any case: a request that the client sent before it had read the
        notice is refused by an `error` frame then, and not lost.
        """
        self._answer(DrainingNotice(deadline_ms))
        self._ending.drain(trio.current_time() + open_s)
        self._writer.hurry()

    def end(self, code: int, reason: str, *, within_s: float) -> None:
        """Cancel what is live, write what is left and close; after `within_s` abort."""
        self._ending.end(code, reason, trio.current_time() + within_s)
        self._cancel_live()
        self._writer.hurry()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Until the connection ends. Also when nothing is acted on any more: unread data would hide its end."""
        while True:
            try:
                received = await self._reader.receive()
            except Disconnected:
                return
            if self._ending.deaf or self._refuse_early(received):
                received.release()
                continue
            message: ClientMessage | None = None
            try:
                message = await self._reader.decode(received)
            except DecodeError as problem:
                self._undecodable(problem)
            except BaseException:
                received.release()
                raise
            if isinstance(message, GenerateRequest):
                self._generate(message, received, nursery)
                continue
            received.release()
            if message is not None:
                self._act(message, nursery)

    def _act(self, message: ClientMessage, nursery: trio.Nursery) -> None:
        """What is answered at once."""
        match message:
            case Cancel(id=id):
                if id in self._live:
                    self._live[id].cancel()
            case Ping(nonce=nonce):
                self._answer(Pong(nonce))
            case GetStatus():
                self._tells_starts = True
                self._answer(self._engine.status())
            case Watch() if self._config.allow_watch:
                self._watch.start(nursery)
            case Watch():
                self._refuse(None, BadRequest("watch: this server does not let its batch be watched (allow_watch)"))
            case Unwatch():
                self._watch.stop()

    def _refuse_early(self, received: Received) -> bool:
        """Refuse a `generate` unread, where the engine is full: whether that was done.

        So a refusal costs a small part of a request, and those who are too many take little from those who are served.
        """
        if not self._engine.full or (glance := self._reader.glance(received)) is None:
            return False
        id, priority = glance
        # What this client alone has done wrong, the long way tells.
        if id in self._live or len(self._live) >= self._config.max_live_requests:
            return False
        if (refusal := self._engine.refuse_early(self._client, priority)) is None:
            return False
        self._refuse(id, refusal)
        return True

    def _undecodable(self, problem: DecodeError) -> None:
        error = problem.error
        if problem.id is not None and problem.id in self._live:
            # An error of its own code would read as the end of the live request.
            error = DuplicateId(f"id {problem.id!r} is live; and {error.message}")
        self._refuse(problem.id, error)
        if problem.fatal:
            self.end(error.close_code, error.message, within_s=self._config.close_timeout_s)

    def _generate(self, request: GenerateRequest, received: Received, nursery: trio.Nursery) -> None:
        if request.id in self._live:
            self._refuse(request.id, DuplicateId(f"id {request.id!r} is live on this connection"))
        elif len(self._live) >= (most := self._config.max_live_requests):
            self._refuse(request.id, QuotaExceeded(f"{most} requests are live on this connection, the most allowed"))
        else:
            live = self._live[request.id] = SessionRequest()
            # In a task: a long prompt is tokenized meanwhile, and its cancel or the disconnect must be seen.
            if received.share is not None:
                received.share.resize(held_bytes(request))
            nursery.start_soon(self._submit, request, live, received)
            return
        received.release()

    async def _submit(self, request: GenerateRequest, live: SessionRequest, received: Received) -> None:
        try:
            with live.submitting:
                live.stream = await self._engine.submit(
                    request, client=self._client, on_event=self._writer.add, checked=True
                )
        except RequestError as error:
            del self._live[request.id]
            self._answer(Failed.of(request.id, error))
            return
        finally:
            received.release()
        if live.stream is None:  # cancelled before the engine had decided
            del self._live[request.id]
            self._answer(Accepted(request.id, 0, 0, request.sampling.seed or 0))
            self._answer(Finished(request.id, "cancelled", "", Usage(0, 0), Timing(0, 0, 0, 0), NO_BATCH))
            return
        live.stream.tell_start = self._tells_starts
        if live.cancelled:
            live.stream.cancel()

    def _refuse(self, id: RequestId | None, error: RequestError) -> None:
        self._metrics.count_refused(error.code)
        self._answer(Failed.of(id, error))

    def _answer(self, message: ServerMessage) -> None:
        if self.backlog >= MAX_BACKLOG:
            self.end(1008, "too many answers left unread", within_s=self._config.close_timeout_s)
            return
        self._writer.answer(message)

    def _cancel_live(self) -> None:
        for live in list(self._live.values()):
            live.cancel()

    async def _write(self, session: trio.CancelScope) -> None:
        await self._writer.run()
        session.cancel()

    def _hello(self) -> Hello:
        info = self._engine.info
        limits = Limits(
            max_model_len=info.max_model_len,
            max_message_bytes=self._config.max_message_bytes,
            max_live_requests=self._config.max_live_requests,
            max_logprobs=self._codec.limits.max_logprobs,
        )
        return Hello(
            PROTOCOL_VERSION,
            info.name,
            f"wsbatch/{__version__}",
            limits,
            self._engine.state,
            watch=self._config.allow_watch,
            revision=info.revision,
            dtype=info.dtype,
        )
