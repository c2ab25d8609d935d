"""The engine on Trio: arrivals over a memory channel, deadlines, the worker; what to do is decided by its core."""

import logging
from collections.abc import Callable
from math import inf

import trio

from wsbatch.batching.fairness import NOBODY, Client
from wsbatch.batching.scheduler import Idle, Scheduler, Step, WaitUntil
from wsbatch.config import EngineConfig
from wsbatch.engine.core import EngineCore
from wsbatch.engine.execution import Execution
from wsbatch.engine.interface import EngineState, Submits
from wsbatch.engine.metrics import EngineMetrics
from wsbatch.engine.stream import Stream
from wsbatch.engine.tokenization import PromptTokenizer
from wsbatch.engine.watch import Watcher
from wsbatch.engine.worker import Worker
from wsbatch.errors import EngineDead, QueueTimeout, RequestError, StepFailed
from wsbatch.messages import DEFAULT_PRIORITY, GenerateRequest, Status
from wsbatch.steps import ModelInfo
from wsbatch.text import TextCodec

_logger = logging.getLogger("wsbatch.engine")


class BatchEngine(Submits):
    """Implements `Engine` and `Mortal` over one scheduler and one worker.

    Args:
        config: bounds and timeouts; the scheduler and the worker are made from it by `open_engine`.
        info: the model's facts; `max_model_len` is what the scheduler's cache can hold, too.
        scheduler: decides when and who.
        worker: runs the steps.
        codec: turns ids into text.
        tokenize: turns a request into prompt ids, off the event loop where it takes long.

    Attributes:
        core: the owner of every live request. Only this shell may call what changes it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: ModelInfo,
        scheduler: Scheduler,
        worker: Worker,
        codec: TextCodec,
        tokenize: PromptTokenizer,
    ) -> None:
        self.info = info
        self.core = EngineCore(config, info=info, scheduler=scheduler, codec=codec, now_s=trio.current_time())
        self._tokenize = tokenize
        self._execution = Execution(worker, stall_s=config.step_stall_s)
        # Keys of new requests: they wake the loop. Unbounded: admission bounds what is in it.
        self._arrivals, self._inbox = trio.open_memory_channel[int](inf)
        self._deadline_moved = trio.Event()
        self._expires_s = inf  # when the core is next told that time has passed
        self._died = trio.Event()

    def __repr__(self) -> str:
        return f"<BatchEngine {self.state}: {self.core!r}>"

    @property
    def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`."""
        return self.core.metrics

    @property
    def state(self) -> EngineState:
        """ready, draining or dead."""
        return "dead" if self.core.death else "draining" if self.core.draining else "ready"

    @property
    def scheduler(self) -> Scheduler:
        """For whoever measures: its ledger holds the sums of all steps."""
        return self.core.scheduler

    @property
    def full(self) -> bool:
        """See `Engine.full`."""
        return self.core.full

    def refusal(self) -> RequestError | None:
        """See `Engine.refusal`."""
        return self.core.refusal(trio.current_time())

    def refuse_early(self, client: Client = NOBODY, priority: int = DEFAULT_PRIORITY) -> RequestError | None:
        """See `Engine.refuse_early`."""
        return self.core.refuse_early(client, priority, trio.current_time())

    def status(self) -> Status:
        """See `Engine.status`."""
        return self.core.status(trio.current_time())

    async def wait_dead(self) -> EngineDead:
        """Wait until the engine has died; returns why."""
        await self._died.wait()
        assert self.core.death is not None
        return self.core.death

    async def submit(
        self,
        request: GenerateRequest,
        *,
        client: Client = NOBODY,
        on_event: Callable[[Stream], None] | None = None,
        checked: bool = False,
    ) -> Stream:
        """See `Engine.submit`."""
        core, arrived_s = self.core, trio.current_time()
        await trio.lowlevel.checkpoint()  # even where the tokenizer does not wait: a burst must not starve the loop
        try:
            request = core.check(request, checked=checked)
            with core.reserve(request, client) as place:
                prompt_ids = await self._prompt_ids(request, client, core.queue_deadline_s(request, arrived_s))
                request = core.fit(request, prompt_ids)
                stream = Stream(request, on_cancel=self._cancel, on_event=on_event)
                now_s = trio.current_time()
                core.add(stream, prompt_ids, place, client=client, arrived_s=arrived_s, now_s=now_s)
        except RequestError as error:
            self.metrics.count_refused(error.code)
            core.set_retry_time(error, trio.current_time())
            raise
        if core.next_deadline_s < self._expires_s:
            self._deadline_moved.set()
        self._arrivals.send_nowait(stream.key)
        return stream

    def watch(self, on_change: Callable[[], None]) -> Watcher:
        """See `Engine.watch`."""
        return self.core.recorder.watch(on_change)

    async def drain(self, grace_s: float) -> None:
        """See `Engine.drain`."""
        self.core.draining = True
        with trio.move_on_after(grace_s):
            for outbox in self.core.unfinished:
                assert isinstance(outbox, Stream)
                await outbox.ended.wait()
        self.core.shut_down(trio.current_time())

    async def run(self) -> None:
        """The loop, until it is cancelled or the engine dies.

        Death does not raise here, so that connections live to tell their clients: it ends every live request with
        engine_dead, and wakes `wait_dead`. Cancelled, it ends them with `shutdown`, and refuses any that come later.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._expire)
                nursery.start_soon(self._execution.watchdog.run)
                try:
                    while True:
                        await self._turn()
                except EngineDead as error:
                    self._die(error)
                except Exception as error:
                    _logger.exception("the engine's loop failed")
                    self._die(EngineDead(f"the engine's loop failed: {error!r}"))
                nursery.cancel_scope.cancel()
        finally:
            self.core.shut_down(trio.current_time())

    async def _turn(self) -> None:
        """One turn of the loop: drain, decide, then step or wait."""
        # First what is there: receive() under an expired deadline raises without looking at the buffer, so a busy
        # server that only ever waited would make batches of one.
        while True:
            try:
                self._inbox.receive_nowait()
            except trio.WouldBlock:
                break
        match self.core.next(trio.current_time()):
            case Step() as step:
                await self._step(step)
            case WaitUntil(at_s=at_s):
                with trio.move_on_at(at_s):
                    await self._inbox.receive()
            case Idle():
                await self._inbox.receive()

    async def _step(self, step: Step) -> None:
        try:
            result, failed = await self._execution.step(step.plan)
        except StepFailed as error:
            self.core.abort(error, trio.current_time())
        else:
            self.core.complete(result, failed, trio.current_time())
        if self.core.health.suspicious:
            await self._execution.probe(self.core)

    async def _prompt_ids(self, request: GenerateRequest, client: Client, deadline_s: float) -> list[int]:
        """Waits for the tokenizer; for the whole queue timeout at most. Raises RequestError."""
        with trio.move_on_at(deadline_s):
            return await self._tokenize(request, client)
        raise QueueTimeout("the request waited to be tokenized for its whole queue timeout")

    async def _expire(self) -> None:
        """Tell the core when its next deadline has come."""
        while True:
            self.core.expire(trio.current_time())
            self._deadline_moved = trio.Event()
            self._expires_s = self.core.next_deadline_s
            with trio.move_on_at(self._expires_s):
                await self._deadline_moved.wait()

    def _cancel(self, stream: Stream) -> None:
        self.core.cancel(stream, trio.current_time())

    def _die(self, death: EngineDead) -> None:
        self.core.die(death, trio.current_time())
        self._died.set()
