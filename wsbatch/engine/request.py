"""One accepted request inside the engine: all that is known of it, in one record."""

from math import inf

from wsbatch.batching.accounting import RowReport
from wsbatch.batching.admission import Place
from wsbatch.batching.fairness import Client
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.engine.outbox import Outbox
from wsbatch.engine.output import Output
from wsbatch.messages import BatchReport, Finished, FinishReason, GenerateRequest, Timing, TokenLogprobs, Usage

_NO_STEPS = RowReport(max_size=0, mean_size=0.0, issued_tokens=0, useful_tokens=0, cached_tokens=0)


class LiveRequest:
    """A request from its place in the queue until its slot is free.

    Args:
        outbox: where its events go.
        scheduled: what the scheduler knows of it.
        output: its tokens and text.
        place: its place in the queue.
        client: whose it is.
        wait_clock_s: reading of the engine's `BatchWaitClock` when it came.

    Attributes:
        reason: why it is over, from its own end on.
        started_s: when its first step began; None while it waits.
        batch_wait_s: of its time in the queue, how long the model was free; known once it has started.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        scheduled: ScheduledRequest,
        output: Output,
        place: Place,
        client: Client,
        wait_clock_s: float,
    ) -> None:
        self.outbox = outbox
        self.scheduled = scheduled
        self.output = output
        self.place = place
        self.client = client
        self.wait_clock_s = wait_clock_s
        self.reason: FinishReason | None = None
        self.started_s: float | None = None
        self.batch_wait_s = 0.0
        self._prompt_tokens = len(scheduled.token_ids) - len(self.request.resume_token_ids)
        self._first_token_s: float | None = None

    def __repr__(self) -> str:
        return f"<LiveRequest {self.key}: {self.output!r}, {self.reason or 'live'}>"

    @property
    def key(self) -> int:
        """The engine's own number for it."""
        return self.scheduled.key

    @property
    def request(self) -> GenerateRequest:
        """What was asked."""
        return self.outbox.request

    @property
    def tokens_left(self) -> int:
        """How many it may still generate."""
        return 0 if self.reason is not None else self.output.tokens_left

    @property
    def deadline_s(self) -> float:
        """When the whole request has taken too long; infinity where it has no such bound."""
        return self.scheduled.arrived_s + (self.request.timeout_ms or inf) / 1000

    def start(self, wait_clock_s: float, now_s: float) -> None:
        """Its first step begins. `wait_clock_s` is the reading of the engine's `BatchWaitClock`."""
        self.started_s = now_s
        self.batch_wait_s = wait_clock_s - self.wait_clock_s
        self.outbox.start()

    def advance(self, token_id: int, logprobs: TokenLogprobs | None, now_s: float) -> FinishReason | None:
        """Take the next token; returns why the request is over with it, if it is.

        Raises ModelError where the codec cannot turn it into text.
        """
        if self._first_token_s is None:
            self._first_token_s = now_s
        if self.output.ends_with(token_id):
            return "stop"
        text, reason = self.output.push(token_id, logprobs)
        if self.request.stream:
            self.outbox.push([token_id], text, [] if logprobs is None else [logprobs])
        return reason

    def finished(self, report: RowReport | None, *, hol_delay_s: float, now_s: float) -> Finished:
        """The terminal event. `report` None means that it never ran. Call once, when `reason` is set.

        Raises ModelError where the codec cannot turn what was held back into text.
        """
        assert self.reason is not None
        text, stopped = self.output.flush()
        if stopped and self.reason == "length":  # what came free last completes a stop string
            self.reason = "stop"
        whole = not self.request.stream
        steps = report or _NO_STEPS
        return Finished(
            self.request.id,
            self.reason,
            text,
            Usage(self._prompt_tokens, len(self.output.token_ids), steps.cached_tokens),
            timing(
                arrived_s=self.scheduled.arrived_s,
                started_s=self.started_s,
                first_token_s=self._first_token_s,
                ended_s=now_s,
                batch_wait_ms=_ms(self.batch_wait_s),
            ),
            BatchReport(
                steps.max_size,
                round(steps.mean_size, 3),
                steps.issued_tokens,
                steps.useful_tokens,
                _ms(hol_delay_s),
            ),
            tuple(self.output.token_ids) if whole else None,
            self.output.logprobs,
        )


def timing(
    *, arrived_s: float, started_s: float | None, first_token_s: float | None, ended_s: float, batch_wait_ms: float
) -> Timing:
    """A request's times from readings of one clock; one that never started has waited in the queue to its end."""
    if started_s is None:
        started_s = ended_s
    return Timing(
        queue_ms=_ms(started_s - arrived_s),
        prefill_ms=_ms(first_token_s - started_s) if first_token_s is not None else 0.0,
        ttft_ms=_ms(first_token_s - arrived_s) if first_token_s is not None else 0.0,
        total_ms=_ms(ended_s - arrived_s),
        batch_wait_ms=batch_wait_ms,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
