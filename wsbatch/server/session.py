"""One connection: a reader that never stops reading, and a single writer that merges what it could not yet send."""

import sys
from collections import deque
from contextlib import suppress
from math import inf

import trio

from wsbatch import __version__
from wsbatch.batching.fairness import Client
from wsbatch.config import ServerConfig
from wsbatch.engine.interface import Engine
from wsbatch.engine.stream import Stream
from wsbatch.errors import BadRequest, DuplicateId, QuotaExceeded, RequestError
from wsbatch.messages import (
    Accepted,
    BatchReport,
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
from wsbatch.server.wake import Wake
from wsbatch.server.watch import WatchPacer
from wsbatch.wire import PROTOCOL_VERSION, Codec, DecodeError, Message

# Answers (errors, pongs) that a client may leave unread before it is taken for a flood.
MAX_BACKLOG = 1024
_NO_BATCH = BatchReport(0, 0.0, 0, 0, 0.0)


class _Live:
    """One request of this connection, from its frame to its terminal event."""

    __slots__ = ("cancelled", "stream", "submitting")

    def __init__(self) -> None:
        self.stream: Stream | None = None  # None while the engine is still deciding
        self.submitting = trio.CancelScope()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.stream is not None:
            self.stream.cancel()
        else:
            self.submitting.cancel()


class Session:
    """The requests of one connection.

    The reader only ever decodes and decides; whatever takes time runs in a task of its own. The writer alone sends:
    streams that have something wait in `_ready`, in turn, and what a stream gathers meanwhile goes out as one frame.

    Args:
        decoding: held while a message is decoded that takes more than one step: shared by the sessions of a server, so
            that the event loop does one such step a turn, and there is one half-built message at a time.
        deadlines: for what the client has to read in time.

    Attributes:
        sent_frames: written so far.
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
    ) -> None:
        self.sent_frames = 0
        self._connection = connection
        self._engine = engine
        self._config = config
        self._codec = codec
        self._client = Client(connection.peer, object())  # not the session: that would be a cycle
        self._decoding = decoding or trio.Lock()
        self._deadlines = deadlines or ClientDeadlines()
        self._live: dict[RequestId, _Live] = {}
        self._answers: deque[ServerMessage] = deque([self._hello()])  # frames of no stream; they go first
        self._ready: dict[Stream, None] = {}  # insertion order is the order of turns
        self._tells_starts = False
        self._wake = Wake()
        self._watch = WatchPacer(engine, wake=self._wake.set)  # not itself: a cycle would outlive the connection
        self._writing = trio.CancelScope()
        self._closing: tuple[int, str] | None = None
        self._open_until_s = -inf
        self._end_by = inf
        self._parting = False  # the writer is in the closing handshake, during which nothing can be received
        self._deaf = False  # nothing that arrives is acted on any more

    def __repr__(self) -> str:
        return f"<Session {len(self._live)} live, {len(self._ready)} ready, {self.backlog} answers unsent>"

    @property
    def backlog(self) -> int:
        """Answers that no stream sends (errors, pongs) and the client has not read."""
        return len(self._answers)

    async def run(self) -> None:
        """Serve the connection until either side ends it. Leaves no live request and no open connection behind."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, nursery.cancel_scope)
                await self._read(nursery)
                # At once, not when the tasks have unwound: nobody reads these streams any more.
                self._cancel_live()
                if not self._parting:
                    nursery.cancel_scope.cancel()
        finally:
            self._watch.stop()
            self._cancel_live()
            self._live.clear()  # their streams hold this session
            self._ready.clear()

    def drain(self, deadline_ms: int, *, open_s: float) -> None:
        """Tell the client, and close (1001) once its live requests have ended.

        The connection stays open for `open_s` in any case: a request that the client sent before it had read the
        notice is refused by an `error` frame then, and not lost.
        """
        self._answer(DrainingNotice(deadline_ms))
        if self._closing is None:
            self._closing = (1001, "drained")
            self._open_until_s = trio.current_time() + open_s
            self._wake.set()

    def end(self, code: int, reason: str, *, within_s: float) -> None:
        """Cancel what is live, write what is left and close; after `within_s` abort."""
        self._deaf = True
        self._open_until_s = -inf
        if self._closing is None or (self._closing[0] == 1001 and code != 1001):
            self._closing = (code, reason)
        self._end_by = min(self._end_by, trio.current_time() + within_s)
        self._writing.deadline = min(self._writing.deadline, self._end_by)
        self._cancel_live()
        self._wake.set()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Until the connection ends. Also when nothing is acted on any more: unread data would hide its end."""
        while True:
            try:
                received = await self._connection.receive()
            except Disconnected:
                return
            if self._deaf or self._turn_away(received.data):
                received.release()
                continue
            message: ClientMessage | None = None
            try:
                message = await self._decode(received.data)
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

    async def _decode(self, data: Message) -> ClientMessage:
        steps = self._codec.decoding(data)
        try:
            next(steps)
            async with self._decoding:
                while True:
                    next(steps)
                    await trio.lowlevel.checkpoint()
        except StopIteration as done:
            message: ClientMessage = done.value
            return message

    def _turn_away(self, data: Message) -> bool:
        """Refuse a `generate` unread, where the engine is full: whether that was done.

        So a refusal costs a small part of a request, and those who are too many take little from those who are served.
        """
        if not self._engine.full or (glance := self._codec.glance(data)) is None:
            return False
        id, priority = glance
        # What this client alone has done wrong, the long way tells.
        if id in self._live or len(self._live) >= self._config.max_live_requests:
            return False
        if (refusal := self._engine.turn_away(self._client, priority)) is None:
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
            live = self._live[request.id] = _Live()
            # In a task: a long prompt is tokenized meanwhile, and its cancel or the disconnect must be seen.
            if received.share is not None:
                received.share.resize(_held_bytes(request))
            nursery.start_soon(self._submit, request, live, received)
            return
        received.release()

    async def _submit(self, request: GenerateRequest, live: _Live, received: Received) -> None:
        try:
            with live.submitting:
                live.stream = await self._engine.submit(
                    request, client=self._client, on_event=self._on_event, checked=True
                )
        except RequestError as error:
            del self._live[request.id]
            self._answer(_failed(request.id, error))
            return
        finally:
            received.release()
        if live.stream is None:  # cancelled before the engine had decided
            del self._live[request.id]
            self._answer(Accepted(request.id, 0, 0, request.sampling.seed or 0))
            self._answer(Finished(request.id, "cancelled", "", Usage(0, 0), Timing(0, 0, 0, 0), _NO_BATCH))
            return
        live.stream.tell_start = self._tells_starts
        if live.cancelled:
            live.stream.cancel()

    def _on_event(self, stream: Stream) -> None:
        self._ready[stream] = None
        self._wake.set()

    def _refuse(self, id: RequestId | None, error: RequestError) -> None:
        self._engine.metrics.count_refused(error.code)
        self._answer(_failed(id, error))

    def _answer(self, message: ServerMessage) -> None:
        if len(self._answers) >= MAX_BACKLOG:
            self.end(1008, "too many answers left unread", within_s=self._config.close_timeout_s)
            return
        self._answers.append(message)
        self._wake.set()

    def _cancel_live(self) -> None:
        for live in list(self._live.values()):
            live.cancel()

    async def _write(self, session: trio.CancelScope) -> None:
        """Send until the session closes, then close; abort where a frame cannot be sent in time."""
        # One scope whose deadline moves: a scope a frame would cost a tenth of the frame.
        with self._writing, self._deadlines.includes(self._writing), suppress(Disconnected):
            code, reason = await self._write_all()
            self._parting = True
            await self._connection.close(code, reason)
        if self._writing.cancelled_caught:
            # Half a frame may be on the wire: nothing more can be said on this connection.
            await self._connection.abort()
        session.cancel()

    async def _write_all(self) -> tuple[int, str]:
        """Returns how to close, once all is written that was to be."""
        while True:
            while self._answers or self._ready or self._watch.due:
                if self._answers:
                    await self._send(self._answers.popleft())
                    continue
                if self._watch.due:  # at its own pace, so that neither it nor the streams can starve the other
                    await self._send(self._watch.take())
                    if not self._ready:
                        continue
                stream = next(iter(self._ready))
                del self._ready[stream]
                events = stream.take()
                if events and isinstance(events[-1], Finished | Failed):
                    # Before it is sent: the client may use the id again the moment it has read this.
                    del self._live[stream.request.id]
                for event in events:
                    await self._send(event)
            self._writing.deadline = self._end_by
            if self._closing is not None and not self._live:
                if trio.current_time() >= self._open_until_s:
                    return self._closing
                with trio.move_on_at(self._open_until_s):
                    await self._wake.wait()
                continue
            sent_s = trio.current_time()
            await self._wake.wait()
            # A frame costs some 50 µs, however many tokens are in it: what comes in quick succession is merged. Steps
            # of a real model take longer than this interval, and are not held back.
            early_s = sent_s + self._config.frame_interval_ms / 1000 - trio.current_time()
            # Sleeping costs a third of a frame, also when it is for no time at all; and answers are not merged.
            if early_s > 0 and not self._answers:
                await trio.sleep(early_s)

    async def _send(self, message: ServerMessage) -> None:
        pieces = self._codec.encoding(message)
        piece = next(pieces)
        for following in pieces:
            await self._send_piece(piece, last=False)
            piece = following
        await self._send_piece(piece, last=True)
        self.sent_frames += 1

    async def _send_piece(self, piece: bytes | str, *, last: bool) -> None:
        self._writing.deadline = min(trio.current_time() + self._config.send_timeout_s, self._end_by)
        await self._connection.send(piece, last=last)

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


def _held_bytes(request: GenerateRequest) -> int:
    """What its prompt takes, about: of an id, the pointer and the integer."""
    texts = [request.prompt or "", *(message.content for message in request.messages or ())]
    ids = len(request.token_ids or ()) + len(request.resume_token_ids)
    return sum(map(sys.getsizeof, texts)) + 36 * ids


def _failed(id: RequestId | None, error: RequestError) -> Failed:
    return Failed(id, error.code, error.status, error.message, error.retry_after_ms)
