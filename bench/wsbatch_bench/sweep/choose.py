"""From a sweep to a setting: the one that carries the highest rate within an SLO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.slo import Slo
from wsbatch_bench.sweep.stage import serve_command

REFINED = 16
"""Cells that a choice in virtual time measures beyond the sweep's grid, at most."""

_FINE = 1.02
_CONFIRMATIONS = 12


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a setting carries within the SLO.

    Attributes:
        setting: the setting.
        passed: the highest rate at which it certainly meets the SLO, with nothing but passes below it; 0 for none.
        open_until: the lowest rate above that at which it certainly does not; infinite where none was seen. Between
            the two it is undecided or was not measured.
        at: the cell at `passed`; None for none.
        beyond: the next cell above it; None for none.
        confirmed: whether it passed there on a second trace, too: the best of many is partly the luckiest.
    """

    setting: Setting
    passed: float
    open_until: float
    at: CellResult | None
    beyond: CellResult | None
    confirmed: bool = False

    @property
    def ceiling(self) -> float:
        """A rate that it does not certainly carry: one that was measured, or its capacity; infinite where none is."""
        rates = [] if self.beyond is None else [self.beyond.rate]
        if self.at is not None and isfinite(self.at.capacity_low):
            rates.append(self.at.capacity_low)
        return min(rates, default=inf)

    @property
    def next_rate(self) -> float:
        """The rate whose measurement would tell most."""
        rate = (self.passed + self.ceiling) / 2 if isfinite(self.ceiling) else 2 * self.passed
        return float(f"{rate:.4g}")

    @property
    def order(self) -> tuple[float, int, float, float, str]:
        """Best first: the highest rate by its lower bound, the smaller batch, the smaller wait, the lower p95."""
        setting = self.setting
        p95_s = inf if self.at is None else self.at.e2e_p95_s
        return (-self.passed, setting.max_batch_size, setting.max_wait_ms, p95_s, setting.label)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and every setting's capacity, best first. `chosen` is None where no cell passes."""

    slo: Slo
    capacities: tuple[Capacity, ...]

    @property
    def chosen(self) -> Capacity | None:
        """The best."""
        return self.capacities[0] if self.capacities and self.capacities[0].passed > 0 else None

    @property
    def runner_up(self) -> Capacity | None:
        """The second best."""
        second = self.capacities[1:2]
        return second[0] if second and second[0].passed > 0 else None

    @property
    def undecided(self) -> list[CellResult]:
        """Cells above the choice that might carry more: it could be beaten by what is not known."""
        floor = self.chosen.passed if self.chosen else 0.0
        return [
            each.beyond
            for each in self.capacities
            if each.beyond is not None and each.beyond.rate > floor and self.slo.judge(each.beyond) == "undecided"
        ]

    def why(self) -> str:
        """In one sentence, why the chosen one and not the runner-up."""
        best, second = self.chosen, self.runner_up
        if best is None or best.at is None:
            return "no setting certainly meets the SLO at any rate that was measured"
        if second is None or second.at is None:
            return "no other setting certainly meets the SLO at any rate that was measured"
        if best.passed > second.passed:
            beyond = (
                "" if second.beyond is None else f" (at {second.beyond.rate:.4g} it is {self.slo.judge(second.beyond)})"
            )
            return f"{second.setting.label} carries {second.passed:.4g} requests/s within the SLO{beyond}"
        if best.setting.max_batch_size != second.setting.max_batch_size:
            return "both carry the same rate; the smaller batch keeps more room"
        if best.setting.max_wait_ms != second.setting.max_wait_ms:
            return "both carry the same rate with the same batch; the shorter wait costs less"
        lower, higher = best.at.e2e_p95_s, second.at.e2e_p95_s
        return f"both carry the same rate; its p95 end to end is {lower:.3g} s, not {higher:.3g} s"


def choose(cells: Sequence[CellResult], slo: Slo) -> Choice:
    """Judge every cell, and rank the settings."""
    by_setting: dict[Setting, list[CellResult]] = {}
    for cell in cells:
        by_setting.setdefault(cell.setting, []).append(cell)
    capacities = [
        _capacity(setting, sorted(own, key=lambda cell: cell.rate), slo) for setting, own in by_setting.items()
    ]
    return Choice(slo, tuple(sorted(capacities, key=lambda capacity: capacity.order)))


def choice_lines(choice: Choice, meta: dict[str, Any]) -> list[str]:
    """What was chosen and why, for a terminal or a report."""
    lines = [f"SLO        {choice.slo.text}"]
    best, second = choice.chosen, choice.runner_up
    if best is None or best.at is None:
        lines.append(f"chosen     none: {choice.why()}")
    else:
        upper = "" if not isfinite(best.open_until) else f", and not {best.open_until:.4g}"
        lines.append(f"chosen     {best.setting.label}: carries {best.passed:.4g} requests/s within the SLO{upper}")
        lines.append(f"           {'seen on two traces' if best.confirmed else 'seen on one trace'}")
        lines += [f"           {bound.explain(best.at)}" for bound in choice.slo.bounds]
        lines.append(f"runner-up  {'none' if second is None else second.setting.label}: {choice.why()}")
        lines.append(f"serve it   {serve_command(meta['model'], best.setting, meta.get('serve_flags', ()))}")
    for cell in choice.undecided:
        lines.append(f"undecided  {cell.label} at {cell.rate:.4g} requests/s: measure more requests to tell")
    return lines


def _capacity(setting: Setting, cells: Sequence[CellResult], slo: Slo) -> Capacity:
    """`cells` by rate. Where a rate does not pass on one trace, it does not pass."""
    passes = [cell for cell in cells if slo.judge(cell) == "pass"]
    beyond = next((cell for cell in cells if slo.judge(cell) != "pass"), None)
    failed = min((cell.rate for cell in cells if slo.judge(cell) == "fail"), default=inf)
    below = [cell for cell in passes if beyond is None or cell.rate < beyond.rate]
    if not below:
        return Capacity(setting, 0.0, failed, None, beyond)
    rate = below[-1].rate
    at = next(cell for cell in below if cell.rate == rate)
    # Who passes at a higher rate passes here, too.
    return Capacity(setting, rate, failed, at, beyond, len({cell.seed for cell in passes if cell.rate >= rate}) > 1)


Measure = Callable[[Cell], CellResult]


def refine(cells: list[CellResult], slo: Slo, measure: Measure, *, rounds: int) -> list[CellResult]:
    """Measure at most `rounds` more cells, each of the setting that could carry most; of equals, the larger batch.

    Its rate is halfway between what passes and what does not, or twice what passes where nothing was seen to fail.
    The results are added to a copy of `cells`. Gaps of a fiftieth are left, and settings that cannot be the best.
    """
    cells = list(cells)
    for _ in range(rounds):
        capacities = choose(cells, slo).capacities
        floor = max((each.passed for each in capacities), default=0.0)
        candidates = [each for each in capacities if each.passed > 0 and each.ceiling > max(floor, _FINE * each.passed)]
        if not candidates:
            break
        best = max(candidates, key=lambda each: (each.next_rate, each.passed, each.setting.max_batch_size))
        cells.append(measure(_at(best.setting, best.next_rate, cells)))
    return cells


def confirm(cells: list[CellResult], slo: Slo, measure: Measure, measure_again: Measure) -> list[CellResult]:
    """Measure the winner on another trace; where it does not pass there, go down to what does, and narrow the gap.

    `measure_again` is `measure` with another trace. The results are added to a copy of `cells`.
    """
    cells, first, failed = list(cells), cells[0].seed, False
    for _ in range(_CONFIRMATIONS):
        chosen = choose(cells, slo).chosen
        if chosen is None or chosen.at is None:
            break
        if not chosen.confirmed:
            there = _at(chosen.setting, chosen.passed, cells)
            cells.append(measure_again(there) if chosen.at.seed == first else measure(there))
            failed = failed or slo.judge(cells[-1]) != "pass"
            continue
        narrowed = refine(cells, slo, measure_again, rounds=1) if failed else cells
        if len(narrowed) == len(cells):
            break
        cells = narrowed
    return cells


def settle(
    cells: list[CellResult], slo: Slo, measure: Measure, measure_again: Measure | None, *, rounds: int
) -> list[CellResult]:
    """Refine with at most `rounds` cells; confirm the winner where there is another trace to measure it on."""
    cells = refine(cells, slo, measure, rounds=rounds)
    return cells if measure_again is None else confirm(cells, slo, measure, measure_again)


def _at(setting: Setting, rate: float, cells: Sequence[CellResult]) -> Cell:
    reference = next((cell.rate / cell.fraction for cell in cells if cell.fraction), 1.0)
    return Cell(setting, rate / reference, rate)
