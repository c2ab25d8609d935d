"""The timeline of the live batch as rows of characters: a cell for each slot and each tenth of a second or so."""

from collections import deque
from collections.abc import Sequence

from wsbatch.cli.printing import without_controls
from wsbatch.messages import BatchSnapshot

IDLE = "idle"

# More slots than a screen has lines.
_MOST_SLOTS = 256

# Told apart without colours too. The names are those of the phases on the wire, and idle.
GLYPHS = {"prefill": "▓", "decode": "█", "kept": "░", "held": "·", IDLE: " "}


class Timeline:
    """What each slot has done lately, in cells of equal time.

    Args:
        cell_ms: how long a cell is.
        cells: how many of them are kept.
    """

    def __init__(self, *, cell_ms: float = 100.0, cells: int = 400) -> None:
        self.slots = 0
        self._cell_ms = cell_ms
        self._first = 0  # number of the oldest cell: cell n begins n * cell_ms after the server's zero
        self._cells: deque[list[dict[str, float]]] = deque(maxlen=cells)  # of each cell and slot: phase → milliseconds

    def take(self, snapshot: BatchSnapshot) -> None:
        """Add the snapshot's steps."""
        if (slots := min(snapshot.slots, _MOST_SLOTS)) != self.slots:
            self.slots = slots
            self._cells.clear()
        for step in snapshot.steps:
            begin_ms, end_ms = step.t_ms, step.t_ms + step.ms
            last = int(end_ms // self._cell_ms)
            for number in range(max(int(begin_ms // self._cell_ms), last - (self._cells.maxlen or 0)), last + 1):
                left_ms = number * self._cell_ms
                share_ms = min(end_ms, left_ms + self._cell_ms) - max(begin_ms, left_ms)
                cell = self._cell(number)
                if cell is not None and share_ms > 0:
                    for slot, _, phase in step.rows:
                        if slot < self.slots:
                            cell[slot][phase] = cell[slot].get(phase, 0.0) + share_ms
        self._cell(int(snapshot.t_ms // self._cell_ms))  # time goes on where nothing runs, too

    def rows(self, width: int) -> list[list[str]]:
        """For each slot the phase that took most of each of the last `width` cells, oldest first; idle without one.

        The newest cell is left out while its steps are still to be told.
        """
        recent = list(self._cells)[:-1][-width:]
        padding = [IDLE] * (width - len(recent))
        return [padding + [_longest(cell[slot], self._cell_ms) for cell in recent] for slot in range(self.slots)]

    def _cell(self, number: int) -> list[dict[str, float]] | None:
        """The cell of this number, made with those before it where it is new; None for one that is kept no more."""
        if not self._cells:
            self._first = number
        if number < self._first:
            return None
        if number - self._first - len(self._cells) >= (most := self._cells.maxlen or 0):
            self._cells.clear()
            self._first = number
        while number >= self._first + len(self._cells):
            if len(self._cells) == most:
                self._first += 1
            self._cells.append([{} for _ in range(self.slots)])
        return self._cells[number - self._first]


def _longest(times_ms: dict[str, float], cell_ms: float) -> str:
    """Idle only where nothing took a tenth of the cell: a short step is to be seen."""
    phase = max(times_ms, key=lambda name: times_ms[name], default=IDLE)
    return phase if times_ms.get(phase, 0.0) >= cell_ms / 10 else IDLE


def numbers(snapshot: BatchSnapshot) -> Sequence[tuple[str, str]]:
    """Names and values of what stands above the timeline."""
    return (
        ("scheduler", without_controls(" ".join(snapshot.scheduler.split()))),
        ("running", f"{snapshot.running}/{snapshot.slots}"),
        ("waiting", str(snapshot.queue_depth)),
        ("tokens/s", f"{snapshot.tokens_per_s:.1f}"),
        ("utilisation", percent(snapshot.slot_utilization)),
        ("waste", percent(snapshot.waste_fraction)),
    )


def percent(share: float | None) -> str:
    """A share of one; `-` where there is nothing to share."""
    return "-" if share is None else f"{100 * share:.0f}%"
