"""The sweep: every setting at every rate, from one trace; results kept as they come, so that it can be resumed."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsbatch_bench.load.generator import LoadPlan
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.sweep.cell import Cell, CellResult, cell_result, from_json, to_json
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.stage import Stage

FRACTIONS = (0.3, 0.7, 1.1)
_PROBE = 100  # requests of a capacity probe
_VIRTUAL_TOKEN_S = 200e-6  # of CPU, both ends and the scheduler, for an output token in virtual time
_VIRTUAL_FIXED_S = 1.0


@dataclass(frozen=True)
class Sweep:
    """What to measure, and with what.

    Attributes:
        stage: where.
        trace: of unit rate; every cell uses it, rescaled.
        warmup, measured: requests of each cell.
        predictor: a stage in virtual time whose figures stand beside the measured ones; None for none.
    """

    stage: Stage
    trace: Trace
    warmup: int
    measured: int
    predictor: Stage | None = None

    def key(self, cell: Cell) -> str:
        """Names a cell's result: everything that it depends on."""
        what = (repr(self.stage), repr(self.predictor), self.trace.sha256, self.warmup, self.measured, repr(cell))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    def measure(self, cell: Cell) -> CellResult:
        """Run one cell."""
        plan = LoadPlan(
            trace=self.trace, rate=cell.rate, warmup=self.warmup, measured=self.measured, stop_unstable=True
        )
        result = cell_result(cell, summarise(self.stage.run(cell.setting, plan)), engine=self.stage.name)
        if self.predictor is None:
            return result
        predicted = summarise(self.predictor.run(cell.setting, plan))
        return replace(
            result,
            predicted_throughput=predicted.output_throughput,
            predicted_e2e_p95_s=predicted.e2e.p95.value,
        )

    def capacity(self, setting: Setting) -> float:
        """Requests a second that this setting does when the next batch is always waiting: twice as many clients."""
        closed = replace(self.trace, arrivals=f"closed:clients={2 * setting.max_batch_size}")
        measured = max(_PROBE, 4 * setting.max_batch_size)
        plan = LoadPlan(trace=closed, rate=1.0, warmup=2 * setting.max_batch_size, measured=measured)
        return summarise(self.stage.run(setting, plan)).served_requests_per_s

    def estimate_s(self, cell: Cell) -> float:
        """How long this cell will take on this machine: the schedule's own length, or in virtual time the CPU's."""
        requests = self.warmup + self.measured
        if self.stage.name == "virtual":
            tokens = sum(entry.output_tokens for entry in self.trace.entries[:requests])
            return _VIRTUAL_FIXED_S + tokens * _VIRTUAL_TOKEN_S
        longest = max(entry.output_tokens for entry in self.trace.entries)
        return requests / cell.rate + longest * 0.05 + 10.0


def grid(settings: Sequence[Setting], capacity: float, fractions: Sequence[float] = FRACTIONS) -> list[Cell]:
    """Every setting at every fraction of the capacity."""
    return [
        Cell(setting, fraction, float(f"{fraction * capacity:.4g}")) for setting in settings for fraction in fractions
    ]


class Results:
    """The results of a sweep on disk, one JSON line each, keyed by what they depend on."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if resume and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry["value"]
        else:
            path.write_text("")

    def get(self, key: str) -> Any:
        """What is known under this key, or None."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Remember it, here and on disk."""
        self._known[key] = value
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")


def run_cells(
    sweep: Sweep,
    cells: Sequence[Cell],
    results: Results,
    *,
    jobs: int = 1,
    on_result: Callable[[int, CellResult], None] = lambda index, result: None,
) -> list[CellResult]:
    """Measure what is not known yet; `jobs` processes at once (in virtual time only: there it changes nothing)."""
    if jobs > 1 and sweep.stage.name != "virtual":
        raise ValueError(f"jobs is {jobs}: must be 1 where the machine itself is measured")
    found: dict[int, CellResult] = {}

    def take(index: int, result: CellResult) -> None:
        found[index] = result
        on_result(index, result)

    missing = []
    for index, cell in enumerate(cells):
        known = results.get(sweep.key(cell))
        if known is None:
            missing.append(index)
        else:
            take(index, from_json(known))
    for index, result in _measure(sweep, cells, missing, jobs):
        results.put(sweep.key(cells[index]), to_json(result))
        take(index, result)
    return [found[index] for index in range(len(cells))]


def _measure(sweep: Sweep, cells: Sequence[Cell], missing: list[int], jobs: int) -> Iterator[tuple[int, CellResult]]:
    if jobs == 1:
        for index in missing:
            yield index, sweep.measure(cells[index])
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from zip(missing, pool.map(sweep.measure, [cells[index] for index in missing]), strict=True)
