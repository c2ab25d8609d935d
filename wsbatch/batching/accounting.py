"""What batching costs: issued and useful token slots, and slot utilisation. The same for every scheduler.

A *slot* is one row of one step. A step of a padded batch issues a slot for every row in its tensors, padding and
finished rows included; a slot is useful when somebody asked for its token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step computed, in token slots.

    Attributes:
        phase: decode, or prefill where any prompt token was computed.
        rows: rows in the step.
        issued_tokens: token slots computed, padding, finished rows and recomputation included.
        useful_tokens: of those, the ones somebody asked for.
        prefill_tokens: of the issued, those of prompts (padding included); the others are decode rows.
        seconds: time in the model.
    """

    phase: str
    rows: int
    issued_tokens: int
    useful_tokens: int
    prefill_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a running request's company cost so far; see `messages.BatchReport`."""

    max_size: int
    mean_size: float
    issued_tokens: int
    useful_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class PhaseTotals:
    """Sums over the steps of one phase. `utilization_seconds` is each step's utilisation times its duration."""

    steps: int = 0
    rows: int = 0
    issued_tokens: int = 0
    useful_tokens: int = 0
    seconds: float = 0.0
    utilization_seconds: float = 0.0

    def add(self, cost: StepCost) -> None:
        """Count one step."""
        self.steps += 1
        self.rows += cost.rows
        self.issued_tokens += cost.issued_tokens
        self.useful_tokens += cost.useful_tokens
        self.seconds += cost.seconds
        self.utilization_seconds += cost.seconds * cost.useful_tokens / cost.issued_tokens

    @property
    def waste_fraction(self) -> float:
        """Share of the issued token slots nobody asked for, every slot counting the same; 0 before the first step."""
        return 1 - self.useful_tokens / self.issued_tokens if self.issued_tokens else 0.0

    @property
    def slot_utilization(self) -> float:
        """Useful over issued, every slot counting the same."""
        return 1 - self.waste_fraction

    @property
    def time_weighted_utilization(self) -> float:
        """Mean over time of a step's useful over issued: long steps count for more. 0 before the first step."""
        return self.utilization_seconds / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Company:
    """The ledger as it stood when a request joined, and the largest step since."""

    steps: int
    rows: int
    issued_tokens: int
    useful_tokens: int
    max_size: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Ledger:
    """Running sums of all steps, and for each running request what was spent while it ran."""

    prefill: PhaseTotals = field(default_factory=PhaseTotals)
    decode: PhaseTotals = field(default_factory=PhaseTotals)
    _company: dict[int, _Company] = field(default_factory=dict)

    def join(self, key: int, *, cached_tokens: int = 0) -> None:
        """The request takes part in steps from now on; a request that joins again keeps its first entry."""
        if key not in self._company:
            self._company[key] = _Company(*self._sums(), cached_tokens=cached_tokens)

    def leave(self, key: int) -> RowReport | None:
        """Forget the request; its last report."""
        report = self.report(key)
        self._company.pop(key, None)
        return report

    def record(self, cost: StepCost, keys: Iterable[int]) -> None:
        """Count one step that these requests took part in."""
        (self.decode if cost.phase == "decode" else self.prefill).add(cost)
        for key in keys:
            company = self._company.get(key)
            if company is not None:
                company.max_size = max(company.max_size, cost.rows)

    def report(self, key: int) -> RowReport | None:
        """What all the steps since this request joined cost; None for one that is not here."""
        company = self._company.get(key)
        if company is None:
            return None
        steps, rows, issued, useful = self._sums()
        steps -= company.steps
        return RowReport(
            max_size=company.max_size,
            mean_size=(rows - company.rows) / steps if steps else 0.0,
            issued_tokens=issued - company.issued_tokens,
            useful_tokens=useful - company.useful_tokens,
            cached_tokens=company.cached_tokens,
        )

    def _sums(self) -> tuple[int, int, int, int]:
        first, second = self.prefill, self.decode
        return (
            first.steps + second.steps,
            first.rows + second.rows,
            first.issued_tokens + second.issued_tokens,
            first.useful_tokens + second.useful_tokens,
        )
