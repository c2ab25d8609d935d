"""The requests that were accepted, until their slots are free, and the one ending that each of them gets."""

from collections.abc import Iterable

from wsbatch.batching.accounting import RowReport
from wsbatch.batching.scheduler import RowToken, Scheduler
from wsbatch.engine.admission import AdmissionControl, Waiting
from wsbatch.engine.deadlines import Deadlines
from wsbatch.engine.metrics import EngineMetrics
from wsbatch.engine.request import LiveRequest
from wsbatch.errors import QueueTimeout, RequestError, SlowConsumer
from wsbatch.messages import FinishReason


class LiveRequests:
    """One record each, by key.

    Args:
        scheduler: gets the new requests, and learns which have ended.
        admission: gets back the places of those that leave the queue.
        metrics: count the endings.
        max_unsent_tokens: more may not be unread for long.
    """

    def __init__(
        self, scheduler: Scheduler, admission: AdmissionControl, metrics: EngineMetrics, *, max_unsent_tokens: int
    ) -> None:
        self._scheduler = scheduler
        self._admission = admission
        self._metrics = metrics
        self._max_unsent_tokens = max_unsent_tokens
        self._by_key: dict[int, LiveRequest] = {}  # until the scheduler has released them
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._by_key)

    def __repr__(self) -> str:
        return f"<LiveRequests: {len(self)}, {self._deadlines!r}>"

    def __getitem__(self, key: int) -> LiveRequest:
        return self._by_key[key]

    def lives(self, key: int) -> bool:
        """Whether this request is here and has not come to its end."""
        return key in self._by_key and self._by_key[key].reason is None

    @property
    def unfinished(self) -> list[LiveRequest]:
        """Those whose terminal event is still to come."""
        return [live for live in self._by_key.values() if live.outbox.live]

    @property
    def past_queue(self) -> list[LiveRequest]:
        """Those that have started, and still have their slots."""
        return [live for live in self._by_key.values() if live.key not in self._scheduler.queue]

    @property
    def next_deadline_s(self) -> float:
        """When `expire` has something to do; infinity for never."""
        return self._deadlines.next_s

    def waiting(self) -> Waiting:
        """Those in the queue, in its order."""
        return ((self._by_key[each.key].client, each) for each in self._scheduler.queue)

    def add(self, live: LiveRequest, queue_deadline_s: float) -> None:
        """It waits from now on, until then at most."""
        self._by_key[live.key] = live
        self._deadlines.set(live.key, queue_deadline_s)
        self._scheduler.add(live.scheduled)

    def start(self, key: int, wait_clock_s: float, now_s: float) -> None:
        """Its first step begins. `wait_clock_s` is the reading of the engine's `BatchWaitClock`."""
        live = self._by_key[key]
        self._deadlines.set(key, live.deadline_s)
        self._admission.leave(live.place, live.client)
        live.start(wait_clock_s, now_s)

    def deliver(self, tokens: Iterable[RowToken], now_s: float) -> None:
        """Give each of these tokens to its request, and end those that are over with it."""
        for token in tokens:
            live = self._by_key[token.key]
            try:
                reason = live.advance(token.token_id, token.logprobs, now_s)
            except RequestError as error:
                self.fail([token.key], error, now_s)
                continue
            if reason is not None:
                # A whole answer (`stream: false`) is told when its slot is free: in a padded batch, at the batch's end.
                self.finish(live, reason, now_s, at_release=not live.request.stream)
            elif live.outbox.overdue(self._max_unsent_tokens, now_s):
                slow = SlowConsumer(f"more than {self._max_unsent_tokens} tokens are unread, the most allowed")
                self.fail([token.key], slow, now_s)

    def expire(self, now_s: float) -> None:
        """End those that have run out of time."""
        for key in self._deadlines.due(now_s):
            if key in self._scheduler.queue:
                late = QueueTimeout("the request waited in the queue for its whole queue timeout")
                self.fail([key], late, now_s)
            else:
                self.finish(self._by_key[key], "timeout", now_s)

    def finish(self, live: LiveRequest, reason: FinishReason, now_s: float, *, at_release: bool = False) -> None:
        """The request's own end, told now or when its slot is released; one that waited for that is told now."""
        if live.reason is None:
            live.reason = reason
        if not at_release:
            self._tell(live, self._scheduler.report(live.key), 0.0, now_s)
        self._end(live.key, now_s)

    def fail(self, keys: Iterable[int], error: RequestError, now_s: float) -> None:
        """They end with this error."""
        keys = list(keys)
        for key in keys:
            self._deadlines.drop(key)
            outbox = self._by_key[key].outbox
            if outbox.live:
                self._metrics.count_refused(error.code)
                outbox.fail(error)
        # Only then: ending one may release them all, where they shared a batch.
        for key in keys:
            self._end(key, now_s)

    def finish_released(self, now_s: float) -> None:
        """Slots that became free: what waited for that is told now."""
        for release in self._scheduler.releases():
            live = self._by_key.pop(release.key)
            self._metrics.hol_delay.observe(release.hol_delay_s)
            if live.outbox.live:
                self._tell(live, release.report, release.hol_delay_s, now_s)

    def _tell(self, live: LiveRequest, report: RowReport | None, hol_delay_s: float, now_s: float) -> None:
        self._deadlines.drop(live.key)
        try:
            finished = live.finished(report, hol_delay_s=hol_delay_s, now_s=now_s)
        except RequestError as error:
            self._metrics.count_refused(error.code)
            live.outbox.fail(error)
        else:
            self._metrics.observe_finished(finished)
            live.outbox.finish(finished)

    def _end(self, key: int, now_s: float) -> None:
        """The scheduler is told; a request that never started is gone with that, others at their release."""
        waiting = key in self._scheduler.queue
        self._scheduler.end(key, now_s)
        if waiting:
            live = self._by_key.pop(key)
            self._admission.leave(live.place, live.client)
        else:
            self.finish_released(now_s)
