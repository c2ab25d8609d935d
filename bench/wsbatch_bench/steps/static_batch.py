"""What a batch run to completion costs: token slots nobody asked for, and rows held back by longer ones."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from wsbatch.engine.open import make_scheduler
from wsbatch_bench.quantiles import observed_quantile
from wsbatch_bench.steps.bare_loop import Clock, LoopRequest, LoopRow, LoopStep, Runs, run_loop
from wsbatch_bench.sweep.setting import Setting

_PREFILL, _DECODE, _HELD = "#56b4e9", "#0072b2", "#d55e00"


@dataclass(frozen=True, slots=True)
class RowCost:
    """One row; times in seconds from its batch's start.

    Attributes:
        first_s, ended_s: its first and its last token.
        hol_delay_s: how long its slot and a whole (not streamed) answer were held after its own end.
        hol_inflation: the time until its slot is free over its own: how much later a whole answer comes than it could.
    """

    prompt_tokens: int
    output_tokens: int
    first_s: float
    ended_s: float
    hol_delay_s: float
    hol_inflation: float


@dataclass(frozen=True, slots=True)
class BatchCost:
    """One batch.

    Attributes:
        rows: by when they ended.
        seconds: from its dispatch to the end of its last row; `prefill_s` of them in steps that computed prompt tokens
            (with the decodes beside them, in continuous batching).
        issued_slots, useful_slots: decode slots computed, and those whose token somebody asked for.
        prefill_tokens, useful_prefill_tokens: prompt tokens computed, padding included, and without it.
    """

    rows: tuple[RowCost, ...]
    seconds: float
    prefill_s: float
    issued_slots: int
    useful_slots: int
    prefill_tokens: int
    useful_prefill_tokens: int

    @property
    def waste_fraction(self) -> float:
        """The share of decode slots nobody asked for."""
        return 1 - self.useful_slots / self.issued_slots if self.issued_slots else 0.0

    @property
    def max_hol_inflation(self) -> float:
        """That of the row that suffered most."""
        return max(row.hol_inflation for row in self.rows)

    def inflation(self, q: float) -> float:
        """A quantile over the rows, itself one of them. A mean would hide who pays."""
        return observed_quantile([row.hol_inflation for row in self.rows], q)

    def delay_s(self, q: float) -> float:
        """A quantile of the head-of-line delay over the rows."""
        return observed_quantile([row.hol_delay_s for row in self.rows], q)


def pooled_waste(batches: Sequence[BatchCost]) -> float:
    """The share of all their decode slots that nobody asked for: long batches count for more, as they do in time."""
    issued = sum(batch.issued_slots for batch in batches)
    return 1 - sum(batch.useful_slots for batch in batches) / issued if issued else 0.0


def measure_batches(model: Runs, requests: Sequence[LoopRequest], setting: Setting, *, clock: Clock) -> list[BatchCost]:
    """Run the requests as the setting does; rows stop on their step budget.

    Dynamic: in batches of `max_batch_size`, in order, each to completion. Continuous: all of it counts as one batch.
    """
    scheduler = make_scheduler(setting.config(), now_s=0.0)
    run = run_loop(model, scheduler, requests, clock=clock)
    if setting.scheduler == "continuous":
        return [_cost(0.0, run.rows, run.steps)]
    batches: dict[float, list[LoopRow]] = {}
    for row in run.rows:
        batches.setdefault(row.started_s, []).append(row)
    starts_s = [step.start_s for step in run.steps]
    bounds = [*(bisect_left(starts_s, start_s) for start_s in batches), len(starts_s)]
    return [
        _cost(start_s, rows, run.steps[first:last])
        for (start_s, rows), (first, last) in zip(batches.items(), pairwise(bounds), strict=True)
    ]


def _cost(start_s: float, rows: Sequence[LoopRow], steps: Sequence[LoopStep]) -> BatchCost:
    costs = [
        RowCost(
            prompt_tokens=len(row.request.prompt_ids),
            output_tokens=len(row.token_ids),
            first_s=row.first_s - start_s,
            ended_s=row.ended_s - start_s,
            hol_delay_s=row.released_s - row.ended_s,
            hol_inflation=(row.released_s - start_s) / (row.ended_s - start_s),
        )
        for row in rows
    ]
    return BatchCost(
        rows=tuple(sorted(costs, key=lambda row: row.ended_s)),
        seconds=max(row.released_s for row in rows) - start_s,
        prefill_s=sum(step.end_s - step.start_s for step in steps if step.cost.prefill_tokens),
        issued_slots=sum(step.cost.decode_slots for step in steps),
        useful_slots=sum(step.cost.useful_decode_slots for step in steps),
        prefill_tokens=sum(step.cost.prefill_tokens for step in steps),
        useful_prefill_tokens=sum(step.cost.useful_prefill_tokens for step in steps),
    )


def draw_timeline(batch: BatchCost, paths: Sequence[Path], *, title: str) -> None:
    """Rows as bars: their own time filled, the time their slot is held after their end hatched."""
    # Here, because matplotlib takes a second to import.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = batch.rows
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(rows):
        axes.barh(index, row.first_s, color=_PREFILL, height=0.7)
        axes.barh(index, row.ended_s - row.first_s, left=row.first_s, color=_DECODE, height=0.7)
        axes.barh(
            index, row.hol_delay_s, left=row.ended_s, height=0.7, facecolor="white", edgecolor=_HELD, hatch="////",
            linewidth=0.8,
        )  # fmt: skip
        if row.hol_delay_s > 0:
            axes.text(batch.seconds * 1.01, index, f"{row.hol_inflation:.1f}×", va="center", fontsize=9, color=_HELD)
    axes.set_yticks(range(len(rows)), [f"{row.output_tokens} tokens" for row in rows], fontsize=9)
    axes.set_xlim(0, batch.seconds * 1.09)
    axes.set_xlabel("seconds from the batch's start; right: how much later a whole answer comes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{title}: {batch.waste_fraction:.0%} of {batch.issued_slots} decode slots wasted", loc="left", fontsize=11
    )
    handles = [
        Patch(color=_PREFILL, label="prefill"),
        Patch(color=_DECODE, label="decode"),
        Patch(facecolor="white", edgecolor=_HELD, hatch="////", label="finished, slot held"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    _save(figure, paths)


def draw_waste(
    measured: dict[int, list[BatchCost]], theory: dict[int, float], paths: Sequence[Path], *, title: str
) -> None:
    """Waste against batch size: each measured batch a dot, all of a size together a diamond, the theory a line."""
    # Here, because matplotlib takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    sizes = sorted(measured)
    places = range(len(sizes))
    axes.plot(
        places, [theory[size] for size in sizes], color="#444444", marker="_", markersize=14, linewidth=1.2,
        label="theory: 1 − E[L] / E[max L]",
    )  # fmt: skip
    for place, size in zip(places, sizes, strict=True):
        axes.plot(
            [place] * len(measured[size]), [each.waste_fraction for each in measured[size]], "o", color=_PREFILL,
            alpha=0.6, markersize=6,
            label="measured, one batch" if place == 0 else None,
        )  # fmt: skip
    axes.plot(
        places, [pooled_waste(measured[size]) for size in sizes], "D", color=_DECODE, markersize=8,
        label="measured, all batches of a size",
    )  # fmt: skip
    axes.set_xticks(places, [str(size) for size in sizes])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("batch size")
    axes.set_ylabel("decode slots wasted")
    axes.grid(visible=True, axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower right")
    _save(figure, paths)


def _save(figure: Any, paths: Sequence[Path]) -> None:
    for path in paths:
        figure.savefig(path, dpi=110)
