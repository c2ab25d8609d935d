"""Overload: what a server still does when more is asked of it than it can do, class by class. In virtual time."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import repeat
from math import isnan, nan

from lab_tools.impatient import GAVE_UP, ImpatientTarget, Manners
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.quantiles import observed_quantile
from wsbatch_bench.sweep.setting import Costs, Setting
from wsbatch_bench.sweep.stage import VirtualStage, open_virtual_target, run_virtual

LOADS = (0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0)

_PROBE = 1000  # requests that measure the capacity
_MORE_CONNECTIONS = 64  # for requests that are being refused


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class at one load. Shares are of its clients, seconds count from when they were due.

    Attributes:
        priority: the class.
        clients: how many were measured.
        goodput: of them and their like, answered in full and in time, per second.
        ttft_p95_s, e2e_p95_s: of those that were answered; nan where too few were.
        outcomes: how they ended: `answered`, or the code of their last error.
    """

    priority: int
    clients: int
    goodput: float
    ttft_p95_s: float
    e2e_p95_s: float
    outcomes: dict[str, int]

    def share(self, *outcomes: str) -> float:
        """The share that ended in one of these ways."""
        return sum(self.outcomes.get(name, 0) for name in outcomes) / self.clients if self.clients else nan


@dataclass(frozen=True, slots=True)
class Point:
    """One offered load.

    Attributes:
        load: clients that come, over the capacity.
        rate: the same per second.
        attempts: requests per second: more than `rate` where clients come back.
        classes: the figures of each class, the most urgent first.
    """

    load: float
    rate: float
    attempts: float
    classes: tuple[ClassResult, ...]

    @property
    def goodput(self) -> float:
        """Clients per second that were answered in full and in time."""
        return sum(each.goodput for each in self.classes)


@dataclass(frozen=True)
class Overload:
    """What is measured.

    Attributes:
        costs: of the simulated model's steps.
        setting: of the server.
        trace: the clients' requests, at unit rate.
        manners: of the clients; those of a storm come back, too.
        warmup_s, measured_s: of each point.
        seed: of the clients' classes and pauses.
    """

    costs: Costs
    setting: Setting
    trace: Trace
    manners: Manners
    warmup_s: float
    measured_s: float
    seed: int = 0

    def capacity(self) -> float:
        """Requests a second that are done while a full batch is always waiting."""
        size = self.setting.max_batch_size
        closed = replace(self.trace, arrivals=f"closed:clients={2 * size}")
        plan = LoadPlan(trace=closed, rate=1.0, warmup=2 * size, measured=_PROBE)
        return summarise(VirtualStage(self.costs).run(self.setting, plan)).served_requests_per_s

    def measure(self, load: float, capacity: float, *, tries: int = 1) -> Point:
        """Put this load on a server of its own. Equal runs give equal results."""
        rate = load * capacity
        plan = LoadPlan(
            trace=self.trace,
            rate=rate,
            warmup=round(rate * self.warmup_s),
            measured=max(1, round(rate * self.measured_s)),
        )
        manners = replace(self.manners, tries=tries)

        async def main() -> tuple[LoadRun, Counter[str]]:
            config = self.setting.config(model="simulated")
            # Open before the load comes, as with clients that stay: a full server refuses new connections unheard.
            held = config.max_batch_size + config.max_queue_requests + _MORE_CONNECTIONS
            costs = self.costs[self.setting.scheduler]
            async with open_virtual_target(config, costs, connections=held) as (target, _):
                impatient = ImpatientTarget(target, manners, self.seed)
                return await run_load(impatient, plan), impatient.outcomes

        run, outcomes = run_virtual(main)
        lasted_s = max(record.ended_s for record in run.records)
        return Point(load, rate, outcomes.total() / lasted_s, _by_class(run, manners))


def measure_all(
    overload: Overload,
    capacity: float,
    loads: Sequence[float],
    *,
    storm: float | None = None,
    tries: int = 5,
    jobs: int = 1,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[list[Point], Point | None]:
    """Every load, and one of clients that come back up to `tries` times in all; `jobs` processes at once."""
    wanted = [(load, 1) for load in loads] + ([] if storm is None else [(storm, tries)])
    points: list[Point] = []
    # In processes of their own only where that is asked for.
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        for point in (map if pool is None else pool.map)(
            _measure, repeat(overload), repeat(capacity), *zip(*wanted, strict=True)
        ):
            points.append(point)
            on_point(point)
    return (points, None) if storm is None else (points[:-1], points[-1])


def _measure(overload: Overload, capacity: float, load: float, tries: int) -> Point:
    return overload.measure(load, capacity, tries=tries)


def _by_class(run: LoadRun, manners: Manners) -> tuple[ClassResult, ...]:
    start_s, end_s = run.window_s
    results = []
    for priority in sorted(priority for priority, _ in manners.classes):
        own = [record for record in run.measured if record.priority == priority]
        good = [r for r in run.records if r.priority == priority and r.ok and start_s <= r.ended_s <= end_s]
        results.append(
            ClassResult(
                priority,
                len(own),
                len(good) / (end_s - start_s),
                _p95(own, lambda record: record.ttft_s),
                _p95(own, lambda record: record.e2e_s),
                dict(Counter(record.error or "answered" for record in own)),
            )
        )
    return tuple(results)


def _p95(records: Sequence[Record], value: Callable[[Record], float]) -> float:
    """Of those that were answered."""
    values = [value(record) for record in records if record.ok]
    return observed_quantile(values, 0.95) if len(values) >= 20 else nan


_REFUSED, _DROPPED = ("queue_full",), ("shed", "queue_timeout")


def share_of_peak(storm: Point, points: Sequence[Point]) -> float:
    """The storm's goodput over the best of those without one."""
    return storm.goodput / max(point.goodput for point in points)


def overload_table(points: Sequence[Point], storm: Point | None) -> list[str]:
    """Markdown, a line for each load; what differs by class as `a · b · c`, the most urgent first."""
    head = [
        "offered",
        "requests/s",
        "goodput/s",
        "by class",
        "answered",
        "refused",
        "dropped from the queue",
        "gave up",
    ]
    head += ["TTFT p95, s", "end to end p95, s"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for point in [*points, *([] if storm is None else [storm])]:
        cells = [
            f"{point.load:g}×" + (", coming back" if point is storm else ""),
            f"{point.attempts:.3g}",
            f"{point.goodput:.3g}",
            _each(point, lambda each: f"{each.goodput:.2g}"),
            _each(point, lambda each: f"{each.share('answered'):.0%}"),
            _each(point, lambda each: f"{each.share(*_REFUSED):.0%}"),
            _each(point, lambda each: f"{each.share(*_DROPPED):.0%}"),
            _each(point, lambda each: f"{each.share(GAVE_UP):.0%}"),
            _each(point, lambda each: _seconds(each.ttft_p95_s)),
            _each(point, lambda each: _seconds(each.e2e_p95_s)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def overload_rows(points: Sequence[Point], storm: Point | None) -> list[dict[str, object]]:
    """The same as plain figures, a row for each class at each load."""
    return [
        {
            "load": point.load,
            "comes_back": point is storm,
            "rate": f"{point.rate:.6g}",
            "attempts": f"{point.attempts:.6g}",
            "priority": each.priority,
            "clients": each.clients,
            "goodput": f"{each.goodput:.6g}",
            "ttft_p95_s": f"{each.ttft_p95_s:.6g}",
            "e2e_p95_s": f"{each.e2e_p95_s:.6g}",
            "answered": f"{each.share('answered'):.6g}",
            "refused": f"{each.share(*_REFUSED):.6g}",
            "dropped": f"{each.share(*_DROPPED):.6g}",
            "gave_up": f"{each.share(GAVE_UP):.6g}",
        }
        for point in [*points, *([] if storm is None else [storm])]
        for each in point.classes
    ]


def _each(point: Point, text: Callable[[ClassResult], str]) -> str:
    return " · ".join(map(text, point.classes))


def _seconds(value: float) -> str:
    return "–" if isnan(value) else f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
