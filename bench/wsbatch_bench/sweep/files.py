"""A finished sweep on disk: sweep.json holds it; the CSV, the chart and the HTML report are drawn from it."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite, log
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from wsbatch_bench.sweep.cell import CellResult, from_json, to_json, write_csv
from wsbatch_bench.sweep.choose import Choice, choice_lines

# Okabe and Ito's blue and vermilion, told apart by every kind of eye; darker is a larger batch.
_SHADES = {
    "dynamic": ["#a6cbe3", "#7db3d5", "#539bc7", "#2a83b9", "#0072b2", "#004a75"],
    "continuous": ["#f6c59f", "#f0a86f", "#ea8b3f", "#d55e00", "#a84a00", "#7a3600"],
}
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*"]
_BESIDES = "d"
_SLO_COLOUR = "#009e73"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { border-bottom: 2px solid #888 } td:first-child, th:first-child { text-align: left }
tr.unstable td { color: #888; font-style: italic } tr.chosen td { background: #e2f4ee; font-weight: 600 }
pre { background: #f5f5f5; padding: .7rem 1rem; overflow-x: auto } svg { max-width: 100%; height: auto }
.scroll { overflow-x: auto } dt { float: left; clear: left; width: 9rem; color: #666 } dd { margin-left: 9rem }
"""

_NOTE = (
    "Unstable points are hollow: unserved requests pile up, so that their latencies only say how long was measured. "
    "Failures count as infinitely late. Times in seconds, from the scheduled time."
)

_COLUMNS = (
    "setting", "rate/s", "offered/s", "requests/s", "tokens/s", "TTFT p50", "TTFT p95", "e2e p50", "e2e p95",
    "e2e p95 interval", "per token p50", "between tokens p99", "longest gap", "answered", "slots used",
    "waste", "rows/step", "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class SweepDocument:
    """What was measured, and how.

    Attributes:
        meta: title, engine, model, costs, workload, machine, date, command.
        cells: the results.
    """

    meta: dict[str, Any]
    cells: list[CellResult]

    def write(self, out: Path, choice: Choice | None) -> list[str]:
        """CSV, JSON, the chart, and the report as Markdown and HTML, into a directory; the files' names."""
        write_csv(out / "sweep.csv", self.cells)
        document = {"meta": self.meta, "cells": [to_json(cell) for cell in self.cells]}
        (out / "sweep.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        draw_sweep(self.cells, [out / "sweep.png", out / "sweep.svg"], choice=choice, title=self.meta["title"])
        write_markdown(out / "sweep.md", self.meta, self.cells, choice)
        write_html(out / "report.html", self.meta, self.cells, choice, (out / "sweep.svg").read_text())
        return ["sweep.csv", "sweep.json", "sweep.md", "sweep.png", "sweep.svg", "report.html"]


def read_sweep(path: Path) -> SweepDocument:
    """From a directory that `write` filled. Raises OSError, or ValueError where it is something else."""
    document = json.loads((path / "sweep.json").read_text())
    try:
        return SweepDocument(document["meta"], [from_json(cell) for cell in document["cells"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / 'sweep.json'}: not a sweep ({error!r})") from None


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
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes = figure.subplots()
    finite = [cell.e2e_p95_s for cell in cells if isfinite(cell.e2e_p95_s)] or [1.0]
    low, high = min(finite) / 1.5, max(finite) * 1.6
    ceiling = high * 1.25  # where those without any p95 are put
    axes.set_yscale("log")
    axes.set_ylim(low, high * 1.6)
    # What a choice measured besides the grid are single cells: they share one marker.
    counts = Counter(cell.fraction for cell in cells)
    fractions = sorted(each for each, count in counts.items() if count > 1) or sorted(counts)
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


def _colour(cell: CellResult, sizes: list[int]) -> str:
    shades = _SHADES[cell.scheduler]
    return shades[round((sizes.index(cell.max_batch_size) + 0.5) / len(sizes) * (len(shades) - 1))]


def _marker(cell: CellResult, fractions: list[float]) -> str:
    return _MARKERS[fractions.index(cell.fraction) % len(_MARKERS)] if cell.fraction in fractions else _BESIDES


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
    if any(cell.fraction not in fractions for cell in cells):
        handles.append(entry("at another rate", marker=_BESIDES, color=grey))
    handles.append(entry("unstable", marker="o", color=grey, fillstyle="none"))
    if any(cell.verdict == "undecided" for cell in cells):
        handles.append(entry("undecided", marker="o", color=grey, fillstyle="left", markerfacecoloralt="white"))
    if frontier:
        handles.append(entry("Pareto frontier (stable)", linestyle="-", marker="", color="#444444"))
    return handles


def write_html(
    path: Path, meta: dict[str, Any], cells: Sequence[CellResult], choice: Choice | None, chart_svg: str
) -> None:
    """One HTML file with everything in it, to be mailed or kept; it refers to nothing outside itself."""
    columns, rows = _table(cells)
    chosen = choice.chosen.at if choice is not None and choice.chosen is not None else None
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f'<tr class="{"chosen" if cell is chosen else cell.verdict}">'
        + "".join(f"<td>{escape(value)}</td>" for value in row)
        + "</tr>"
        for cell, row in zip(cells, rows, strict=True)
    )
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(meta))
    picked = "" if choice is None else f"<pre>{escape(chr(10).join(choice_lines(choice, meta)))}</pre>"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(meta["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(meta['title'])}</h1>{picked}{chart_svg[chart_svg.index('<svg') :]}"
        f'<p>{_NOTE}</p><h2>Cells</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
        f"<h2>How</h2><dl>{facts}</dl></html>\n"
    )


def write_markdown(path: Path, meta: dict[str, Any], cells: Sequence[CellResult], choice: Choice | None) -> None:
    """The same as a page of Markdown beside the chart, for a repository."""
    columns, rows = _table(cells)
    title, *more = meta["title"].splitlines()
    lines = [f"# {title}", "", *more, ""]
    if choice is not None:
        lines += ["```", *choice_lines(choice, meta), "```", ""]
    lines += ["![throughput against p95 end to end](sweep.png)", "", _NOTE, ""]
    lines += ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"- {name}: {value}" for name, value in _facts(meta))]
    path.write_text("\n".join(lines) + "\n")


def _table(cells: Sequence[CellResult]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns, and a row for each cell."""
    predicted = any(isfinite(cell.predicted_e2e_p95_s) for cell in cells)
    columns = (*_COLUMNS, "predicted e2e p95", "error", "ms a step for serving") if predicted else _COLUMNS
    return columns, [_row(cell, predicted=predicted) for cell in cells]


def _facts(meta: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), str(value))
        for name, value in meta.items()
        if name != "title" and value not in (None, [], "")
    ]


def _row(cell: CellResult, *, predicted: bool) -> list[str]:
    values = [
        cell.label, f"{cell.rate:.4g}", _seconds(cell.offered), f"{cell.request_throughput:.3g}",
        f"{cell.output_throughput:.1f}", _seconds(cell.ttft_p50_s), _seconds(cell.ttft_p95_s),
        _seconds(cell.e2e_p50_s), _seconds(cell.e2e_p95_s),
        f"{_seconds(cell.e2e_p95_low_s)} … {_seconds(cell.e2e_p95_high_s)}", _seconds(cell.tpot_p50_s),
        _seconds(cell.itl_p99_s), _seconds(cell.itl_longest_s),
        f"{cell.success:.1%}", f"{cell.slot_utilization:.1%}", f"{cell.waste_fraction:.1%}", f"{cell.mean_rows:.1f}",
        cell.verdict + (", stopped early" if cell.stopped_early else "") + (", INVALID" if cell.invalid else ""),
    ]  # fmt: skip
    if predicted:
        values += [_seconds(cell.predicted_e2e_p95_s), f"{cell.e2e_p95_error:+.0%}", f"{1000 * cell.served_gap_s:.2f}"]
    return values


def _seconds(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "∞" if value > 0 else "–"
