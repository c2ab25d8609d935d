"""One open connection of a client: a reader that dispatches by id, one writer, a keepalive.

`open` runs the three tasks; a caller's task only queues what is to be sent and waits for what has come.
"""

import itertools
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

import trio
import trio_websocket

from wsbatch.client.dial import MAX_ANSWER_BYTES
from wsbatch.client.errors import ProtocolError, error_of, how_closed
from wsbatch.client.progress import OTHER_FRAME_BYTES, Progress, most_answer_bytes, read_frame
from wsbatch.client.request import GenerateParams, Prompt, build_request
from wsbatch.client.stream import Completion, Jitter, Sink, TokenStream
from wsbatch.client.watch import BatchWatch
from wsbatch.errors import BadRequest, ConnectionLost, RequestError, TooLarge
from wsbatch.messages import (
    Accepted,
    BatchSnapshot,
    Cancel,
    DrainingNotice,
    Failed,
    Finished,
    GetStatus,
    Hello,
    RequestId,
    ServerMessage,
    Started,
    Status,
    Tokens,
    Unwatch,
    Watch,
)
from wsbatch.wire import Codec, DecodeError

_MAX_STATUSES = 16


class Client:
    """An open connection; made by `connect`.

    Attributes:
        hello: what the server said of itself: model, limits, state.
        draining: set once the server has said that it is shutting down.
        heard_s: when the last message came, in seconds on trio's clock.
        close_code: with which the server closed; None while it has not, and where the connection broke.
    """

    def __init__(
        self,
        websocket: trio_websocket.WebSocketConnection,
        stream: trio.abc.Stream,
        *,
        codec: Codec,
        hello: Hello,
        jitter: Jitter,
    ) -> None:
        self.hello = hello
        self.draining: DrainingNotice | None = None
        self.close_code: int | None = None
        self._websocket = websocket
        self._stream = stream
        self._codec = codec
        self._jitter = jitter
        self._ids = itertools.count(1)
        self._streams: dict[RequestId, tuple[Sink, Progress]] = {}
        self._watch: BatchWatch | None = None
        # Answers that are still to be taken, in the order of the questions. A server may send more than was asked for.
        self._statuses: deque[Status] = deque(maxlen=_MAX_STATUSES)
        self._status_came = trio.Event()
        self._ended = trio.Event()
        self._lost: str | None = None
        self._refusal: RequestError | None = None  # what the server said of the connection as a whole
        self.heard_s = trio.current_time()
        # Of a frame. Decoded it takes up to a hundred times as much, so it may be no larger than what was asked for.
        self._most_bytes = OTHER_FRAME_BYTES
        # One task writes: a cancelled write leaves half a frame behind, so no task of the user's may do it.
        self._outgoing, self._unsent = trio.open_memory_channel[bytes | str](math.inf)
        self._closed = trio.Event()

    def __repr__(self) -> str:
        state = "open" if self._lost is None else "closed"
        return f"<Client of {self.hello.server} {self.hello.model!r}, {state}, {len(self._streams)} live>"

    @asynccontextmanager
    async def generate(
        self, prompt: Prompt, *, retries: int = 0, **params: Unpack[GenerateParams]
    ) -> AsyncIterator[TokenStream]:
        """Send a request; the stream of its events. Leaving the block before its end cancels it on the server.

        Args:
            prompt: text, token ids, messages, or a whole GenerateRequest (whose id is replaced).
            retries: how often a refusal that says when to retry is retried, before the first token.

        Does not wait; iterating does. Raises ConnectionLost, BadRequest for values that have no form on the wire,
        TooLarge for a message over the server's limit, TypeError for an unknown parameter or a value of another type.
        """
        stream = TokenStream(build_request(prompt, params), begin=self.begin, retries=retries, jitter=self._jitter)
        self.begin(stream)
        try:
            yield stream
        finally:
            self.abandon(stream.request.id)

    async def complete(self, prompt: Prompt, *, retries: int = 0, **params: Unpack[GenerateParams]) -> Completion:
        """Wait for the whole output. Raises what iterating would; cancelled, it cancels the request."""
        async with self.generate(prompt, retries=retries, **params) as stream:
            return await stream.completion()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[BatchWatch]:
        """The live batch, as an iterator of `BatchSnapshot`s: at most ten a second, while something happens.

        Does not wait; iterating does. Raises BadRequest where the server does not allow it (`hello.watch`),
        RuntimeError where this connection watches already, ConnectionLost.
        """
        if not self.hello.watch:
            raise BadRequest("this server does not let its batch be watched: it was started without --allow-watch")
        if self._watch is not None:
            raise RuntimeError("this connection watches already")
        if self._lost is not None:
            raise self._connection_lost()
        watch = self._watch = BatchWatch()
        self._most_bytes = MAX_ANSWER_BYTES
        self._outgoing.send_nowait(self._codec.encode_client(Watch()))
        try:
            yield watch
        finally:
            self._watch = None
            if self._lost is None:
                self._outgoing.send_nowait(self._codec.encode_client(Unwatch()))

    @property
    def live(self) -> int:
        """Requests whose terminal frame is still to come."""
        return len(self._streams)

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return self._lost is not None

    async def status(self) -> Status:
        """How much work the server has. Waits for its answer; one call at a time. Raises ConnectionLost."""
        if self._lost is not None:
            raise self._connection_lost()
        self._statuses.clear()  # answers to questions that were given up
        self._outgoing.send_nowait(self._codec.encode_client(GetStatus()))
        while not self._statuses:
            if self._lost is not None:
                raise self._connection_lost()
            self._status_came = trio.Event()
            await self._status_came.wait()
        return self._statuses.popleft()

    async def wait_lost(self) -> ConnectionLost:
        """Wait until the connection has ended; returns why."""
        await self._ended.wait()
        return self._connection_lost()

    def begin(self, stream: Sink) -> None:
        """Send a request, and deliver its events to `stream`: what `generate` does, for whoever wants no task for it.

        Raises what `generate` raises.
        """
        if self._lost is not None:
            raise self._connection_lost()
        stream.start(next(self._ids))
        data = self._codec.encode_client(stream.request)
        most = self.hello.limits.max_message_bytes
        size = len(data) if isinstance(data, bytes) else len(data.encode())
        if size > most:
            # The server would close the connection over it, and with it every other stream.
            raise TooLarge(f"the request has {size} bytes, the server takes {most}")
        self._streams[stream.request.id] = stream, Progress(stream.request)
        self._most_bytes = max(self._most_bytes, min(MAX_ANSWER_BYTES, most_answer_bytes(stream.request)))
        self._outgoing.send_nowait(data)

    def cancel(self, id: RequestId) -> None:
        """Ask the server to end this request; its terminal frame is still delivered."""
        if id in self._streams and self._lost is None:
            self._outgoing.send_nowait(self._codec.encode_client(Cancel(id)))

    def abandon(self, id: RequestId) -> None:
        """Ask the server to end this request, if it is live; nothing more of it is delivered."""
        if self._streams.pop(id, None) is not None and self._lost is None:
            self._outgoing.send_nowait(self._codec.encode_client(Cancel(id)))

    def _connection_lost(self) -> ConnectionLost:
        error = ConnectionLost(f"{self._lost}{f': {self._refusal}' if self._refusal is not None else ''}")
        error.__cause__ = self._refusal
        return error

    def _lose(self, why: str, close_code: int | None = None) -> None:
        """The connection has ended, or must: say so to every stream, once."""
        if self._lost is None:
            self._lost = why
            self.close_code = close_code
            self._outgoing.close()
            self._ended.set()
            self._status_came.set()
            streams, self._streams = self._streams, {}
            for stream, _ in streams.values():
                stream.fail(self._connection_lost())
            if self._watch is not None:
                self._watch.fail(self._connection_lost())

    async def receive(self) -> None:
        """Dispatch until the connection ends. Never waits for a consumer: a reader that stops sees no pings."""
        try:
            while True:
                data = await self._websocket.get_message()
                self.heard_s = trio.current_time()
                message = read_frame(self._codec, data, self._most_bytes)
                if message is not None:
                    self._dispatch(message)
        except trio_websocket.ConnectionClosed as exc:
            self._lose(*how_closed(exc))
        except DecodeError as exc:
            self._lose(f"the server sent a frame that cannot be read: {exc}")
        except ProtocolError as exc:
            self._lose(str(exc))

    def _dispatch(self, message: ServerMessage) -> None:
        match message:
            case Failed(id=None):
                self._refusal = error_of(message)
            case Tokens(id=id) | Accepted(id=id) | Started(id=id) | Finished(id=id) | Failed(id=int(id) | str(id)):
                if id not in self._streams:  # left before its end
                    return
                stream, progress = self._streams[id]
                if isinstance(message, Finished | Failed):
                    del self._streams[id]
                try:
                    progress.check(message)
                    stream.deliver(message)
                except ProtocolError as exc:
                    stream.fail(exc)
                    self.abandon(id)
            case DrainingNotice():
                self.draining = message
            case Status():
                self._statuses.append(message)
                self._status_came.set()
            case BatchSnapshot() if self._watch is not None:
                self._watch.deliver(message)

    async def transmit(self) -> None:
        """Write what is queued, in order; once nothing more will be, close."""
        try:
            async for data in self._unsent:
                await self._websocket.send_message(data)
            await self._websocket.aclose()
        except trio_websocket.ConnectionClosed as exc:
            self._lose(*how_closed(exc))
        finally:
            self._closed.set()

    async def keep_alive(self, silence_s: float) -> None:
        """Ping a silent server; give the connection up where it stays silent. Any message counts as life."""
        while self._lost is None:
            await trio.sleep_until(self.heard_s + silence_s)
            heard_s = self.heard_s
            if trio.current_time() < heard_s + silence_s:
                continue
            try:
                # ping() waits for the pong, and does not wake when the connection dies.
                with trio.move_on_after(silence_s):
                    await self._websocket.ping()
                    self.heard_s = trio.current_time()
            except trio_websocket.ConnectionClosed:
                return
            if self.heard_s == heard_s:
                self._lose(f"the server has been silent for {2 * silence_s:g} s")
                # The ping may be half written: nothing more can be said on this connection.
                await trio.aclose_forcefully(self._stream)

    async def close(self, timeout_s: float) -> None:
        self._lose("this client was closed")
        # Also when cancelled: a server that is told so need not find out.
        with trio.move_on_after(timeout_s, shield=True):
            await self._closed.wait()
