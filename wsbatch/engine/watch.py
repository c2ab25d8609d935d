"""The record of the live batch that watchers see: which row held which slot in each step.

One ring of steps serves any number of watchers; each has its place in it. Nothing is recorded while nobody watches.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from wsbatch.batching.costs import StepCost
from wsbatch.messages import BatchSnapshot, BatchStep, RowPhase

# What the rates are taken over.
WINDOW_S = 1.0

# Rows in the steps that are kept: a bound on the size of a frame (about 60 kB) as well as on memory. At 32 rows it is
# 128 steps, which a watcher that is served ten times a second never misses at 1 ms a step.
MAX_ROWS = 4096


class _Spent(NamedTuple):
    """One step of the window."""

    ended_s: float
    tokens: int
    cost: StepCost


class BatchRecorder:
    """Records steps while somebody watches.

    Args:
        scheduler: its name.
        slots: rows that a step can have.
        now_s: the time now, in seconds; only differences and order matter.
    """

    def __init__(self, scheduler: str, slots: int, *, now_s: float) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._queue_depth = 0
        self._running = 0
        self._origin_s = now_s
        self._watchers: set[Watcher] = set()
        self._steps: deque[BatchStep] = deque()
        self._rows = 0  # in all of `_steps`
        self._recorded = 0  # steps since the start; the last of `_steps` has this number
        self._window: deque[_Spent] = deque()
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []  # a heap: the lowest slot is given first, so that used slots stay together

    def __repr__(self) -> str:
        return f"<BatchRecorder {len(self._watchers)} watchers, {len(self._steps)} steps kept>"

    @property
    def watched(self) -> bool:
        """Whether anybody watches: if not, `record` need not be called."""
        return bool(self._watchers)

    def watch(self, on_change: Callable[[], None]) -> "Watcher":
        """Begin to record, if nobody did. `on_change` is called after each step, arrival and end; it must not wait."""
        watcher = Watcher(self, on_change, self._recorded)
        self._watchers.add(watcher)
        return watcher

    def record(
        self, phases: Sequence[tuple[int, RowPhase]], cost: StepCost, *, tokens: int, started_s: float, ended_s: float
    ) -> None:
        """Take a step: `Scheduler.slot_phases`, what it cost, and how many tokens of live requests came."""
        if not self._watchers:
            return
        rows = self._place(phases)
        self._steps.append(BatchStep(self._ms(started_s), round((ended_s - started_s) * 1000, 3), rows))
        self._recorded += 1
        self._rows += len(rows)
        while self._rows > MAX_ROWS:
            self._rows -= len(self._steps.popleft().rows)
        self._window.append(_Spent(ended_s, tokens, cost))
        self._trim_window(ended_s)
        self._tell()

    def changed(self, *, queue_depth: int, running: int) -> None:
        """A request came, started or ended: so many wait now, and so many are past the queue."""
        self._queue_depth, self._running = queue_depth, running
        self._tell()

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher.on_change()

    def leave(self, watcher: "Watcher") -> None:
        """After the last one, what was recorded is forgotten: the next would take it for news."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._steps.clear()
            self._window.clear()
            self._slot_of.clear()
            self._free.clear()
            self._rows = 0

    def snapshot(self, seen: int, now_s: float) -> tuple[BatchSnapshot, int]:
        """The batch now, with the steps after number `seen`; and the number of the last one."""
        self._trim_window(now_s)
        new = self._recorded - seen
        steps = tuple(self._steps)[-new:] if new else ()
        issued = useful = decode_slots = useful_decode_slots = tokens = 0
        for spent in self._window:
            cost = spent.cost
            tokens += spent.tokens
            decode_slots += cost.decode_slots
            useful_decode_slots += cost.useful_decode_slots
            issued += cost.prefill_tokens + cost.decode_slots
            useful += cost.useful_prefill_tokens + cost.useful_decode_slots
        snapshot = BatchSnapshot(
            t_ms=self._ms(now_s),
            scheduler=self._scheduler,
            slots=self._slots,
            queue_depth=self._queue_depth,
            running=self._running,
            tokens_per_s=round(tokens / WINDOW_S, 1),
            steps=steps,
            steps_dropped=new - len(steps),
            slot_utilization=round(useful_decode_slots / decode_slots, 4) if decode_slots else None,
            waste_fraction=round(1 - useful / issued, 4) if issued else None,
        )
        return snapshot, self._recorded

    def _place(self, phases: Sequence[tuple[int, RowPhase]]) -> tuple[tuple[int, int, RowPhase], ...]:
        """Every row keeps its slot from its first step to its last; then another may have it."""
        keys = {key for key, _ in phases}
        for key in [key for key in self._slot_of if key not in keys]:
            heappush(self._free, self._slot_of.pop(key))
        for key, _ in phases:
            if key not in self._slot_of:
                # With none free, the slots given are 0 to n-1.
                self._slot_of[key] = heappop(self._free) if self._free else len(self._slot_of)
        return tuple([(self._slot_of[key], key, phase) for key, phase in phases])

    def _trim_window(self, now_s: float) -> None:
        since_s = now_s - WINDOW_S
        while self._window and self._window[0].ended_s <= since_s:
            self._window.popleft()

    def _ms(self, at_s: float) -> float:
        return round((at_s - self._origin_s) * 1000, 3)


class Watcher:
    """One who watches; made by `BatchRecorder.watch`."""

    def __init__(self, recorder: BatchRecorder, on_change: Callable[[], None], seen: int) -> None:
        self.on_change = on_change
        self._recorder = recorder
        self._seen = seen

    def take(self, now_s: float) -> BatchSnapshot:
        """The batch at this time, with the steps since the last `take`."""
        snapshot, self._seen = self._recorder.snapshot(self._seen, now_s)
        return snapshot

    def close(self) -> None:
        """Watch no more."""
        self._recorder.leave(self)
