"""The engine as plain synchronous code: the one owner of every live request.

It decides and never waits. Time is an argument (`now_s`, seconds on the caller's clock, never going back), and what the
caller has to do is the return value: run this step, wait until then, or idle. `BatchEngine` is its shell on Trio.

A request comes in by `check`, `reserve`, `fit` and `add`, in this order. From `add` on it is live, and has exactly one
ending, by one of the functions that end requests: `complete` and `abort` (its output is over, its step failed),
`cancel`, `expire`, `shut_down`, `die`, or `add` of another that it gives way to.
"""

from collections.abc import Mapping, Sequence
from math import inf

from wsbatch.batching.admission import Place
from wsbatch.batching.fairness import NOBODY, Client
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Decision, Idle, Scheduler, Step, WaitUntil
from wsbatch.config import EngineConfig
from wsbatch.engine.admission import AdmissionControl
from wsbatch.engine.batch_wait import BatchWaitClock
from wsbatch.engine.health import ModelHealth
from wsbatch.engine.live import LiveRequests
from wsbatch.engine.metrics import EngineMetrics
from wsbatch.engine.outbox import Outbox
from wsbatch.engine.output import Output
from wsbatch.engine.request import LiveRequest
from wsbatch.engine.watch import BatchRecorder
from wsbatch.errors import (
    Draining,
    EngineDead,
    ModelError,
    QueueFull,
    RequestError,
    Shed,
    StepFailed,
)
from wsbatch.messages import DEFAULT_PRIORITY, Accepted, GenerateRequest, RowPhase, SamplingParams, Status
from wsbatch.steps import ModelInfo, StepResult
from wsbatch.text import TextCodec


class EngineCore:
    """Admission, the queue, the steps and every ending of one engine.

    Args:
        config: bounds and timeouts.
        info: the model's facts; `max_model_len` is what the scheduler's cache can hold, too.
        scheduler: decides when and who.
        codec: turns ids into text.
        now_s: the time now.

    Attributes:
        metrics, recorder: told of everything that happens.
        health: whether the model works.
        draining: whether nothing is admitted any more because the engine is to end.
        death: why the engine is dead; None while it lives.
    """

    def __init__(
        self, config: EngineConfig, *, info: ModelInfo, scheduler: Scheduler, codec: TextCodec, now_s: float
    ) -> None:
        self.metrics = EngineMetrics(
            running=lambda: scheduler.running, waiting=lambda: len(scheduler.queue), cache=scheduler.cache
        )
        self.recorder = BatchRecorder(config.scheduler, config.max_batch_size, now_s=now_s)
        self.health = ModelHealth(vocab_size=info.vocab_size)
        self.scheduler = scheduler
        self.draining = False
        self.death: EngineDead | None = None
        self._config = config
        self._info = info
        self._codec = codec
        self._admission = AdmissionControl(config, info, scheduler)
        self._requests = LiveRequests(
            scheduler, self._admission, self.metrics, max_unsent_tokens=config.max_unsent_tokens
        )
        self._batch_wait = BatchWaitClock()
        self._last_key = 0
        self._step_began_s: float | None = None  # of the step in flight
        self._slot_phases: Sequence[tuple[int, RowPhase]] = ()  # its rows, where somebody watches

    def __repr__(self) -> str:
        return f"<EngineCore: {len(self._requests)} live requests, {self.scheduler!r}, {self._admission!r}>"

    # Admission

    @property
    def full(self) -> bool:
        """Whether some requests made now would be refused whatever they hold: `refusal` tells which."""
        return self._closed() is not None or self._admission.full

    def refusal(self, now_s: float) -> RequestError | None:
        """Why a request of the default class made now would be refused; None if one may be let in."""
        refusal = self._refusal(NOBODY, DEFAULT_PRIORITY)
        if isinstance(refusal, QueueFull) and refusal.retry_after_ms is None:
            refusal.retry_after_ms = self._admission.retry_after_ms(now_s)
        return refusal

    def refuse_early(self, client: Client, priority: int, now_s: float) -> RequestError | None:
        """The refusal of a request that is there, whatever it holds; None if it may be let in. See `set_retry_time`."""
        refusal = self._refusal(client, priority)
        if refusal is not None:
            self.set_retry_time(refusal, now_s)
        return refusal

    def set_retry_time(self, error: RequestError, now_s: float) -> None:
        """A client is told this error. Where the queue was full, say in it when to come back; the next one comes later.

        Call it once for each error that a function below has raised.
        """
        if isinstance(error, QueueFull) and error.retry_after_ms is None:
            error.retry_after_ms = self._admission.reserve_retry_ms(now_s)

    def check(self, request: GenerateRequest, *, checked: bool = False) -> GenerateRequest:
        """The request, if nothing is wrong with it and the engine is open. Raises RequestError.

        Of a request that is `checked`, the fields were read before.
        """
        self._check_open()
        return self._admission.check(request, checked=checked)

    def reserve(self, request: GenerateRequest, client: Client) -> Place:
        """A place to tokenize the request in. Raises QueueFull where there is none, whoever might give way."""
        return self._admission.reserve(request, client, self._requests.waiting())

    def queue_deadline_s(self, request: GenerateRequest, arrived_s: float) -> float:
        """When a request has waited too long, from its arrival on, for its tokens and in the queue."""
        longest_ms = min(request.queue_timeout_ms or inf, request.timeout_ms or inf, self._config.queue_timeout_ms)
        return arrived_s + longest_ms / 1000

    def fit(self, request: GenerateRequest, prompt_ids: Sequence[int]) -> GenerateRequest:
        """The request with its `max_tokens`, known from its prompt. Raises BadRequest or NeverFits."""
        return self._admission.fit(request, prompt_ids)

    def add(
        self, outbox: Outbox, prompt_ids: Sequence[int], place: Place, *, client: Client, arrived_s: float, now_s: float
    ) -> None:
        """Make a live request of one that has been checked and holds a place; its outbox begins with `Accepted`.

        Raises RequestError where it cannot be let in after all; then nothing has happened, to nobody. Otherwise the
        requests that give way are dropped, and the place is the live request's.
        """
        request = outbox.request
        self._check_open()  # once more: tokenizing may have taken long
        token_ids = (*prompt_ids, *request.resume_token_ids)
        victims = self._admission.requests_to_shed(request, client, len(token_ids), place, self._requests.waiting())
        output = Output(request, prompt_ids, codec=self._codec, end_ids=self._end_ids(request.sampling))
        # From here on nothing fails.
        for victim in victims:
            retry_after_ms = self._admission.reserve_retry_ms(now_s)
            shed = Shed("dropped from the queue for a more urgent request", retry_after_ms=retry_after_ms)
            self._requests.fail([victim.key], shed, now_s)
        place.fill(len(token_ids))
        self._last_key += 1
        sampling = request.sampling.seeded()
        scheduled = ScheduledRequest(
            key=self._last_key,
            token_ids=token_ids,
            max_new_tokens=sampling.most_tokens - len(request.resume_token_ids),
            sampling=sampling,
            priority=request.priority,
            arrived_s=arrived_s,
            turn_s=self._admission.turn_s(client, arrived_s),
        )
        wait_s = self._batch_wait.reading_s(now_s)
        live = LiveRequest(outbox, scheduled=scheduled, output=output, place=place, client=client, wait_clock_s=wait_s)
        outbox.key = scheduled.key
        outbox.accept(Accepted(request.id, len(prompt_ids), len(self.scheduler.queue), sampling.seed or 0))
        self.metrics.prompt_tokens.inc(len(prompt_ids))
        self._requests.add(live, self.queue_deadline_s(request, arrived_s))
        if output.complete is not None:
            self._requests.finish(live, output.complete, now_s)
        self._changed()

    # Steps

    def next(self, now_s: float) -> Decision:
        """What to do now. After a `Step`, `complete` or `abort` must come before the next `next`.

        Raises EngineDead where requests wait and nothing will ever run.
        """
        self._batch_wait.stop(now_s)
        decision = self.scheduler.decide(now_s)
        match decision:
            case Step(started=started):
                for key in started:
                    self._requests.start(key, self._batch_wait.reading_s(now_s), now_s)
                if started:
                    self._admission.started(len(started), now_s)
                    self._changed()
                self._slot_phases = self.scheduler.slot_phases() if self.recorder.watched else ()
                self._step_began_s = now_s
            case WaitUntil():
                self._batch_wait.start(now_s)
            case Idle() if (waiting := len(self.scheduler.queue)) > 0:
                raise EngineDead(f"the scheduler is wedged: {waiting} requests wait and nothing runs")
        return decision

    def complete(self, result: StepResult, failed: Mapping[int, StepFailed], now_s: float) -> None:
        """The step in flight has this result; the requests with these keys failed in it."""
        for key, cause in failed.items():
            # else it ended while the step ran; or before, and its row goes on with its padded batch
            if self._requests.lives(key):
                self._requests.fail([key], ModelError(f"the model failed: {cause}"), now_s)
        outcome = self.scheduler.complete(result, now_s)
        self.health.record(failed.values(), tokens=len(outcome.tokens), now_s=now_s)
        self.metrics.observe_step(outcome.cost)
        began_s, self._step_began_s = self._step_began_s, None
        assert began_s is not None
        self.recorder.record(
            self._slot_phases, outcome.cost, tokens=len(outcome.tokens), started_s=began_s, ended_s=now_s
        )
        if outcome.tokens:
            self.health.succeeded(self._requests[outcome.tokens[0].key].scheduled.token_ids)
        self._requests.deliver(outcome.tokens, now_s)
        self._requests.finish_released(now_s)
        self._changed()

    def abort(self, error: StepFailed, now_s: float) -> None:
        """The step in flight failed as a whole: all requests in it end with `model_error`."""
        self._step_began_s = None
        self.health.record([error], tokens=0, now_s=now_s)
        self._requests.fail(self.scheduler.abort(now_s), ModelError(f"the model failed: {error}"), now_s)
        self._requests.finish_released(now_s)
        self._changed()

    # Endings

    @property
    def unfinished(self) -> list[Outbox]:
        """The requests whose terminal event is still to come."""
        return [live.outbox for live in self._requests.unfinished]

    @property
    def next_deadline_s(self) -> float:
        """When `expire` has something to do; infinity for never."""
        return self._requests.next_deadline_s

    def cancel(self, outbox: Outbox, now_s: float) -> None:
        """End this live request with `cancelled`."""
        self._requests.finish(self._requests[outbox.key], "cancelled", now_s)
        self._changed()

    def expire(self, now_s: float) -> None:
        """End the requests that have run out of time."""
        self._requests.expire(now_s)
        self._changed()

    def shut_down(self, now_s: float) -> None:
        """Admit nothing more, and end all requests with `shutdown`."""
        self.draining = True
        for live in self._requests.unfinished:
            self._requests.finish(live, "shutdown", now_s)
        self._changed()

    def die(self, death: EngineDead, now_s: float) -> None:
        """Admit nothing more, and end all requests with this error."""
        self.death = death
        self._requests.fail([live.key for live in self._requests.unfinished], death, now_s)
        self._changed()

    # What others are told

    def status(self, now_s: float) -> Status:
        """How much work there is."""
        queue = self.scheduler.queue
        running = self._requests.past_queue
        oldest_s = min((each.arrived_s for each in queue), default=now_s)
        began_s = self._step_began_s
        refusal = self.refusal(now_s)
        return Status(
            state="dead" if self.death else "draining" if self.draining else "ready",
            waiting=len(queue),
            running=sum(live.reason is None for live in running),
            queued_tokens=sum(len(each.token_ids) + each.max_new_tokens for each in queue),
            running_tokens=sum(live.tokens_left for live in running),
            max_batch_size=self._config.max_batch_size,
            queue_ms=round((now_s - oldest_s) * 1000, 3),
            step_ms=0.0 if began_s is None else round((now_s - began_s) * 1000, 3),
            retry_after_ms=None if refusal is None else refusal.retry_after_ms or 1000,
        )

    def _changed(self) -> None:
        self.recorder.changed(queue_depth=len(self.scheduler.queue), running=self.scheduler.running)

    def _closed(self) -> RequestError | None:
        if self.death is not None:
            return self.death
        if self.draining:
            return Draining("the server is shutting down", retry_after_ms=1000)
        if self.health.doubtful:
            return QueueFull("the model fails and is being probed", retry_after_ms=1000)
        return None

    def _refusal(self, client: Client, priority: int) -> RequestError | None:
        return self._closed() or self._admission.refusal(client, priority, self._requests.waiting())

    def _check_open(self) -> None:
        if (closed := self._closed()) is not None:
            raise closed

    def _end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        ends = frozenset(sampling.stop_token_ids)
        return ends if sampling.ignore_eos else ends | self._info.eos_token_ids
