"""The live batch, as it is told to those who watch it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

# What a row was to a step. kept: its request is over, and it is computed all the same, because its padded batch runs
# on. held: it has its slot and its cache, but no part in the step.
RowPhase: TypeAlias = Literal["prefill", "decode", "kept", "held"]


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One model step: when it began, how long it took, and (slot, key, phase) of every row that held a slot.

    `key` is the engine's own number of the request: it tells rows apart, and nothing else. A slot that is not named
    was idle.
    """

    t_ms: float
    ms: float
    rows: tuple[tuple[int, int, RowPhase], ...]


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The batch now, and the steps since the snapshot before; no text and no token of anybody's.

    Attributes:
        t_ms: now, on the clock of `steps`; it starts with the engine.
        scheduler: dynamic or continuous.
        slots: rows that a step can have.
        queue_depth: requests waiting.
        running: live requests past the queue.
        tokens_per_s: tokens generated for requests in the last second.
        slot_utilization: useful share of the decode slots issued in the last second; None where there was none.
        waste_fraction: share of all token slots, prompts' and padding included, issued in the last second that nobody
            asked for; None where there was none.
        steps: completed since the snapshot before, oldest first; bounded.
        steps_dropped: how many older ones are missing, because they were too many.
    """

    t_ms: float
    scheduler: str
    slots: int
    queue_depth: int
    running: int
    tokens_per_s: float
    steps: tuple[BatchStep, ...]
    steps_dropped: int = 0
    slot_utilization: float | None = None
    waste_fraction: float | None = None
