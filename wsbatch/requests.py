"""The live requests of an engine: from a place in the queue to exactly one terminal event each."""

import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from math import inf

import trio

from wsbatch.batching.accounting import RowReport
from wsbatch.batching.admission import Admission, Place
from wsbatch.batching.fairness import FairShare
from wsbatch.batching.queue import Work
from wsbatch.batching.scheduler import Scheduler
from wsbatch.config import EngineConfig
from wsbatch.errors import QueueTimeout, RequestError, Shed
from wsbatch.generation import Generation
from wsbatch.messages import Accepted, FinishReason, GenerateRequest, Status
from wsbatch.metrics import EngineMetrics
from wsbatch.steps import ModelInfo, RowSampling
from wsbatch.stream import Stream
from wsbatch.text import TextCodec
from wsbatch.timers import Timers

_SEED_BITS = 53


class Requests:
    """Who is waiting, who is running, and how each of them ends.

    Attributes:
        live: accepted, and not yet released by the scheduler; by key.
        waiting: of those, what has not started.
        ended: set when a request has its terminal event; whoever waits for it replaces it.
        timers: run them in a task, or no timeout ever fires.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: ModelInfo,
        codec: TextCodec,
        scheduler: Scheduler,
        admission: Admission,
        metrics: EngineMetrics,
        hand_over: Callable[[Work], None],
        changed: Callable[[], None],
    ) -> None:
        """`hand_over` takes each new request's work towards the scheduler; `changed` is told when one comes or goes."""
        self.live: dict[int, Generation] = {}
        self.waiting: dict[int, Work] = {}
        self.ended = trio.Event()
        self.timers = Timers(self._expire)
        self._config = config
        self._info = info
        self._codec = codec
        self._scheduler = scheduler
        self._admission = admission
        self._metrics = metrics
        self._hand_over = hand_over
        self._changed = changed
        self._fairness = FairShare()
        self._places: dict[int, Place] = {}  # of the waiting ones
        self._last_key = 0
        # A clock that runs only while the policy holds requests although the model is free; and its reading when each
        # waiting request came.
        self._held_s = 0.0
        self._holding_since_s: float | None = None
        self._held_before_s: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<Requests {len(self.waiting)} waiting, {len(self.live) - len(self.waiting)} started>"

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While this lasts the policy holds the waiting requests for company."""
        self._holding_since_s = trio.current_time()
        try:
            yield
        finally:
            self._held_s, self._holding_since_s = self._hold_clock_s(), None

    def _hold_clock_s(self) -> float:
        since_s = self._holding_since_s
        return self._held_s + (0.0 if since_s is None else trio.current_time() - since_s)

    def start(self, key: int) -> None:
        """This request's first step begins now."""
        generation = self.live[key]
        generation.started_s = trio.current_time()
        generation.batch_wait_s = self._hold_clock_s() - self._held_before_s[key]
        self.leave_queue(key)
        generation.stream.start()

    def settle(self) -> None:
        """Slots that became free: what waited for that is told now."""
        now_s = trio.current_time()
        for release in self._scheduler.releases():
            generation = self.live.pop(release.key)
            self._metrics.hol_delay.observe(release.hol_delay_s)
            if generation.stream.live:
                self._tell(generation, release.report, release.hol_delay_s, now_s)
            self._changed()

    def enqueue(
        self,
        request: GenerateRequest,
        prompt_ids: list[int],
        *,
        place: Place,
        victims: Iterable[Work],
        arrived_s: float,
        client: Hashable,
        on_event: Callable[[Stream], None] | None,
    ) -> Stream:
        """Make a live request of one that holds a place in the queue, for which `victims` are dropped from it.

        Raises what a codec raises over `resume_token_ids`; then nothing has happened yet. From there on nothing here
        can fail, and the place is the live request's.
        """
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(_SEED_BITS)
        key = self._last_key + 1
        stream = Stream(request, on_cancel=lambda _: self.finish(self.live[key], "cancelled"), on_event=on_event)
        ends = frozenset(sampling.stop_token_ids)
        generation = Generation(
            key,
            stream,
            client=client,
            prompt_ids=prompt_ids,
            codec=self._codec,
            end_ids=ends if sampling.ignore_eos else ends | self._info.eos_token_ids,
            arrived_s=arrived_s,
        )
        work = Work(
            key=key,
            token_ids=(*prompt_ids, *request.resume_token_ids),
            max_new_tokens=sampling.most_tokens - len(request.resume_token_ids),
            sampling=RowSampling(sampling.temperature, sampling.top_p, sampling.top_k, seed, sampling.logprobs),
            priority=request.priority,
            arrived_s=arrived_s,
            turn_s=self._fairness.turn_s(client, arrived_s, self._admission.interval_s),
        )
        for victim in victims:
            self._shed(victim)
        place.fill(len(work.token_ids))
        self._last_key = key
        self._places[key] = place
        self.live[key] = generation
        stream.accept(Accepted(request.id, len(prompt_ids), len(self.waiting), seed))
        self.waiting[key] = work
        self._held_before_s[key] = self._hold_clock_s()
        self._hand_over(work)
        self._changed()
        queue_ms = min(request.queue_timeout_ms or inf, request.timeout_ms or inf, self._config.queue_timeout_ms)
        self.timers.add(arrived_s + queue_ms / 1000, key)
        if request.timeout_ms is not None:
            self.timers.add(arrived_s + request.timeout_ms / 1000, key)
        self._metrics.prompt_tokens.inc(len(prompt_ids))
        if generation.ended_elsewhere is not None:
            self.finish(generation, generation.ended_elsewhere)
        return stream

    def finish(self, generation: Generation, reason: FinishReason, *, at_release: bool = False) -> None:
        """The request's own end, told now or when its slot is released; one that waited for that is told now."""
        if generation.reason is None:
            generation.reason = reason
        if not at_release:
            self._tell(generation, self._scheduler.report(generation.key), 0.0, trio.current_time())
        self._end(generation.key)

    def _tell(self, generation: Generation, report: RowReport | None, hol_delay_s: float, now_s: float) -> None:
        try:
            finished = generation.finished(report, hol_delay_s=hol_delay_s, now_s=now_s)
        except RequestError as error:
            self._metrics.count_refused(error.code)
            generation.stream.fail(error)
        else:
            self._metrics.observe_finished(finished)
            generation.stream.finish(finished)
        self.ended.set()

    def fail(self, keys: Iterable[int], error: RequestError) -> None:
        """End requests with an error."""
        keys = list(keys)
        for key in keys:
            stream = self.live[key].stream
            if stream.live:
                self._metrics.count_refused(error.code)
                stream.fail(error)
                self.ended.set()
        # Only then: ending one may release them all, where they shared a batch.
        for key in keys:
            self._end(key)

    def _end(self, key: int) -> None:
        """The scheduler is told; a request that never started is gone with that, others at their release."""
        self._scheduler.end(key, trio.current_time())
        if key in self.waiting:
            self.leave_queue(key)
            del self.live[key]
        else:
            self.settle()

    def leave_queue(self, key: int) -> None:
        """This request starts, or ends without ever having started: its place is free."""
        del self._held_before_s[key]
        del self.waiting[key]
        self._places.pop(key).leave()
        self._fairness.leave(self.live[key].client)
        self._changed()

    def status(self, *, state: str, step_ms: float, retry_after_ms: int | None) -> Status:
        """The work there is."""
        waiting = self.waiting.values()
        running = [generation for key, generation in self.live.items() if key not in self.waiting]
        oldest_s = min((self.live[work.key].arrived_s for work in waiting), default=None)
        return Status(
            state=state,
            waiting=len(waiting),
            running=sum(generation.reason is None for generation in running),
            queued_tokens=sum(len(work.token_ids) + work.max_new_tokens for work in waiting),
            running_tokens=sum(generation.tokens_left for generation in running),
            max_batch_size=self._config.max_batch_size,
            queue_ms=0.0 if oldest_s is None else round((trio.current_time() - oldest_s) * 1000, 3),
            step_ms=step_ms,
            retry_after_ms=retry_after_ms,
        )

    def untold(self) -> list[Generation]:
        """The requests whose terminal event is still to come."""
        return [generation for generation in self.live.values() if generation.stream.live]

    def _expire(self, key: int) -> None:
        """A timer of this request went off; it may be one that no longer means anything."""
        generation = self.live.get(key)
        if generation is None or not generation.stream.live:
            return
        if key in self.waiting:
            self.fail([key], QueueTimeout("the request waited in the queue for its whole queue timeout"))
            return
        timeout_ms = generation.request.timeout_ms
        if timeout_ms is not None and trio.current_time() >= generation.arrived_s + timeout_ms / 1000:
            self.finish(generation, "timeout")

    def less_urgent(self, priority: int) -> list[Work]:
        """The waiting requests of less urgent classes than `priority`, in the order in which they give way."""
        works = [work for work in self.waiting.values() if work.priority > priority]
        return sorted(works, key=lambda work: (work.priority, work.order), reverse=True)

    def _shed(self, victim: Work) -> None:
        retry_after_ms = self._admission.retry_after_ms()
        self.fail([victim.key], Shed("dropped from the queue for a more urgent request", retry_after_ms=retry_after_ms))
