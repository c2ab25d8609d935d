"""An engine that does what a test tells it, in place of a model and its batcher."""

from collections.abc import Callable

import trio

from wsbatch.batching.fairness import NOBODY, Client
from wsbatch.engine.interface import EngineState, Submits
from wsbatch.engine.metrics import RequestMetrics
from wsbatch.engine.stream import Stream
from wsbatch.engine.watch import BatchRecorder, Watcher
from wsbatch.errors import Draining, EngineDead, RequestError
from wsbatch.messages import (
    DEFAULT_PRIORITY,
    Accepted,
    BatchReport,
    Finished,
    FinishReason,
    GenerateRequest,
    Status,
    Timing,
    Usage,
)
from wsbatch.steps import ModelInfo


class ScriptedEngine(Submits):
    """Implements `Engine` and `Mortal`. Nothing happens by itself: a test pushes tokens, ends streams, or runs `play`.

    Attributes:
        live: accepted streams without a terminal event, oldest first.
        submitting: requests whose `submit` has not returned.
        submit_s: how long `submit` takes, as tokenizing would.
        cancellable: whether a `submit` that is cancelled ends at once; a thread that tokenizes does not.
        recorder: what watchers see; a test records its steps.
        clients: who made each request, in order.
        refuse: what `submit` raises and `refusal` returns; None lets everything in.
    """

    def __init__(self, *, submit_s: float = 0.0) -> None:
        self.info = ModelInfo("scripted", "1", "float32", "cpu", 4096, 256, frozenset())
        self.metrics = RequestMetrics(running=lambda: len(self.live), waiting=lambda: 0)
        self.state: EngineState = "ready"
        self.live: list[Stream] = []
        self.submitting = 0
        self.clients: list[Client] = []
        self.submit_s = submit_s
        self.cancellable = True
        self.refuse: RequestError | None = None
        self.recorder = BatchRecorder("continuous", 8, now_s=trio.current_time())
        self._produced: dict[Stream, int] = {}
        self._changed = trio.Event()
        self._death: EngineDead | None = None
        self._died = trio.Event()

    @property
    def full(self) -> bool:
        """Whether `submit` would raise now."""
        return self.refusal() is not None

    def refusal(self) -> RequestError | None:
        """What a submit would raise now."""
        if self._death is not None:
            return self._death
        if self.state == "draining":
            return Draining("the server is shutting down", retry_after_ms=1000)
        return self.refuse

    def refuse_early(self, client: Client = NOBODY, priority: int = DEFAULT_PRIORITY) -> RequestError | None:
        """The same, to a client."""
        return self.refusal()

    async def submit(
        self,
        request: GenerateRequest,
        *,
        client: Client = NOBODY,
        on_event: Callable[[Stream], None] | None = None,
        checked: bool = False,
    ) -> Stream:
        """Accept after `submit_s`, unless refused."""
        self.clients.append(client)
        self.submitting += 1
        try:
            with trio.CancelScope(shield=not self.cancellable):
                await trio.sleep(self.submit_s)
            await trio.lowlevel.checkpoint()
        finally:
            self.submitting -= 1
        if (refusal := self.refusal()) is not None:
            self.metrics.count_refused(refusal.code)
            raise refusal
        stream = Stream(request, on_cancel=lambda stream: self.finish(stream, "cancelled"), on_event=on_event)
        self.live.append(stream)
        self._produced[stream] = 0
        stream.accept(Accepted(request.id, len((request.prompt or "").encode()), len(self.live) - 1, 7))
        self._notify()
        return stream

    def status(self) -> Status:
        """All live streams count as running."""
        left = sum(stream.request.sampling.most_tokens - produced for stream, produced in self._produced.items())
        refusal = self.refusal()
        retry_after_ms = None if refusal is None else refusal.retry_after_ms or 1000
        return Status(self.state, 0, len(self.live), 0, left, 8, 0.0, 0.0, retry_after_ms)

    def watch(self, on_change: Callable[[], None]) -> Watcher:
        """Watch `recorder`."""
        return self.recorder.watch(on_change)

    async def wait_live(self, count: int) -> None:
        """Wait until exactly `count` streams are live."""
        while len(self.live) != count:
            await self._changed.wait()

    async def wait_dead(self) -> RequestError:
        """Wait for `die`."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def drain(self, grace_s: float) -> None:
        """As a real engine: wait for the live streams, end the rest with `shutdown`."""
        self.state = "draining"
        with trio.move_on_after(grace_s):
            while self.live:
                await self._changed.wait()
        for stream in list(self.live):
            self.finish(stream, "shutdown")

    def push(self, stream: Stream, text: str = "a") -> None:
        """One token for this stream."""
        self._produced[stream] += 1
        stream.push([ord(text[0]) % self.info.vocab_size], text, [])

    def finish(self, stream: Stream, reason: FinishReason = "stop") -> None:
        """End this stream."""
        if stream in self._produced:
            usage = Usage(stream.accepted.prompt_tokens if stream.accepted else 0, self._produced[stream])
            self._drop(stream)
            report = BatchReport(1, 1.0, usage.completion_tokens, usage.completion_tokens, 0.0)
            stream.finish(Finished(stream.request.id, reason, "", usage, Timing(0.0, 0.0, 0.0, 0.0), report))

    def fail(self, stream: Stream, error: RequestError) -> None:
        """End this stream with an error."""
        self._drop(stream)
        stream.fail(error)

    def die(self, message: str = "the model thread died") -> None:
        """As a real engine: every live stream ends with engine_dead."""
        self.state = "dead"
        self._death = EngineDead(message)
        self._died.set()
        for stream in list(self.live):
            self.fail(stream, self._death)

    async def play(self, *, interval_s: float) -> None:
        """Forever: a token for every live stream each `interval_s`, until its max_tokens."""
        while True:
            await trio.sleep(interval_s)
            for stream in list(self.live):
                self.push(stream, chr(97 + self._produced[stream] % 26))
                if self._produced[stream] >= stream.request.sampling.most_tokens:
                    self.finish(stream, "length")

    def _drop(self, stream: Stream) -> None:
        self.live.remove(stream)
        del self._produced[stream]
        self._notify()

    def _notify(self) -> None:
        self.recorder.changed(queue_depth=0, running=len(self.live))
        self._changed.set()
        self._changed = trio.Event()
