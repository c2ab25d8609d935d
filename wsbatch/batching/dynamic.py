"""Dynamic batching, run to completion: the policy (a pure function) and the scheduler that applies it.

The classic design: requests wait until a batch is full or the oldest has waited `max_wait_ms`; the batch is padded and
runs until its last row is done. Its waste is what the accounting shows.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from wsbatch.batching.accounting import Ledger, RowReport
from wsbatch.batching.costs import StepCost
from wsbatch.batching.hazard import ArrivalHazard
from wsbatch.batching.prefill import PrefillBound
from wsbatch.batching.queue import ScheduledRequest, WaitingQueue
from wsbatch.batching.scheduler import (
    PROBE,
    Decision,
    Idle,
    Release,
    RowToken,
    Step,
    StepOutcome,
    WaitUntil,
)
from wsbatch.messages import RowPhase, SamplingParams
from wsbatch.steps import PaddedDecode, PaddedRow, PaddedStart, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSettings:
    """The knobs. Seconds; see `EngineConfig` for what each one does.

    `max_step_s`: no batch has more rows than can be prefilled in this time, as far as the steps so far tell. A prompt
    cannot be cut here: a single row may take longer. None: there is no such bound.
    """

    max_batch_size: int
    max_wait_s: float
    anchor: str = "oldest"
    debounce_s: float = 0.002
    buckets: tuple[int, ...] = ()
    adaptive: bool = False
    early_compaction: bool = False
    max_step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the policy looks at. `idle_since_s`: when the model last fell idle. `pays_until_s`: adaptive bound."""

    now_s: float
    waiting: Sequence[ScheduledRequest]
    idle_since_s: float
    last_arrival_s: float
    pays_until_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run these waiting requests as one batch."""

    requests: tuple[ScheduledRequest, ...]


def due_s(view: View, settings: DynamicSettings, group: Sequence[ScheduledRequest]) -> float:
    """When this group must be dispatched at the latest, in seconds on the engine's clock.

    Time spent behind a running batch counts under the anchor `oldest`. Under `idle` the clock starts when the model
    falls idle, so that closed-loop clients whose batch has just ended can join those that waited behind it. `last`
    waits for a lull of `debounce_s` after the last arrival (or after falling idle), within the bound of `idle`.
    """
    oldest_s = min(request.arrived_s for request in group)
    if settings.anchor == "oldest":
        bound_s = oldest_s + settings.max_wait_s
    else:
        bound_s = max(oldest_s, view.idle_since_s) + settings.max_wait_s
        if settings.anchor == "last":
            bound_s = min(bound_s, max(view.last_arrival_s, view.idle_since_s) + settings.debounce_s)
    return min(bound_s, view.pays_until_s)


def decide(view: View, settings: DynamicSettings) -> Dispatch | WaitUntil | Idle:
    """The policy of an idle model: dispatch a batch, wait until a time, or idle.

    A full group goes at once, then the group that is due; of several, the one whose first request is first in the
    queue. Groups are the length buckets; without buckets there is one.
    """
    if not view.waiting:
        return Idle()
    groups: dict[int, list[ScheduledRequest]] = {}
    for request in view.waiting:
        groups.setdefault(bisect_left(settings.buckets, len(request.token_ids)), []).append(request)
    for group in groups.values():
        if len(group) >= settings.max_batch_size:
            return Dispatch(tuple(group[: settings.max_batch_size]))
    earliest_s = float("inf")
    for group in groups.values():
        group_due_s = due_s(view, settings, group)
        if group_due_s <= view.now_s:
            return Dispatch(tuple(group))
        earliest_s = min(earliest_s, group_due_s)
    return WaitUntil(earliest_s)


@dataclass(slots=True)
class _Row:
    request: ScheduledRequest
    ended_s: float | None = None


class DynamicScheduler:
    """Implements `Scheduler`: one padded batch at a time, run to completion."""

    def __init__(self, settings: DynamicSettings, *, now_s: float) -> None:
        self.queue = WaitingQueue()
        self.ledger = Ledger()
        self._settings = settings
        self._idle_since_s = now_s
        self._batch_started_s = now_s
        self._hazard = ArrivalHazard()
        self._bound = None if settings.max_step_s is None else PrefillBound(settings.max_step_s, self.ledger.costs)
        self._rows: list[_Row] = []  # in the tensors' order; empty between batches
        self._departed: list[_Row] = []  # rows that compaction dropped; they are released with their batch
        self._in_flight: StepPlan | None = None
        self._releases: list[Release] = []

    def __repr__(self) -> str:
        return f"<DynamicScheduler {len(self.queue)} waiting, {self.running} of {len(self._rows)} rows live>"

    @property
    def running(self) -> int:
        """Live rows."""
        return sum(row.ended_s is None for row in self._rows)

    def decide(self, now_s: float) -> Decision:
        """The next step of the running batch; or, between batches, what the policy says."""
        if self._rows:
            return self._launch(PaddedDecode(self._compact()))
        waiting = list(self.queue)
        pays_until_s = float("inf")
        if self._settings.adaptive and waiting:
            pays_until_s = self._hazard.pays_until_s(now_s, len(waiting))
        view = View(
            now_s=now_s,
            waiting=waiting,
            idle_since_s=self._idle_since_s,
            last_arrival_s=self._hazard.last_arrival_s,
            pays_until_s=pays_until_s,
        )
        choice = decide(view, self._settings)
        if not isinstance(choice, Dispatch):
            return choice
        requests = self._affordable(choice.requests)
        for request in requests:
            self.queue.remove(request.key)
            self.ledger.join(request.key)
        self._rows = [_Row(request) for request in requests]
        self._batch_started_s = now_s
        plan = PaddedStart(
            rows=tuple(PaddedRow(request.key, request.token_ids, request.sampling) for request in requests),
            max_new_tokens=max(request.max_new_tokens for request in requests),
        )
        return self._launch(plan, started=tuple(request.key for request in requests))

    def complete(self, result: StepResult, now_s: float) -> StepOutcome:
        """One token for every row of the batch; those of rows that ended are waste."""
        plan, self._in_flight = self._in_flight, None
        live = [row.ended_s is None for row in self._rows]
        if isinstance(plan, PaddedStart):
            longest = max(len(row.token_ids) for row in plan.rows)
            useful = sum(len(row.request.token_ids) for row, alive in zip(self._rows, live, strict=True) if alive)
            slots = (longest * len(self._rows), useful, 0, 0)
        else:
            slots = (0, 0, len(self._rows), sum(live))
        cost = StepCost(len(self._rows), *slots, seconds=result.model_ms / 1000)
        self.ledger.record(cost, [row.request.key for row in self._rows])
        if self._bound is not None:
            self._bound.record(cost)
        tokens = []
        for index, (row, alive) in enumerate(zip(self._rows, live, strict=True)):
            if alive:
                logprobs = result.logprobs[index] if result.logprobs else None
                tokens.append(RowToken(row.request.key, result.token_ids[index], logprobs))
        self._close_batch(now_s)
        return StepOutcome(tuple(tokens), cost)

    def abort(self, now_s: float) -> tuple[int, ...]:
        """The step raised: the whole batch is gone, since its cache is."""
        self._in_flight = None
        keys = tuple(row.request.key for row in self._rows if row.ended_s is None)
        for row in self._rows:
            row.ended_s = row.ended_s if row.ended_s is not None else now_s
        self._close_batch(now_s)
        return keys

    def add(self, request: ScheduledRequest) -> None:
        """Put the request in the queue; the adaptive wait and the anchor `last` learn from its arrival."""
        self.queue.add(request)
        self._hazard.arrived(request.arrived_s)

    def probe(self, token_ids: tuple[int, ...]) -> PaddedStart | None:
        """As a batch of its own, so only between two."""
        return None if self._rows else PaddedStart((PaddedRow(PROBE, token_ids, SamplingParams()),), max_new_tokens=1)

    def end(self, key: int, now_s: float) -> None:
        """A waiting request leaves the queue; a running row keeps its slot until the batch is done or compacted."""
        if self.queue.remove(key) is not None:
            return
        for row in self._rows:
            if row.request.key == key and row.ended_s is None:
                row.ended_s = now_s
        if self._in_flight is None:
            self._close_batch(now_s)

    def slot_phases(self) -> Sequence[tuple[int, RowPhase]]:
        """The rows in the tensors, the finished ones too: they are computed like the others."""
        live: RowPhase = "prefill" if isinstance(self._in_flight, PaddedStart) else "decode"
        return [(row.request.key, live if row.ended_s is None else "kept") for row in self._rows]

    def releases(self) -> Sequence[Release]:
        """Rows of batches that have ended since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def report(self, key: int) -> RowReport | None:
        """What the batch has cost so far."""
        return self.ledger.report(key)

    def request(self, key: int) -> ScheduledRequest | None:
        """The request, waiting or in the batch."""
        running = (row.request for row in self._rows if row.request.key == key)
        return self.queue.get(key) or next(running, None)

    def cache(self) -> None:
        """A padded batch has a cache of its own that lives and dies with it."""

    def _launch(self, plan: StepPlan, started: tuple[int, ...] = ()) -> Step:
        self._in_flight = plan
        return Step(plan, started)

    def _affordable(self, requests: tuple[ScheduledRequest, ...]) -> tuple[ScheduledRequest, ...]:
        """As many of them, from the first on, as one step has time to prefill; one in any case."""
        if self._bound is None:
            return requests
        most, longest = self._bound.tokens(decode_rows=0), 0
        for count, request in enumerate(requests):
            longest = max(longest, len(request.token_ids))
            if count and longest * (count + 1) > most:
                return requests[:count]
        return requests

    def _compact(self) -> tuple[int, ...] | None:
        """Once half of the rows are done, the indices of those that stay."""
        keep = [index for index, row in enumerate(self._rows) if row.ended_s is None]
        if not self._settings.early_compaction or 2 * len(keep) > len(self._rows):
            return None
        self._departed += [row for row in self._rows if row.ended_s is not None]
        self._rows = [self._rows[index] for index in keep]
        return tuple(keep)

    def _close_batch(self, now_s: float) -> None:
        """End the batch if none of its rows is live."""
        if not self._rows or self.running:
            return
        for row in self._departed + self._rows:
            ended_s = row.ended_s if row.ended_s is not None else now_s
            self._releases.append(Release(row.request.key, now_s - ended_s, self.ledger.leave(row.request.key)))
        self._rows, self._departed = [], []
        self._idle_since_s = now_s
        self._hazard.batch_took(now_s - self._batch_started_s)
