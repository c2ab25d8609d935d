"""The one task that sends on a connection: what is to be sent, in turn, and at which pace."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from math import inf

import trio

from wsbatch.config import ServerConfig
from wsbatch.engine.stream import Stream
from wsbatch.messages import Failed, Finished, RequestId, ServerMessage
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Connection, Disconnected
from wsbatch.server.ending import Ending
from wsbatch.server.request import SessionRequest
from wsbatch.server.wake import Wake
from wsbatch.server.watch import WatchPacer
from wsbatch.wire import Codec


class Writer:
    """Sends answers, snapshots of the batch, and what each stream has gathered since its last turn, as one frame.

    Args:
        connection: is sent to, and closed.
        codec: encodes.
        config: how long a frame may take, and how fast they follow each other.
        deadlines: for what the client has to read in time.
        ending: when to close, and how.
        live: the connection's requests; one is taken out before its terminal event is sent.
        watch: when a snapshot is due.
        wake: wakes this task.

    Attributes:
        sent_frames: written so far.
    """

    def __init__(
        self,
        connection: Connection,
        codec: Codec,
        config: ServerConfig,
        *,
        deadlines: ClientDeadlines,
        ending: Ending,
        live: dict[RequestId, SessionRequest],
        watch: WatchPacer,
        wake: Wake,
    ) -> None:
        self.sent_frames = 0
        self._connection = connection
        self._codec = codec
        self._config = config
        self._deadlines = deadlines
        self._ending = ending
        self._live = live
        self._watch = watch
        self._wake = wake
        self._answers: deque[ServerMessage] = deque()  # frames of no stream; they go first
        self._ready: dict[Stream, None] = {}  # insertion order is the order of turns
        self._scope = trio.CancelScope()

    def __repr__(self) -> str:
        return f"<Writer {len(self._ready)} streams ready, {self.backlog} answers unsent>"

    @property
    def backlog(self) -> int:
        """Answers that no stream sends (errors, pongs) and the client has not read."""
        return len(self._answers)

    def answer(self, message: ServerMessage) -> None:
        """Send this before any stream's events."""
        self._answers.append(message)
        self._wake.set()

    def add(self, stream: Stream) -> None:
        """The stream has something to take: give it a turn."""
        self._ready[stream] = None
        self._wake.set()

    def hurry(self) -> None:
        """The ending has moved: look at it, and give up a frame that takes longer than it allows."""
        self._scope.deadline = min(self._scope.deadline, self._ending.abort_s)
        self._wake.set()

    def clear(self) -> None:
        """Let go of the streams."""
        self._ready.clear()

    async def run(self) -> None:
        """Send until the session ends, then close; abort where a frame cannot be sent in time."""
        # One scope whose deadline moves: a scope a frame would cost a tenth of the frame.
        with self._scope, self._deadlines.includes(self._scope), suppress(Disconnected):
            await self._write_all()
            close = self._ending.begin_closing()
            await self._connection.close(close.code, close.reason)
        if self._scope.cancelled_caught:
            # Half a frame may be on the wire: nothing more can be said on this connection.
            await self._connection.abort()

    async def _write_all(self) -> None:
        """Returns when it is time to close."""
        while True:
            for message in self._messages():
                await self._send(message)
            self._scope.deadline = self._ending.abort_s
            close_s = inf if self._live else self._ending.close_s
            if trio.current_time() >= close_s:
                return
            if close_s < inf:
                with trio.move_on_at(close_s):
                    await self._wake.wait()
            else:
                await self._wait_for_more()

    async def _wait_for_more(self) -> None:
        sent_s = trio.current_time()
        await self._wake.wait()
        # A frame costs some 50 µs, however many tokens are in it: what comes in quick succession is merged. Steps of a
        # real model take longer than this interval, and are not held back.
        early_s = sent_s + self._config.frame_interval_ms / 1000 - trio.current_time()
        # Sleeping costs a third of a frame, also when it is for no time at all; and answers are not merged.
        if early_s > 0 and not self._answers:
            await trio.sleep(early_s)

    def _messages(self) -> Iterator[ServerMessage]:
        """What there is to send, each message made only when it is asked for."""
        while self._answers or self._ready or self._watch.due:
            if self._answers:
                yield self._answers.popleft()
                continue
            if self._watch.due:  # at its own pace, so that neither it nor the streams can starve the other
                yield self._watch.take()
            if self._ready:
                yield from self._next_turn()

    def _next_turn(self) -> Iterator[ServerMessage]:
        """The events of the stream that has waited the longest."""
        stream = next(iter(self._ready))
        del self._ready[stream]
        events = stream.take()
        if events and isinstance(events[-1], Finished | Failed):
            # Before it is sent: the client may use the id again the moment it has read this.
            del self._live[stream.request.id]
        yield from events

    async def _send(self, message: ServerMessage) -> None:
        pieces = self._codec.encoding(message)
        piece = next(pieces)
        for following in pieces:
            await self._send_piece(piece, last=False)
            piece = following
        await self._send_piece(piece, last=True)
        self.sent_frames += 1

    async def _send_piece(self, piece: bytes | str, *, last: bool) -> None:
        self._scope.deadline = min(trio.current_time() + self._config.send_timeout_s, self._ending.abort_s)
        await self._connection.send(piece, last=last)
