"""The engine's loop: drain arrivals, decide, step, deliver. And the life of its requests around it."""

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf

import trio

from wsbatch.batching.admission import Admission
from wsbatch.batching.queue import Work
from wsbatch.batching.scheduler import Idle, Scheduler, Step, StepOutcome, WaitUntil
from wsbatch.config import EngineConfig
from wsbatch.engine import EngineState
from wsbatch.errors import (
    BadRequest,
    Draining,
    EngineDead,
    ModelError,
    QueueTimeout,
    RequestError,
    SlowConsumer,
    StepFailed,
)
from wsbatch.generation import Generation
from wsbatch.messages import Accepted, FinishReason, GenerateRequest
from wsbatch.metrics import EngineMetrics
from wsbatch.steps import ModelInfo, RowSampling
from wsbatch.stream import Stream
from wsbatch.text import TextCodec
from wsbatch.timers import Timers
from wsbatch.worker import Worker

_SEED_BITS = 53
_logger = logging.getLogger("wsbatch.engine")

Tokenise = Callable[[GenerateRequest], Awaitable[list[int]]]


class BatchEngine:
    """Implements `Engine` over one scheduler and one worker.

    Args:
        config: bounds and timeouts; the scheduler and the worker are made from it by `open_engine`.
        info: the model's facts.
        scheduler: decides when and who.
        worker: runs the steps.
        codec: turns ids into text.
        tokenise: turns a request into prompt ids, off the event loop where it takes long. Raises RequestError.
        max_request_tokens: prompt plus output that the model and its cache can hold.
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
        max_request_tokens: int,
    ) -> None:
        self.info = info
        self.metrics = EngineMetrics()
        self._config = config
        self._scheduler = scheduler
        self._worker = worker
        self._codec = codec
        self._tokenise = tokenise
        self._admission = Admission(
            max_requests=config.max_queue_requests,
            max_tokens=config.max_queue_tokens,
            max_request_tokens=max_request_tokens,
        )
        self._timers = Timers(self._expire)
        # Unbounded: admission bounds what is in it.
        self._arrivals, self._inbox = trio.open_memory_channel[Work](inf)
        self._live: dict[int, Generation] = {}  # accepted, no terminal event yet, or a slot still to be released
        self._waiting: dict[int, int] = {}  # prompt tokens of the accepted requests that have not started
        self._last_key = 0
        self._draining = False
        self._death: EngineDead | None = None
        self._died = trio.Event()
        self._changed = trio.Event()  # a request ended: drain looks again
        self.metrics.watch(lambda: self._scheduler.running, lambda: len(self._waiting))

    def __repr__(self) -> str:
        return f"<BatchEngine {self.state}: {self._scheduler!r}, {self._admission!r}>"

    @property
    def state(self) -> EngineState:
        """ready, draining or dead."""
        return "dead" if self._death else "draining" if self._draining else "ready"

    def refusal(self) -> RequestError | None:
        """Why any request made now would be refused; None if one may be let in."""
        return self._closed() or self._admission.refusal()

    async def wait_dead(self) -> EngineDead:
        """Wait until the engine has died; returns why."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def submit(self, request: GenerateRequest, *, on_event: Callable[[Stream], None] | None = None) -> Stream:
        """See `Engine.submit`."""
        arrived_s = trio.current_time()
        try:
            return await self._admit(request, on_event, arrived_s)
        except RequestError as error:
            self.metrics.refused.labels(error.code).inc()
            raise

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
            while self._streaming():
                self._changed = trio.Event()
                await self._changed.wait()
        for generation in self._streaming():
            self._finish(generation, "shutdown")

    async def run(self) -> None:
        """The loop, until it is cancelled or the engine dies.

        Death does not raise here, so that connections live to tell their clients: it ends every live request with
        engine_dead, and wakes `wait_dead`. Cancelled, it ends what is live with `shutdown`.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._timers.run)
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
            for generation in self._streaming():
                self._finish(generation, "shutdown")

    def _die(self, death: EngineDead) -> None:
        self._death = death
        self._died.set()
        for generation in self._streaming():
            self._fail(generation, death)

    async def _admit(
        self, request: GenerateRequest, on_event: Callable[[Stream], None] | None, arrived_s: float
    ) -> Stream:
        if (closed := self._closed()) is not None:
            raise closed
        sampling = request.sampling
        max_new_tokens = sampling.max_tokens - len(request.resume_token_ids)
        if max_new_tokens < 1:
            raise BadRequest(
                f"resume_token_ids holds {len(request.resume_token_ids)} tokens: fewer than max_tokens "
                f"{sampling.max_tokens} may have been generated"
            )
        self._admission.reserve()
        held_tokens = 0
        try:
            prompt_ids = await self._tokenise(request)
            self._check_ids(prompt_ids, request)
            token_ids = (*prompt_ids, *request.resume_token_ids)
            if (closed := self._closed()) is not None:
                raise closed
            self._admission.fill(len(token_ids), max_new_tokens)
            held_tokens = len(token_ids)
            self._last_key += 1
            key = self._last_key
            stream = Stream(request, on_cancel=lambda _: self._finish(self._live[key], "cancelled"), on_event=on_event)
            ends = frozenset(sampling.stop_token_ids)
            generation = Generation(
                key,
                stream,
                prompt_ids=prompt_ids,
                codec=self._codec,
                end_ids=ends if sampling.ignore_eos else ends | self.info.eos_token_ids,
                arrived_s=arrived_s,
            )
        except BaseException:
            self._admission.leave(held_tokens)
            raise
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(_SEED_BITS)
        row_sampling = RowSampling(sampling.temperature, sampling.top_p, sampling.top_k, seed, sampling.logprobs)
        ahead = len(self._waiting)
        self._live[key] = generation
        self._waiting[key] = held_tokens
        self._arrivals.send_nowait(
            Work(
                key=key,
                token_ids=token_ids,
                max_new_tokens=max_new_tokens,
                sampling=row_sampling,
                priority=request.priority,
                arrived_s=arrived_s,
            )
        )
        queue_ms = min(request.queue_timeout_ms or self._config.queue_timeout_ms, self._config.queue_timeout_ms)
        if request.timeout_ms is not None:
            self._timers.add(arrived_s + request.timeout_ms / 1000, key)
            queue_ms = min(queue_ms, request.timeout_ms)
        self._timers.add(arrived_s + queue_ms / 1000, key)
        self.metrics.prompt_tokens.inc(len(prompt_ids))
        stream.accept(Accepted(request.id, len(prompt_ids), ahead, seed))
        return stream

    def _closed(self) -> RequestError | None:
        if self._death:
            return self._death
        return Draining("the server is shutting down", retry_after_ms=1000) if self._draining else None

    def _check_ids(self, prompt_ids: list[int], request: GenerateRequest) -> None:
        if not prompt_ids:
            raise BadRequest("the prompt is empty: at least one token is needed")
        for field, ids in (("token_ids", request.token_ids or ()), ("resume_token_ids", request.resume_token_ids)):
            worst = max(ids, default=0)
            if worst >= self.info.vocab_size:
                raise BadRequest(f"{field} holds {worst}: ids must be below the vocabulary size {self.info.vocab_size}")

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
            case WaitUntil(at_s=at_s):
                with trio.move_on_at(at_s):
                    self._take(await self._inbox.receive())
            case Idle():
                self._take(await self._inbox.receive())

    def _take(self, work: Work) -> None:
        if work.key in self._live:
            self._scheduler.add(work)

    async def _step(self, step: Step) -> None:
        now_s = trio.current_time()
        for key in step.started:
            self._live[key].started_s = now_s
            self._leave_queue(key)
        if step.started:
            self._admission.started(len(step.started), now_s)
        try:
            with trio.fail_after(self._config.step_stall_s):
                result = await self._worker.step(step.plan)
        except StepFailed as error:
            for key in self._scheduler.abort(trio.current_time()):
                self._fail(self._live[key], ModelError(f"the model failed: {error}"))
        except trio.TooSlowError:
            raise EngineDead(f"a model step made no progress for {self._config.step_stall_s} s") from None
        else:
            self._deliver(self._scheduler.complete(result, trio.current_time()))
        self._settle()

    def _deliver(self, outcome: StepOutcome) -> None:
        cost = outcome.cost
        self.metrics.observe_step(cost.phase, cost.rows, cost.issued_tokens, cost.useful_tokens, cost.seconds)
        now_s = trio.current_time()
        for token in outcome.tokens:
            generation = self._live[token.key]
            reason = generation.advance(token.token_id, token.logprobs, now_s)
            if reason is not None:
                # A whole answer (`stream: false`) is told when its batch ends.
                self._finish(generation, reason, at_release=not generation.request.stream)
            elif generation.stream.unsent_tokens > self._config.max_unsent_tokens:
                bound = self._config.max_unsent_tokens
                self._fail(generation, SlowConsumer(f"more than {bound} tokens are unread, the most allowed"))

    def _settle(self) -> None:
        """Slots that became free: what waited for its batch's end is told now."""
        now_s = trio.current_time()
        for release in self._scheduler.releases():
            generation = self._live.pop(release.key)
            self.metrics.hol_delay.observe(release.hol_delay_s)
            if generation.stream.live:
                self._tell(generation, release.hol_delay_s, now_s)

    def _finish(self, generation: Generation, reason: FinishReason, *, at_release: bool = False) -> None:
        """The request's own end, told now or when its slot is released; one that waited for that is told now."""
        now_s = trio.current_time()
        if generation.reason is None:
            generation.reason = reason
        if not at_release:
            self._tell(generation, 0.0, now_s)
        self._end_row(generation.key, now_s)

    def _tell(self, generation: Generation, hol_delay_s: float, now_s: float) -> None:
        report = self._scheduler.report(generation.key)
        finished = generation.finished(report, hol_delay_s=hol_delay_s, now_s=now_s)
        self.metrics.observe_finished(finished)
        generation.stream.finish(finished)
        self._changed.set()

    def _fail(self, generation: Generation, error: RequestError) -> None:
        if generation.stream.live:
            self.metrics.refused.labels(error.code).inc()
            generation.stream.fail(error)
            self._changed.set()
        self._end_row(generation.key, trio.current_time())

    def _end_row(self, key: int, now_s: float) -> None:
        """The scheduler is told; a request that never started is gone with that, others at their release."""
        self._scheduler.end(key, now_s)
        if key in self._waiting:
            self._leave_queue(key)
            del self._live[key]

    def _leave_queue(self, key: int) -> None:
        self._admission.leave(self._waiting.pop(key))

    def _streaming(self) -> list[Generation]:
        return [generation for generation in self._live.values() if generation.stream.live]

    def _expire(self, key: int) -> None:
        generation = self._live.get(key)
        if generation is None or not generation.stream.live:
            return
        if key in self._waiting:
            self._fail(generation, QueueTimeout("the request waited in the queue for its whole queue timeout"))
            return
        timeout_ms = generation.request.timeout_ms
        # The queue's timer of a request that has started meanwhile says nothing.
        if timeout_ms is not None and trio.current_time() >= generation.arrived_s + timeout_ms / 1000:
            self._finish(generation, "timeout")
