"""The sweep: every setting at every rate, from one trace; results kept as they come, so that it can be resumed."""

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from math import inf
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
_REAL_TOKEN_S = 0.05  # of the last answers, which are waited for
_REAL_FIXED_S = 10.0  # for a server to start and to end


@dataclass(frozen=True)
class Sweep:
    """What to measure, and with what.

    Attributes:
        stage: where.
        trace: of unit rate; every cell uses it, rescaled.
        warmup, measured: requests of each cell.
        predictor: a stage in virtual time whose figures stand beside the measured ones; None for none.
        request_timeout_s: of each request; infinite in virtual time, where nothing hangs.
    """

    stage: Stage
    trace: Trace
    warmup: int
    measured: int
    predictor: Stage | None = None
    request_timeout_s: float = inf

    def key(self, cell: Cell) -> str:
        """Names a cell's result: everything that it depends on."""
        what = (repr(self.stage), repr(self.predictor), self.trace.sha256, self.warmup, self.measured, repr(cell))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    def measure(self, cell: Cell) -> CellResult:
        """Run one cell."""
        plan = LoadPlan(
            trace=self.trace,
            rate=cell.rate,
            warmup=self.warmup,
            measured=self.measured,
            stop_unstable=True,
            request_timeout_s=self.request_timeout_s,
        )
        result = cell_result(cell, summarise(self.stage.run(cell.setting, plan)), engine=self.stage.name)
        if self.predictor is None:
            return result
        predicted = summarise(self.predictor.run(cell.setting, replace(plan, request_timeout_s=inf)))
        return replace(
            result,
            predicted_throughput=predicted.output_throughput,
            predicted_e2e_p95_s=predicted.e2e.p95.value,
        )

    def probe_requests(self, size: int) -> int:
        """How many requests it takes to measure the capacity of batches of this size."""
        return max(_PROBE, 4 * size) + 2 * size

    def capacity(self, setting: Setting) -> float:
        """Requests a second that this setting does when the next batch is always waiting: twice as many clients."""
        closed = replace(self.trace, arrivals=f"closed:clients={2 * setting.max_batch_size}")
        warmup = 2 * setting.max_batch_size
        plan = LoadPlan(
            trace=closed,
            rate=1.0,
            warmup=warmup,
            measured=self.probe_requests(setting.max_batch_size) - warmup,
            request_timeout_s=self.request_timeout_s,
        )
        return summarise(self.stage.run(setting, plan)).served_requests_per_s

    def estimate_s(self, cell: Cell) -> float:
        """How long this cell will take on this machine: the schedule's own length, or in virtual time the CPU's."""
        requests = self.warmup + self.measured
        tokens = sum(entry.output_tokens for entry in self.trace.entries[:requests])
        virtual_s = virtual_run_s(tokens)
        if self.stage.name == "virtual":
            return virtual_s
        longest = max(entry.output_tokens for entry in self.trace.entries)
        predicting_s = virtual_s if self.predictor is not None else 0.0
        return real_run_s(requests / cell.rate, longest) + predicting_s


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
    for index, result in _measure(sweep, cells, missing, jobs):
        results.put(sweep.key(cells[index]), to_json(result))
        yield index, result


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
