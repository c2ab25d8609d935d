"""What the engine's loop and a scheduler say to each other. Pure data, and the protocol that both schedulers meet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from wsbatch.batching.accounting import Ledger, RowReport
from wsbatch.batching.costs import StepCost
from wsbatch.batching.queue import ScheduledRequest, WaitingQueue
from wsbatch.messages import RowPhase, TokenLogprobs
from wsbatch.steps import StepPlan, StepResult

PROBE = 0
"""The key of a probe's row: no request has it."""


@dataclass(frozen=True, slots=True)
class Step:
    """Run this plan now. `started` are the keys that leave the queue with it."""

    plan: StepPlan
    started: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to run before this time unless something arrives; seconds on the engine's clock."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something arrives."""


Decision: TypeAlias = Step | WaitUntil | Idle


@dataclass(frozen=True, slots=True)
class RowToken:
    """One new token of one live request."""

    key: int
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a completed step gave: tokens of rows that are still live, and its cost."""

    tokens: tuple[RowToken, ...]
    cost: StepCost


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The KV pool now, and its counters since the start."""

    used_blocks: int
    total_blocks: int
    queried_tokens: int
    hit_tokens: int
    evictions: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Release:
    """A request's slot is free: `hol_delay_s` after the request's own end (0 unless its batch ran on)."""

    key: int
    hol_delay_s: float
    report: RowReport | None = field(default=None, compare=False)


class Scheduler(Protocol):
    """Decides WHEN and WHO. All calls come from one task; a step may be in flight between `decide` and `complete`.

    The loop is: `decide` → run the plan → `complete` (or `abort`) → the engine looks at the tokens and calls `end` for
    each request that is over → `releases`. `end` may also be called while a step is in flight (cancel, timeout).
    """

    @property
    def queue(self) -> WaitingQueue:
        """The waiting requests."""
        ...

    @property
    def ledger(self) -> Ledger:
        """The sums of all steps so far."""
        ...

    @property
    def running(self) -> int:
        """Live requests past the queue."""
        ...

    def add(self, request: ScheduledRequest) -> None:
        """Put a new request in the queue."""
        ...

    def decide(self, now_s: float) -> Decision:
        """What to do now. After a `Step`, `complete` or `abort` must come before the next `decide`."""
        ...

    def complete(self, result: StepResult, now_s: float) -> StepOutcome:
        """Take the in-flight step's result. Rows ended meanwhile give no tokens."""
        ...

    def abort(self, now_s: float) -> tuple[int, ...]:
        """The in-flight step raised: drop every request that was in it; their keys are returned."""
        ...

    def probe(self, token_ids: tuple[int, ...]) -> StepPlan | None:
        """A small step for nobody, to see whether the model works; None while what runs leaves no room for it.

        Its row samples, and has the key PROBE. The scheduler neither waits for it nor counts it; run it before the next
        `decide`.
        """
        ...

    def end(self, key: int, now_s: float) -> None:
        """This request is over (stopped, full length, cancelled, timed out), waiting or running; unknown keys pass."""
        ...

    def slot_phases(self) -> Sequence[tuple[int, RowPhase]]:
        """(key, phase) of every row that holds a slot in the step in flight; call it right after its `decide`."""
        ...

    def releases(self) -> Sequence[Release]:
        """Requests whose slots became free since the last call, each exactly once if it ever ran."""
        ...

    def report(self, key: int) -> RowReport | None:
        """What the steps of a request have cost that runs and is not yet released; None for others."""
        ...

    def cache(self) -> CacheStats | None:
        """The KV pool's numbers; None for a scheduler without one."""
        ...

    def request(self, key: int) -> ScheduledRequest | None:
        """The request, waiting or running."""
        ...
