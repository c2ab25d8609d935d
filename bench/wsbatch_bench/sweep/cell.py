"""One cell of a sweep: a setting at a rate, and what was measured there, flat enough for CSV."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import inf, nan
from pathlib import Path
from typing import Any

from wsbatch_bench.load.results import plain
from wsbatch_bench.load.summary import Summary
from wsbatch_bench.quantiles import Interval
from wsbatch_bench.stability import Saturation
from wsbatch_bench.sweep.setting import Setting


@dataclass(frozen=True, slots=True)
class Cell:
    """What to measure. `fraction` is the rate's share of the reference capacity."""

    setting: Setting
    fraction: float
    rate: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """What was measured. Seconds, tokens, requests; `*_low` and `*_high` bound at 95 % (success: one-sided).

    Attributes:
        offered: requests a second that the schedule asked for, beside the stated `rate`; tokens likewise.
        tpot_undefined: answers without a time per token, which its quantiles leave out.
        itl_p50_s, itl_p99_s, itl_longest_s: times between the frames of all answers; nan without any.
        verdict: stable, unstable or undecided; the capacity, `growth_fraction` and `little_ratio` are its grounds.
        predicted_throughput, predicted_e2e_p95_s: of the same cell in virtual time; nan where nobody asked.
        invalid: why not to believe it; empty for a valid cell.
        capacity: requests a second of this setting when the next batch is always waiting, with its 95 % interval; nan
            where nobody measured it.
        seed: of its trace.
        served_gap_s: what serving added to each step, in the prediction; nan where there is none.
    """

    engine: str
    scheduler: str
    max_batch_size: int
    max_wait_ms: float
    options: str
    label: str
    fraction: float
    rate: float
    sent: int
    completed: int
    request_throughput: float
    output_throughput: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p95_low_s: float
    ttft_p95_high_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    e2e_p95_low_s: float
    e2e_p95_high_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p95_low_s: float
    tpot_p95_high_s: float
    success: float
    success_low: float
    success_high: float
    slot_utilization: float
    waste_fraction: float
    mean_rows: float
    verdict: str
    growth_fraction: float
    little_ratio: float
    stopped_early: bool
    worst_lag_s: float
    invalid: str
    predicted_throughput: float = nan
    predicted_e2e_p95_s: float = nan
    offered: float = nan
    offered_prompt_tokens: float = nan
    offered_output_tokens: float = nan
    tpot_undefined: int = 0
    itl_p50_s: float = nan
    itl_p99_s: float = nan
    itl_longest_s: float = nan
    capacity: float = nan
    capacity_low: float = nan
    capacity_high: float = nan
    seed: int = 0
    served_gap_s: float = nan

    @property
    def setting(self) -> Setting:
        """What was measured."""
        options = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in json.loads(self.options))
        return Setting(self.scheduler, self.max_batch_size, self.max_wait_ms, options)

    @property
    def e2e_p95_error(self) -> float:
        """The prediction over the measurement, minus one."""
        return self.predicted_e2e_p95_s / self.e2e_p95_s - 1


def cell_result(
    cell: Cell,
    summary: Summary,
    *,
    engine: str,
    saturation: Saturation | None = None,
    dispersion: float = 1.0,
    seed: int = 0,
) -> CellResult:
    """Flatten a summary.

    Where the setting's saturation is known, it decides on the stability, and a run that is too short to have seen a
    busy spell bounds no latency from above. `dispersion` is that of the arrivals, `seed` that of the trace.
    """
    verdict, too_short = summary.stability.verdict, False
    rate = Interval(nan, nan, nan)
    if saturation is not None:
        rate = saturation.rate
        verdict = saturation.verdict(cell.rate, verdict)
        too_short = summary.sent < saturation.least_length(cell.rate, dispersion)
    latencies: dict[str, float] = {}
    for name, latency in (("ttft", summary.ttft), ("e2e", summary.e2e), ("tpot", summary.tpot)):
        latencies |= {
            f"{name}_p50_s": latency.p50,
            f"{name}_p95_s": latency.p95.value,
            f"{name}_p95_low_s": latency.p95.low,
            f"{name}_p95_high_s": inf if too_short else latency.p95.high,
        }
    return CellResult(
        engine=engine,
        scheduler=cell.setting.scheduler,
        max_batch_size=cell.setting.max_batch_size,
        max_wait_ms=cell.setting.max_wait_ms,
        options=json.dumps(cell.setting.options),
        label=cell.setting.label,
        fraction=cell.fraction,
        rate=cell.rate,
        sent=summary.sent,
        completed=summary.completed,
        request_throughput=summary.request_throughput,
        output_throughput=summary.output_throughput,
        **latencies,
        success=summary.success.value,
        success_low=summary.success.low,
        success_high=summary.success.high,
        slot_utilization=summary.slot_utilization,
        waste_fraction=summary.waste_fraction,
        mean_rows=summary.mean_rows,
        verdict=verdict,
        growth_fraction=summary.stability.growth.value,
        little_ratio=summary.stability.little_ratio,
        stopped_early=summary.stopped_early,
        worst_lag_s=summary.worst_lag_s,
        offered=summary.offered.requests_per_s,
        offered_prompt_tokens=summary.offered.prompt_tokens_per_s,
        offered_output_tokens=summary.offered.output_tokens_per_s,
        tpot_undefined=summary.tpot_undefined,
        itl_p50_s=summary.itl.p50,
        itl_p99_s=summary.itl.p99,
        itl_longest_s=summary.itl.longest,
        invalid="; ".join(summary.invalid),
        capacity=rate.value,
        capacity_low=rate.low,
        capacity_high=rate.high,
        seed=seed,
    )


def to_json(result: CellResult) -> dict[str, Any]:
    """As plain data; infinite and undefined numbers are null."""
    data: dict[str, Any] = plain(asdict(result))
    return data


def from_json(data: dict[str, Any]) -> CellResult:
    """The inverse of `to_json`. A null is undefined, or infinite in a quantile or bound of what requests have."""
    undefined: tuple[str, ...] = ("predicted", "itl")
    if 0 < data["completed"] == data.get("tpot_undefined", 0):
        undefined += ("tpot_p50", "tpot_p95_s")

    def read(key: str, value: Any) -> Any:
        if value is not None:
            return value
        had = "_p" in key or key.startswith("offered")
        return inf if had and not key.startswith(undefined) else nan

    return CellResult(**{key: read(key, value) for key, value in data.items()})


def write_csv(path: Path, results: Sequence[CellResult]) -> None:
    """One line a cell; infinite values are `inf`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [spec.name for spec in fields(CellResult)], lineterminator="\n")
        writer.writeheader()
        for result in results:
            writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in asdict(result).items()})
