"""The sweep: every setting at every rate, from one trace; results kept as they come, so that it can be resumed."""

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

from wsbatch.batching.costs import CostModel
from wsbatch_bench.load.generator import LoadPlan
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.load.trace import REPLAY, Trace
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.quantiles import Interval
from wsbatch_bench.stability import BusyTime, Saturation
from wsbatch_bench.sweep.cell import Cell, CellResult, cell_result, from_json, to_json
from wsbatch_bench.sweep.saturation import saturate, when_full
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.stage import Stage

FRACTIONS = (0.3, 0.7, 1.1)
REAL = 300
"""Requests of a cell in real time: zero failures of fewer than 299 do not show that 99 % succeed."""

# Requests of a cell in virtual time: as many as its intervals need.
LEAST_VIRTUAL, MOST_VIRTUAL = 10_000, 30_000
_PROBE = 100  # requests under saturation, at least
_COOL_DOWN = 1000  # requests after the measured ones, before the trace begins anew
_UNDECIDED = 1000  # requests of a cell so near to its capacity, or beyond it, that no run would tell
_VIRTUAL_TOKEN_S = 7e-6  # of CPU for an output token in virtual time
_VIRTUAL_FIXED_S = 1.0
_REAL_TOKEN_S = 0.05  # of the last answers, which are waited for
_REAL_FIXED_S = 10.0  # for a server to start and to end


@dataclass(frozen=True)
class Sweep:
    """What to measure, and with what.

    Attributes:
        stage: where.
        trace: of unit rate; every cell uses it, rescaled. It is drawn on where a cell needs more of it.
        warmup, measured: requests of each cell.
        predictor: in virtual time, its figures stand beside the measured ones; None for none.
        request_timeout_s: of each request; infinite in virtual time, where nothing hangs.
        most: measured requests where the intervals need more than `measured`.
    """

    stage: Stage
    trace: Trace
    warmup: int
    measured: int
    predictor: PoolStage | None = None
    request_timeout_s: float = inf
    most: int = 0
    saturations: dict[Setting, Saturation] = field(default_factory=dict, repr=False, compare=False)

    def key(self, cell: Cell) -> str:
        """Names a cell's result: everything that it depends on."""
        lengths = (self.warmup, self.measured, self.most)
        what = (repr(self.stage), repr(self.predictor), self.trace.sha256, lengths, repr(cell))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    def measure(self, cell: Cell) -> CellResult:
        """Run one cell. The setting's capacity is measured first, where it is not known."""
        saturation = self.saturation(cell.setting)
        warmup, measured = self._length(cell, saturation)
        plan = LoadPlan(
            trace=self.trace.longer(warmup + measured + _COOL_DOWN),
            rate=cell.rate,
            warmup=warmup,
            measured=measured,
            stop_unstable=True,
            request_timeout_s=self.request_timeout_s,
        )
        summary = summarise(self.stage.run(cell.setting, plan))
        result = cell_result(
            cell,
            summary,
            engine=self.stage.name,
            saturation=saturation,
            dispersion=self.trace.dispersion,
            seed=self.trace.seed,
        )
        if self.predictor is None:
            return result
        costs = self.served_costs(cell.setting)
        predictor = replace(self.predictor, costs={cell.setting.scheduler: costs})
        predicted = summarise(predictor.run(cell.setting, replace(plan, request_timeout_s=inf)))
        return replace(
            result,
            predicted_throughput=predicted.output_throughput,
            predicted_e2e_p95_s=predicted.e2e.p95.value,
            served_gap_s=costs.tau_s - self.predictor.costs[cell.setting.scheduler].tau_s,
        )

    def served_costs(self, setting: Setting) -> CostModel:
        """The predictor's costs, with what serving added to each step while the setting was saturated."""
        assert self.predictor is not None
        costs, busy = self.predictor.costs[setting.scheduler], self.saturation(setting).busy
        return costs if busy is None else replace(costs, tau_s=costs.tau_s + busy.gap_s(costs))

    def probe_requests(self, size: int) -> int:
        """How many requests it takes to measure the capacity of batches of this size."""
        least = max(_PROBE, 8 * size)
        return least if self.stage.name == "real" else max(least, min(max(self.measured, self.most), LEAST_VIRTUAL))

    def saturation(self, setting: Setting) -> Saturation:
        """What this setting does when the next batch is always waiting; measured once, whatever its wait."""
        full = when_full(setting)
        if full not in self.saturations:
            measured = self.probe_requests(setting.max_batch_size)
            self.saturations[full] = saturate(
                self.stage, full, self.trace, measured, request_timeout_s=self.request_timeout_s
            )
        return self.saturations[full]

    def capacity(self, setting: Setting) -> float:
        """The same as requests a second."""
        return self.saturation(setting).rate.value

    def closer(self) -> "Sweep":
        """The same with twice as many requests at least, for cells on which a choice rests, where it may have them."""
        measured = max(self.measured, min(self.most, 2 * self.measured))
        return replace(self, measured=measured, warmup=self.warmup * measured // self.measured)

    def again(self) -> "Sweep | None":
        """The same with another trace of the same law, on the capacities that are known; None for a replayed trace."""
        if self.trace.arrivals == REPLAY:
            return None
        return replace(self, trace=self.trace.another(self.trace.seed + 1))

    def estimate_s(self, cell: Cell) -> float:
        """How long this cell will take on this machine: the schedule's own length, or in virtual time the CPU's."""
        requests = self.warmup + self.measured
        some = self.trace.entries[:requests]  # the trace is drawn on where it is too short
        virtual_s = virtual_run_s(requests * sum(entry.output_tokens for entry in some) / len(some))
        if self.stage.name == "virtual":
            return virtual_s
        longest = max(entry.output_tokens for entry in self.trace.entries)
        predicting_s = virtual_s if self.predictor is not None else 0.0
        return real_run_s(requests / cell.rate, longest) + predicting_s

    def _length(self, cell: Cell, saturation: Saturation) -> tuple[int, int]:
        """Requests of the warm-up, and measured ones: as many as the intervals need, if that is allowed."""
        dispersion = self.trace.dispersion
        if saturation.least_length(cell.rate, dispersion) > max(self.measured, self.most):
            return self.warmup, min(self.measured, _UNDECIDED)
        needed = ceil(saturation.run_length(cell.rate, dispersion))
        more = max(self.measured, min(self.most, needed))
        return self.warmup * more // self.measured, more


def virtual_run_s(tokens: float) -> float:
    """About how long it takes to simulate so many output tokens, in seconds."""
    return _VIRTUAL_FIXED_S + tokens * _VIRTUAL_TOKEN_S


def real_run_s(schedule_s: float, longest_tokens: int) -> float:
    """About how long a schedule takes on a server of its own, in seconds: it starts, and the last answer is awaited."""
    return schedule_s + longest_tokens * _REAL_TOKEN_S + _REAL_FIXED_S


def grid(settings: Sequence[Setting], capacity: float, fractions: Sequence[float] = FRACTIONS) -> list[Cell]:
    """Every setting at every fraction of the capacity."""
    return [
        Cell(setting, fraction, float(f"{fraction * capacity:.4g}")) for setting in settings for fraction in fractions
    ]


class Results:
    """The results of a sweep on disk, one JSON line each, keyed by what they depend on; `put` alone writes.

    Raises ValueError, naming the line, where the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        self._whole = True
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                self._whole = False  # a process that was killed wrote it: the same will be measured again
                break
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a result ({type(error).__name__}: {error})") from None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Any:
        """What is known under this key, or None."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Remember it, here and on disk."""
        self._known[key] = value
        if self._whole:
            with self._path.open("a") as file:
                file.write(_line(key, value))
            return
        whole = self._path.with_suffix(".whole")
        whole.write_text("".join(_line(*each) for each in self._known.items()))
        whole.replace(self._path)
        self._whole = True


def _line(key: str, value: Any) -> str:
    return json.dumps({"key": key, "value": value}) + "\n"


def remembering(sweep: Sweep, results: Results) -> Callable[[Cell], CellResult]:
    """`sweep.measure` that keeps what it measured."""

    def measure(cell: Cell) -> CellResult:
        key = sweep.key(cell)
        known = results.get(key)
        if known is None:
            _know_saturation(sweep, cell.setting, results)
            result = sweep.measure(cell)
            results.put(key, to_json(result))
            return result
        return from_json(known)

    return measure


def run_cells(
    sweep: Sweep, cells: Sequence[Cell], results: Results, *, jobs: int = 1
) -> Iterator[tuple[int, CellResult]]:
    """Each cell's index and result as it comes: first what is known, then what is measured and put into `results`.

    `jobs` processes measure at once (in virtual time only: there it changes nothing but the order).
    """
    missing = []
    for index, cell in enumerate(cells):
        known = results.get(sweep.key(cell))
        if known is None:
            missing.append(index)
        else:
            yield index, from_json(known)
    for cell in (cells[index] for index in missing):
        _know_saturation(sweep, cell.setting, results)
    for index, result in _measure(sweep, cells, missing, jobs):
        results.put(sweep.key(cells[index]), to_json(result))
        yield index, result


def _know_saturation(sweep: Sweep, setting: Setting, results: Results) -> None:
    """Before cells are given to processes, so that it is measured once, and kept for a resumed sweep."""
    full = when_full(setting)
    key = sweep.key(Cell(full, inf, inf))
    known = results.get(key)
    if known is not None:
        busy = known["busy"] and BusyTime(**known["busy"])
        sweep.saturations[full] = Saturation(Interval(**known["rate"]), known["dispersion"], busy)
    elif full not in sweep.saturations:
        results.put(key, asdict(sweep.saturation(full)))


def _measure(sweep: Sweep, cells: Sequence[Cell], missing: list[int], jobs: int) -> Iterator[tuple[int, CellResult]]:
    if jobs == 1:
        for index in missing:
            yield index, sweep.measure(cells[index])
        return
    # Ctrl-C is the parent's: it keeps what has come.
    with ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        indices = {pool.submit(sweep.measure, cells[index]): index for index in missing}
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
