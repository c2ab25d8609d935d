"""The chart of an overload: goodput, and the latency of what was answered, over the offered load, class by class."""

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from lab_tools.overload_run import ClassResult, Point, share_of_peak

# Okabe and Ito: told apart by every kind of eye; the most urgent is the darkest in grey, too.
_COLOURS = ["#0072b2", "#d55e00", "#e69f00", "#56b4e9", "#009e73", "#cc79a7"]
_MARKERS = ["o", "s", "^", "D", "v", "P"]
_TICKS = (0.2, 0.5, 1, 2, 5, 10)


def draw_overload(
    points: Sequence[Point],
    storm: Point | None,
    paths: Sequence[Path],
    *,
    capacity: float,
    patience_s: float,
    title: str,
) -> None:
    """Draw to each of `paths` (PNG or SVG by suffix)."""
    points = sorted(points, key=lambda point: point.load)
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    goodput, ttft, e2e = figure.subplots(1, 3)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    _draw_goodput(goodput, points, storm, capacity)
    _draw_latency(ttft, points, "time to first token, p95, s", lambda each: each.ttft_p95_s, patience_s)
    _draw_latency(e2e, points, "end to end, p95, s", lambda each: each.e2e_p95_s, patience_s)
    for axes in (goodput, ttft, e2e):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_xlabel("offered load, over the capacity (log scale)", fontsize=9)
        axes.grid(visible=True, which="major", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*goodput.get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    for path in paths:
        figure.savefig(path, dpi=110)


def _draw_goodput(axes: Any, points: Sequence[Point], storm: Point | None, capacity: float) -> None:
    loads = [point.load for point in points]
    shares = [[point.classes[i].goodput / capacity for point in points] for i in range(len(points[0].classes))]
    labels = [_label(each) for each in points[0].classes]
    axes.stackplot(loads, shares, colors=_COLOURS, labels=labels, alpha=0.85, linewidth=0)
    axes.plot(loads, [min(load, 1.0) for load in loads], color="#222222", linewidth=1.2, linestyle=(0, (4, 3)),
              label="all that could be done")  # fmt: skip
    if storm is not None:
        bottom = 0.0
        for index, each in enumerate(storm.classes):
            axes.bar(storm.load, each.goodput / capacity, 0.22 * storm.load, bottom, color=_COLOURS[index], alpha=0.85)
            bottom += each.goodput / capacity
        axes.annotate(
            f"retry storm:\n{share_of_peak(storm, points):.0%} of the peak", (storm.load, bottom), xytext=(6, 5),
            textcoords="offset points", ha="right", va="bottom", fontsize=9,
        )  # fmt: skip
    axes.set_ylim(0, 1.35)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_title("goodput, of the capacity", loc="left", fontsize=10)


def _draw_latency(
    axes: Any, points: Sequence[Point], name: str, value: Callable[[ClassResult], float], patience_s: float
) -> None:
    for index, _ in enumerate(points[0].classes):
        found = [(point.load, value(point.classes[index])) for point in points]
        known = [(load, seconds) for load, seconds in found if isfinite(seconds)]
        axes.plot(
            [load for load, _ in known], [seconds for _, seconds in known], color=_COLOURS[index],
            marker=_MARKERS[index], markersize=5, linewidth=1.4,
        )  # fmt: skip
    axes.axhline(patience_s, color="#222222", linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate(
        "the clients' patience", (0.01, patience_s), xycoords=("axes fraction", "data"), xytext=(0, 3),
        textcoords="offset points", fontsize=8, color="#444444",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(top=patience_s * 1.6)
    axes.set_title(f"{name}, of what was answered", loc="left", fontsize=10)


def _label(each: ClassResult) -> str:
    return f"class {each.priority}" + (", the most urgent" if each.priority == 0 else "")
