"""Studies of waiting: the same trace through several settings, compared request by request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean

from wsbatch_bench.load.generator import LoadPlan, LoadRun
from wsbatch_bench.load.specs import Lengths, parse_arrivals
from wsbatch_bench.load.summary import Summary, summarise
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.quantiles import Interval, mean_interval
from wsbatch_bench.sweep.grid import real_run_s, virtual_run_s
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.stage import Stage

_BETTER, _WORSE, _UNSURE = "#0072b2", "#d55e00", "#888888"


@dataclass(frozen=True, slots=True)
class Scenario:
    """An arrival process by name; open ones at a fraction of the reference rate."""

    name: str
    arrivals: str
    fraction: float = 0.6


@dataclass(frozen=True, slots=True)
class Study:
    """What is compared: every setting in every scenario; the first setting is the base of each comparison."""

    title: str
    scenarios: tuple[Scenario, ...]
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One setting in one scenario.

    Attributes:
        change: of the mean end-to-end latency against the base, as a share of the base's mean: the mean over the
            requests of their own differences, with its 95 % interval. The same trace makes the pairs.
        predicted_mean_s, predicted_p95_s: of the same in virtual time; nan where nobody asked.
    """

    scenario: str
    setting: Setting
    summary: Summary
    change: Interval
    predicted_mean_s: float = nan
    predicted_p95_s: float = nan


def _dynamic(size: int, wait_ms: float, **options: object) -> Setting:
    return Setting("dynamic", size, wait_ms, tuple(sorted(options.items())))


_BURSTS = tuple(Scenario(f"bursts of 4 within {ms} ms", f"bursts:k=4,spread_ms={ms}") for ms in (2, 10, 50))
_POISSON = Scenario("Poisson", "poisson")
_CLOSED = Scenario("closed loop, 8 clients", "closed:clients=8,think_ms=0")


def studies(size: int = 8, *, buckets: tuple[int, ...] = (128, 256, 512)) -> dict[str, Study]:
    """The studies of docs/batching.md, with batches of `size`; `buckets` part the prompt lengths."""
    plain = _dynamic(size, 0.0)
    waits = tuple(_dynamic(size, wait_ms) for wait_ms in (0.0, 5.0, 20.0, 50.0))
    anchors = tuple(_dynamic(size, 20.0, wait_anchor=anchor) for anchor in ("oldest", "idle", "last"))
    refined = (
        _dynamic(size, 0.0, length_buckets=buckets),
        _dynamic(size, 50.0, adaptive_wait=True),
        _dynamic(size, 0.0, early_compaction=True),
        _dynamic(size, 50.0, adaptive_wait=True, early_compaction=True),
    )
    return {
        "waiting": Study(
            "When does waiting help?", (_POISSON, *_BURSTS, _CLOSED), (*waits, Setting("continuous", size))
        ),
        "anchors": Study("Where the wait's clock starts", (_POISSON, _BURSTS[1], _CLOSED), (plain, *anchors)),
        "refinements": Study(
            "Buckets, adaptive wait, early compaction", (_POISSON, _BURSTS[1], _CLOSED), (plain, *refined)
        ),
    }


def run_study(
    study: Study,
    stage: Stage,
    *,
    capacity: float,
    prompts: Lengths,
    outputs: Lengths,
    warmup: int,
    measured: int,
    seed: int,
    predictor: Stage | None = None,
    request_timeout_s: float = inf,
) -> Iterator[StudyRow]:
    """Run it; each row as it comes. `capacity` is the reference rate in requests a second."""
    for scenario in study.scenarios:
        trace = draw_trace(
            2 * (warmup + measured), parse_arrivals(scenario.arrivals), prompts=prompts, outputs=outputs, seed=seed
        )
        plan = LoadPlan(
            trace=trace,
            rate=scenario.fraction * capacity,
            warmup=warmup,
            measured=measured,
            request_timeout_s=request_timeout_s,
        )
        base: LoadRun | None = None
        for setting in study.settings:
            run = stage.run(setting, plan)
            base = base or run
            row = StudyRow(scenario.name, setting, summarise(run), paired_change(base, run))
            if predictor is not None:
                predicted = summarise(predictor.run(setting, replace(plan, request_timeout_s=inf)))
                row = replace(row, predicted_mean_s=predicted.e2e.mean, predicted_p95_s=predicted.e2e.p95.value)
            yield row


def study_estimate_s(
    study: Study, stage: Stage, *, capacity: float, outputs: Lengths, requests: int, predicted: bool
) -> float:
    """How long it will take on this machine. A closed loop goes about as fast as the reference rate."""
    virtual_s = virtual_run_s(requests * outputs.mean)
    total_s = 0.0
    for scenario in study.scenarios:
        rate = capacity if parse_arrivals(scenario.arrivals).closed else scenario.fraction * capacity
        run_s = virtual_s if stage.name == "virtual" else real_run_s(requests / rate, outputs.values[-1])
        total_s += len(study.settings) * (run_s + (virtual_s if predicted else 0.0))
    return total_s


def paired_change(base: LoadRun, run: LoadRun) -> Interval:
    """The relative change of the mean latency from `base` to `run`, over requests that both answered."""
    before = {record.index: record.e2e_s for record in base.measured}
    pairs = [
        (before[record.index], record.e2e_s)
        for record in run.measured
        if isfinite(record.e2e_s) and isfinite(before.get(record.index, nan))
    ]
    if len(pairs) < 2:
        return Interval(nan, nan, nan)
    mean = fmean(first for first, _ in pairs)
    interval = mean_interval([second - first for first, second in pairs])
    return Interval(interval.value / mean, interval.low / mean, interval.high / mean)


def study_table(rows: Sequence[StudyRow]) -> list[str]:
    """Markdown, a block of lines for each scenario."""
    predicted = any(isfinite(row.predicted_mean_s) for row in rows)
    head = [
        "arrivals",
        "setting",
        "offered/s",
        "requests/s",
        "mean, s",
        "change (95 %)",
        "p95, s",
        "TTFT p95, s",
        "between tokens p99, s",
        "longest gap, s",
        "rows/step",
        "waste",
    ]
    head += ["predicted mean, s", "predicted p95, s"] if predicted else []
    lines = ["| " + " | ".join([*head, ""]) + " |", "|---|---" + "|--:" * (len(head) - 2) + "|---|"]
    previous = ""
    for row in rows:
        summary = row.summary
        cells = [
            row.scenario if row.scenario != previous else "",
            row.setting.label,
            f"{summary.offered.requests_per_s:.3g}",
            f"{summary.request_throughput:.3g}",
            f"{summary.e2e.mean:.3g}",
            _change(row.change),
            f"{summary.e2e.p95.value:.3g}",
            f"{summary.ttft.p95.value:.3g}",
            *(f"{value:.3g}" if isfinite(value) else "–" for value in (summary.itl.p99, summary.itl.longest)),
            f"{summary.mean_rows:.1f}",
            f"{summary.waste_fraction:.0%}",
        ]
        cells += [f"{row.predicted_mean_s:.3g}", f"{row.predicted_p95_s:.3g}"] if predicted else []
        notes = [*summary.invalid] + ([] if summary.stability.verdict == "stable" else [summary.stability.verdict])
        lines.append("| " + " | ".join([*cells, "; ".join(notes)]) + " |")
        previous = row.scenario
    return lines


def _change(change: Interval) -> str:
    if change.low == change.high:
        return "±0" if change.value == 0 else f"{change.value:+.1%}"
    return f"{change.value:+.1%} ({change.low:+.1%} … {change.high:+.1%})"


def draw_study(rows: Sequence[StudyRow], paths: Sequence[Path], *, title: str) -> None:
    """Points with 95 % intervals; blue is certainly faster than the base, vermilion certainly slower."""
    # Here, because matplotlib takes a second to import.
    from matplotlib.figure import Figure

    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    labels = list(dict.fromkeys(row.setting.label for row in rows))
    figure = Figure(figsize=(2.2 + 2.1 * len(scenarios), 1.3 + 0.42 * len(labels)), layout="constrained")
    panels = figure.subplots(1, len(scenarios), sharex=True, sharey=True, squeeze=False)
    for axes, scenario in zip(panels[0], scenarios, strict=True):
        for row in rows:
            if row.scenario != scenario:
                continue
            change = row.change
            colour = _BETTER if change.high < 0 else _WORSE if change.low > 0 else _UNSURE
            place = labels.index(row.setting.label)
            low, high = change.value - change.low, change.high - change.value
            stable = row.summary.stability.verdict == "stable"
            axes.errorbar(
                100 * change.value, place, xerr=[[100 * low], [100 * high]], fmt="o", color=colour, markersize=6,
                capsize=3, fillstyle="full" if stable else "none",
            )  # fmt: skip
            axes.annotate(
                _percent(change.value), (100 * change.value, place), xytext=(0, 7), textcoords="offset points",
                ha="center", fontsize=8, color=colour,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        axes.axvline(0, color="#444444", linewidth=0.8)
        axes.set_title(scenario, fontsize=9)
        axes.margins(x=0.12)
        axes.grid(visible=True, axis="x", color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(labels)), labels, fontsize=9)
    panels[0][0].set_ylim(len(labels) - 0.5, -0.7)
    figure.supxlabel(f"mean end-to-end latency against {labels[0]}, %", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    for path in paths:
        figure.savefig(path, dpi=110)


def _percent(share: float) -> str:
    whole = round(100 * share)
    return f"{whole:+d} %".replace("-", "−") if whole else "0"
