"""The cheapest setting that carries a stated rate within an SLO, by simulation in virtual time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from wsbatch_bench.plan.planner import Planner, PoolCapacity, Workload, capacity
from wsbatch_bench.stability import Saturation
from wsbatch_bench.sweep.cell import CellResult
from wsbatch_bench.sweep.setting import Costs, Setting
from wsbatch_bench.sweep.slo import Slo, Verdict

_LONGER = 4  # times as many requests where so many leave it undecided
_ROUNDS = 3
_TOKEN_S = 8e-6  # of CPU, for each output token that is simulated


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting at the rate. `again` is on another trace than the others: the confirmation of what passed."""

    setting: Setting
    cell: CellResult
    verdict: Verdict
    again: bool = False


@dataclass(frozen=True)
class Search:
    """What to look for, and in what.

    Attributes:
        costs: of a step, by scheduler.
        slo: what must hold.
        workload: what is asked; an open loop.
        rate: requests a second.
        measured: requests of a trial, at first.
        seed: of the traces; the confirmation uses the next one.
        saturations: of the settings, as far as they are known.
    """

    costs: Costs
    slo: Slo
    workload: Workload
    rate: float
    measured: int
    seed: int = 0
    saturations: dict[Setting, Saturation] = field(default_factory=dict, repr=False, compare=False)

    def estimate_s(self, settings: Sequence[Setting]) -> tuple[float, float]:
        """About how long it takes: where every setting is tried once, and where all stay undecided to the end."""
        once_s = 0.0
        for setting in settings:
            planner = self._planner(setting, self.measured)
            once_s += planner.tokens(min(self.rate, planner.most)) * _TOKEN_S
        return once_s, once_s * sum(_LONGER**round_ for round_ in range(_ROUNDS))

    def run(self, settings: Sequence[Setting]) -> Iterator[Trial]:
        """Trials as they come, the smallest batch first; the last one is a confirmed pass where there is any.

        The cheapest is the smallest batch: what a batch may hold is memory that is kept for it. Of equal batches the
        shorter wait, then the lower p95 end to end. What so many requests leave undecided is tried with four, and with
        sixteen times as many; what passes must pass on another trace, too: a winner is picked for its luck as well.
        """
        by_batch = attrgetter("max_batch_size")
        for _, group in groupby(sorted(settings, key=by_batch), key=by_batch):
            left = list(group)
            for round_ in range(_ROUNDS):
                measured = self.measured * _LONGER**round_
                trials = []
                for setting in left:
                    trials.append(self._trial(setting, measured))
                    yield trials[-1]
                passed = sorted(
                    (trial for trial in trials if trial.verdict == "pass"),
                    key=lambda trial: (trial.setting.max_wait_ms, trial.cell.e2e_p95_s),
                )
                for trial in passed:
                    confirmation = self._trial(trial.setting, measured, again=True)
                    yield confirmation
                    if confirmation.verdict == "pass":
                        return
                left = [trial.setting for trial in trials if trial.verdict != "fail"]

    def strongest(self, settings: Sequence[Setting]) -> tuple[Setting, PoolCapacity]:
        """The setting whose full batches do most, and what it carries within the SLO."""
        planners = [self._planner(setting, self.measured) for setting in settings]
        best = max(planners, key=lambda planner: planner.most)
        return best.setting, capacity(best, 1)

    def _trial(self, setting: Setting, measured: int, *, again: bool = False) -> Trial:
        cell = self._planner(setting, measured).measure(1, self.rate, another=again)
        return Trial(setting, cell, self.slo.judge(cell), again)

    def _planner(self, setting: Setting, measured: int) -> Planner:
        return Planner(self.costs, setting, self.slo, self.workload, measured, self.seed, self.saturations)
