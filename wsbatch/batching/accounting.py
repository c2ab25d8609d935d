"""What batching costs: issued and useful token slots, and slot utilisation. The same for every scheduler.

A *slot* is one row of one step. A step of a padded batch issues a slot for every row in its tensors, padding and
finished rows included; a slot is useful when somebody asked for its token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from wsbatch.batching.costs import StepCost, StepCostFit


@dataclass(frozen=True, slots=True)
class RowReport:
    """What the steps of a running request cost so far; see `messages.BatchReport`."""

    max_size: int
    mean_size: float
    issued_tokens: int
    useful_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class SlotTotals:
    """Sums over the steps that held such slots (of prompts, or of decodes)."""

    steps: int = 0
    issued_tokens: int = 0
    useful_tokens: int = 0

    def add(self, issued: int, useful: int) -> None:
        """Count one step's slots of this kind; a step without any does not count."""
        if issued:
            self.steps += 1
            self.issued_tokens += issued
            self.useful_tokens += useful

    @property
    def waste_fraction(self) -> float:
        """Share of the issued slots nobody asked for, every slot counting the same; 0 before the first step."""
        return 1 - self.useful_tokens / self.issued_tokens if self.issued_tokens else 0.0

    @property
    def slot_utilization(self) -> float:
        """Useful over issued, every slot counting the same."""
        return 1 - self.waste_fraction


@dataclass(slots=True)
class _AtJoin:
    """The ledger as it stood when a request joined, and the largest step since."""

    steps: int
    rows: int
    issued_tokens: int
    useful_tokens: int
    max_size: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Ledger:
    """Running sums of all steps, their fitted costs, and for each running request what was spent while it ran."""

    prefill: SlotTotals = field(default_factory=SlotTotals)
    decode: SlotTotals = field(default_factory=SlotTotals)
    steps: int = 0
    rows: int = 0
    costs: StepCostFit = field(default_factory=StepCostFit)
    _at_join: dict[int, _AtJoin] = field(default_factory=dict)

    def join(self, key: int, *, cached_tokens: int = 0) -> None:
        """The request takes part in steps from now on; a request that joins again keeps its first entry."""
        if key not in self._at_join:
            self._at_join[key] = _AtJoin(*self._sums(), cached_tokens=cached_tokens)

    def leave(self, key: int) -> RowReport | None:
        """Forget the request; its last report."""
        report = self.report(key)
        self._at_join.pop(key, None)
        return report

    def record(self, cost: StepCost, keys: Iterable[int]) -> None:
        """Count one step that these requests took part in."""
        self.steps += 1
        self.rows += cost.rows
        self.prefill.add(cost.prefill_tokens, cost.useful_prefill_tokens)
        self.decode.add(cost.decode_slots, cost.useful_decode_slots)
        self.costs.record(cost)
        for key in keys:
            joined = self._at_join.get(key)
            if joined is not None and joined.max_size < cost.rows:
                joined.max_size = cost.rows

    def report(self, key: int) -> RowReport | None:
        """What all the steps since this request joined cost; None for one that is not here."""
        joined = self._at_join.get(key)
        if joined is None:
            return None
        steps, rows, issued, useful = self._sums()
        steps -= joined.steps
        return RowReport(
            max_size=joined.max_size,
            mean_size=(rows - joined.rows) / steps if steps else 0.0,
            issued_tokens=issued - joined.issued_tokens,
            useful_tokens=useful - joined.useful_tokens,
            cached_tokens=joined.cached_tokens,
        )

    def _sums(self) -> tuple[int, int, int, int]:
        first, second = self.prefill, self.decode
        return (
            self.steps,
            self.rows,
            first.issued_tokens + second.issued_tokens,
            first.useful_tokens + second.useful_tokens,
        )
