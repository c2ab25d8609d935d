"""Drawings of static batches: one batch as a timeline, and the waste of many against theory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from wsbatch_bench.static_batch import BatchCost, pooled_waste

_PREFILL, _DECODE, _HELD = "#56b4e9", "#0072b2", "#d55e00"


def draw_timeline(batch: BatchCost, paths: Sequence[Path], *, title: str) -> None:
    """Rows as bars: their own time filled, the time their slot is held after their end hatched."""
    rows = batch.rows
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.32 * len(rows)), layout="constrained")
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
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
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
    plt.close(figure)
