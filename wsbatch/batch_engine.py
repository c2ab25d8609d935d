"""The engine's loop: drain arrivals, decide, step, deliver. And the life of its requests around it."""

import logging
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from math import inf

import trio

from wsbatch.batching.admission import Admission
from wsbatch.batching.picture import Picture, Watcher
from wsbatch.batching.queue import Work
from wsbatch.batching.scheduler import Idle, Scheduler, Step, StepOutcome, WaitUntil
from wsbatch.config import EngineConfig
from wsbatch.engine import EngineState
from wsbatch.errors import (
    Draining,
    EngineDead,
    ModelError,
    QueueFull,
    RequestError,
    SlowConsumer,
    StepFailed,
)
from wsbatch.execution import Execution
from wsbatch.intake import Intake, Tokenise
from wsbatch.messages import GenerateRequest, Status
from wsbatch.metrics import EngineMetrics
from wsbatch.requests import Requests
from wsbatch.steps import ModelInfo
from wsbatch.stream import Stream
from wsbatch.text import TextCodec
from wsbatch.worker import Worker

_logger = logging.getLogger("wsbatch.engine")


class BatchEngine:
    """Implements `Engine` over one scheduler and one worker.

    Args:
        config: bounds and timeouts; the scheduler and the worker are made from it by `open_engine`.
        info: the model's facts; `max_model_len` is what the scheduler's cache can hold, too.
        scheduler: decides when and who.
        worker: runs the steps.
        codec: turns ids into text.
        tokenise: turns a request into prompt ids, off the event loop where it takes long. Raises RequestError.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: ModelInfo,
        scheduler: Scheduler,
        worker: Worker,
        codec: TextCodec,
        tokenise: Tokenise,
    ) -> None:
        self.info = info
        self.metrics = EngineMetrics()
        self._config = config
        self._scheduler = scheduler
        self._execution = Execution(worker, stall_s=config.step_stall_s, vocab_size=info.vocab_size)
        self._admission = Admission(max_requests=config.max_queue_requests, max_tokens=config.max_queue_tokens)
        self._picture = Picture(
            config.scheduler,
            config.max_batch_size,
            clock=trio.current_time,
            queue_depth=lambda: len(self._requests.waiting),
            running=lambda: self._scheduler.running,
        )
        # Unbounded: admission bounds what is in it.
        self._arrivals, self._inbox = trio.open_memory_channel[Work](inf)
        self._requests = Requests(
            config,
            info=info,
            codec=codec,
            scheduler=scheduler,
            admission=self._admission,
            metrics=self.metrics,
            hand_over=self._arrivals.send_nowait,
            changed=self._picture.changed,
        )
        self._intake = Intake(
            config,
            info=info,
            tokenise=tokenise,
            admission=self._admission,
            requests=self._requests,
            scheduler=scheduler,
            closed=self._closed,
        )
        self._draining = False
        self._death: EngineDead | None = None
        self._died = trio.Event()
        self.metrics.watch(lambda: self._scheduler.running, lambda: len(self._requests.waiting), self._scheduler.cache)

    def __repr__(self) -> str:
        return f"<BatchEngine {self.state}: {self._scheduler!r}, {self._admission!r}>"

    @property
    def state(self) -> EngineState:
        """ready, draining or dead."""
        return "dead" if self._death else "draining" if self._draining else "ready"

    @property
    def scheduler(self) -> Scheduler:
        """For whoever measures: its ledger holds the sums of all steps."""
        return self._scheduler

    def refusal(self) -> RequestError | None:
        """See `Engine.refusal`."""
        return self._intake.refusal()

    def status(self) -> Status:
        """See `Engine.status`."""
        began_s = self._execution.began_s
        refusal = self.refusal()
        return self._requests.status(
            state=self.state,
            step_ms=0.0 if began_s is None else round((trio.current_time() - began_s) * 1000, 3),
            retry_after_ms=None if refusal is None else refusal.retry_after_ms or 1000,
        )

    async def wait_dead(self) -> EngineDead:
        """Wait until the engine has died; returns why."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def submit(
        self,
        request: GenerateRequest,
        *,
        client: Hashable = None,
        on_event: Callable[[Stream], None] | None = None,
    ) -> Stream:
        """See `Engine.submit`."""
        arrived_s = trio.current_time()
        await trio.lowlevel.checkpoint()  # even where the tokeniser does not wait: a burst must not starve the loop
        try:
            request = self._intake.check(request)
            with self._intake.reserve(request) as place:
                prompt_ids = await self._intake.tokenise(request)
                request = self._intake.fit(request, len(prompt_ids))
                victims = self._intake.make_way(request, len(prompt_ids) + len(request.resume_token_ids), place)
                return self._requests.enqueue(
                    request,
                    prompt_ids,
                    place=place,
                    victims=victims,
                    arrived_s=arrived_s,
                    client=client,
                    on_event=on_event,
                )
        except RequestError as error:
            self.metrics.count_refused(error.code)
            raise

    def watch(self, on_change: Callable[[], None]) -> Watcher:
        """See `Engine.watch`."""
        return self._picture.watch(on_change)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Stream]:
        """See `Engine.generate`."""
        stream = await self.submit(request)
        try:
            yield stream
        finally:
            stream.cancel()

    async def drain(self, grace_s: float) -> None:
        """See `Engine.drain`."""
        self._draining = True
        with trio.move_on_after(grace_s):
            while self._requests.untold():
                self._requests.ended = trio.Event()
                await self._requests.ended.wait()
        for generation in self._requests.untold():
            self._requests.finish(generation, "shutdown")

    async def run(self) -> None:
        """The loop, until it is cancelled or the engine dies.

        Death does not raise here, so that connections live to tell their clients: it ends every live request with
        engine_dead, and wakes `wait_dead`. Cancelled, it ends what is live with `shutdown`.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._requests.timers.run)
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
            for generation in self._requests.untold():
                self._requests.finish(generation, "shutdown")

    async def _turn(self) -> None:
        """One turn of the loop: drain, decide, then step or wait."""
        # First what is there: receive() under an expired deadline raises without looking at the buffer, so a busy
        # server that only ever waited would make batches of one.
        while True:
            try:
                self._take(self._inbox.receive_nowait())
            except trio.WouldBlock:
                break
        match self._scheduler.decide(trio.current_time()):
            case Step() as step:
                await self._step(step)
                if self._execution.failures.suspicious:
                    await self._execution.probe(self._scheduler)
            case WaitUntil(at_s=at_s):
                with self._requests.holding(), trio.move_on_at(at_s):
                    self._take(await self._inbox.receive())
            case Idle():
                if (waiting := len(self._scheduler.queue)) > 0:
                    raise EngineDead(f"the scheduler is wedged: {waiting} requests wait and nothing runs")
                self._take(await self._inbox.receive())

    def _take(self, work: Work) -> None:
        if work.key in self._requests.waiting:  # else it ended before the scheduler ever saw it
            self._scheduler.add(work)

    async def _step(self, step: Step) -> None:
        now_s = trio.current_time()
        for key in step.started:
            self._requests.start(key)
        if step.started:
            self._admission.started(len(step.started), now_s)
        lanes = self._scheduler.lanes() if self._picture.watched else ()
        try:
            result, failed = await self._execution.step(step.plan)
        except StepFailed as error:
            self._execution.failures.record([error], tokens=0, now_s=trio.current_time())
            self._requests.fail(self._scheduler.abort(trio.current_time()), ModelError(f"the model failed: {error}"))
        else:
            for key, cause in failed.items():
                if key not in self._requests.live:
                    continue  # it was cancelled, or timed out, while the step was looking for it
                self._requests.fail([key], ModelError(f"the model failed: {cause}"))
            ended_s = trio.current_time()
            outcome = self._scheduler.complete(result, ended_s)
            self._execution.failures.record(failed.values(), tokens=len(outcome.tokens), now_s=ended_s)
            self._picture.record(lanes, outcome.cost, tokens=len(outcome.tokens), started_s=now_s, ended_s=ended_s)
            self._deliver(outcome)
        self._requests.settle()

    def _deliver(self, outcome: StepOutcome) -> None:
        self.metrics.observe_step(outcome.cost)
        now_s = trio.current_time()
        if outcome.tokens and (work := self._scheduler.work(outcome.tokens[0].key)) is not None:
            self._execution.succeeded(work.token_ids)
        for token in outcome.tokens:
            generation = self._requests.live[token.key]
            try:
                reason = generation.advance(token.token_id, token.logprobs, now_s)
            except RequestError as error:
                self._requests.fail([token.key], error)
                continue
            if reason is not None:
                # A whole answer (`stream: false`) is told when its slot is free: in a padded batch, at the batch's end.
                self._requests.finish(generation, reason, at_release=not generation.request.stream)
            elif generation.stream.overdue(bound := self._config.max_unsent_tokens, now_s):
                self._requests.fail([token.key], SlowConsumer(f"more than {bound} tokens are unread, the most allowed"))

    def _closed(self) -> RequestError | None:
        if self._death:
            return self._death
        if self._draining:
            return Draining("the server is shutting down", retry_after_ms=1000)
        if self._execution.doubtful:
            return QueueFull("the model fails and is being probed", retry_after_ms=1000)
        return None

    def _die(self, death: EngineDead) -> None:
        self._death = death
        self._died.set()
        self._requests.fail([generation.key for generation in self._requests.untold()], death)
