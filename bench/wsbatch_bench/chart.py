"""The chart of a sweep: throughput against p95 end to end, a point per setting and rate."""

from collections.abc import Sequence
from math import isfinite, log
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from wsbatch_bench.cell import CellResult
from wsbatch_bench.choose import Choice

# Okabe and Ito's blue and vermilion, told apart by every kind of eye; darker is a larger batch.
_SHADES = {
    "dynamic": ["#a6cbe3", "#7db3d5", "#539bc7", "#2a83b9", "#0072b2", "#004a75"],
    "continuous": ["#f6c59f", "#f0a86f", "#ea8b3f", "#d55e00", "#a84a00", "#7a3600"],
}
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*"]
_SLO_COLOUR = "#009e73"


def pareto(cells: Sequence[CellResult]) -> list[CellResult]:
    """The stable cells that no other stable one beats in both throughput and p95, by throughput."""
    stable = [cell for cell in cells if cell.verdict == "stable" and isfinite(cell.e2e_p95_s) and not cell.invalid]
    frontier: list[CellResult] = []
    for cell in sorted(stable, key=lambda each: (-each.output_throughput, each.e2e_p95_s)):
        if not frontier or cell.e2e_p95_s < frontier[-1].e2e_p95_s:
            frontier.append(cell)
    return frontier[::-1]


def draw_sweep(cells: Sequence[CellResult], paths: Sequence[Path], *, choice: Choice | None = None, title: str) -> None:
    """Draw to each of `paths` (PNG or SVG by suffix). Unstable points are hollow, undecided ones half filled."""
    figure, axes = plt.subplots(figsize=(10, 6.2), layout="constrained")
    finite = [cell.e2e_p95_s for cell in cells if isfinite(cell.e2e_p95_s)]
    low, high = min(finite) / 1.5, max(finite) * 1.6
    ceiling = high * 1.25  # where those without any p95 are put
    axes.set_yscale("log")
    axes.set_ylim(low, high * 1.6)
    fractions = sorted({cell.fraction for cell in cells})
    sizes = sorted({cell.max_batch_size for cell in cells})
    limit = choice.slo.limit("e2e_p95") if choice is not None else None
    if choice is not None and limit is not None:
        top = min(max(limit, low), high * 1.6)
        axes.axhspan(low, top, color=_SLO_COLOUR, alpha=0.10, linewidth=0)
        axes.annotate(
            f"within p95 ≤ {limit:g} s" if limit > low else f"nothing is within p95 ≤ {limit:g} s", (0.005, top),
            xycoords=("axes fraction", "data"), xytext=(0, -4 if limit > low else 4), textcoords="offset points",
            va="top" if limit > low else "bottom", fontsize=9, color="#00704f",
        )  # fmt: skip
    frontier = pareto(cells)
    axes.plot(
        [cell.output_throughput for cell in frontier], [cell.e2e_p95_s for cell in frontier],
        color="#444444", linewidth=1.2, zorder=2,
    )  # fmt: skip
    for cell in cells:
        colour = _colour(cell, sizes)
        filled = {"stable": "full", "unstable": "none", "undecided": "left"}[cell.verdict]
        axes.plot(
            cell.output_throughput, min(cell.e2e_p95_s, ceiling), linestyle="none",
            marker=_marker(cell, fractions), markersize=7, color=colour, markeredgecolor=colour,
            markeredgewidth=1.3, fillstyle=filled, markerfacecoloralt="white", zorder=3,
        )  # fmt: skip
    if any(not isfinite(cell.e2e_p95_s) for cell in cells):
        axes.axhline(high, color="#999999", linewidth=0.8, linestyle=(0, (4, 4)))
        axes.annotate(
            "no p95: it grows as long as one measures", (0.995, high), xycoords=("axes fraction", "data"),
            xytext=(0, -3), textcoords="offset points", ha="right", va="top", fontsize=9, color="#555555",
        )  # fmt: skip
    if choice is not None and choice.chosen is not None and choice.chosen.at is not None:
        _label_choice(axes, choice.chosen.at)
    axes.set_xlabel("throughput, output tokens/s")
    axes.set_ylabel("p95 end to end, s (log scale)")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(handles=_legend(cells, fractions, sizes, bool(frontier)), loc="outside right upper", frameon=False)
    for path in paths:
        figure.savefig(path, dpi=110)
    plt.close(figure)


def _colour(cell: CellResult, sizes: list[int]) -> str:
    shades = _SHADES[cell.scheduler]
    return shades[round((sizes.index(cell.max_batch_size) + 0.5) / len(sizes) * (len(shades) - 1))]


def _marker(cell: CellResult, fractions: list[float]) -> str:
    return _MARKERS[fractions.index(cell.fraction) % len(_MARKERS)]


def _label_choice(axes: Any, cell: CellResult) -> None:
    x, y = cell.output_throughput, cell.e2e_p95_s
    axes.plot(x, y, marker="o", markersize=15, color="black", fillstyle="none", markeredgewidth=1.6, zorder=4)
    low, high = axes.get_ylim()
    below = log(y / low) > 0.3 * log(high / low)  # the scale is logarithmic; near the bottom there is no room
    axes.annotate(
        f"chosen: {cell.label}\nat {cell.rate:g} requests/s", (x, y), xytext=(-14, -30 if below else 34),
        textcoords="offset points", ha="right", va="top" if below else "bottom", fontsize=10, fontweight="bold",
        zorder=5, arrowprops={"arrowstyle": "-", "color": "black", "shrinkB": 8},
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "#bbbbbb", "alpha": 0.95},
    )  # fmt: skip


def _legend(cells: Sequence[CellResult], fractions: list[float], sizes: list[int], frontier: bool) -> list[Line2D]:
    def entry(label: str, **style: Any) -> Line2D:
        options: dict[str, Any] = {"linestyle": "none", "markersize": 7, "label": label} | style
        return Line2D([], [], **options)

    handles = []
    for scheduler in _SHADES:
        own = {cell.max_batch_size: cell for cell in cells if cell.scheduler == scheduler}
        handles += [
            entry(f"{scheduler}, batch {size}", marker="o", color=_colour(own[size], sizes)) for size in sorted(own)
        ]
    grey = "#666666"
    for index, fraction in enumerate(fractions):
        label = f"at {fraction:.3g} of the reference rate"
        handles.append(entry(label, marker=_MARKERS[index % len(_MARKERS)], color=grey))
    handles.append(entry("unstable", marker="o", color=grey, fillstyle="none"))
    if any(cell.verdict == "undecided" for cell in cells):
        handles.append(entry("undecided", marker="o", color=grey, fillstyle="left", markerfacecoloralt="white"))
    if frontier:
        handles.append(entry("Pareto frontier (stable)", linestyle="-", marker="", color="#444444"))
    return handles
