"""The report: one HTML file with everything in it, to be mailed or kept."""

from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

from wsbatch_bench.cell import CellResult
from wsbatch_bench.choose import Choice
from wsbatch_bench.stage import serve_command

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { border-bottom: 2px solid #888 } td:first-child, th:first-child { text-align: left }
tr.unstable td { color: #888; font-style: italic } tr.chosen td { background: #e2f4ee; font-weight: 600 }
pre { background: #f5f5f5; padding: .7rem 1rem; overflow-x: auto } svg { max-width: 100%; height: auto }
.scroll { overflow-x: auto } dt { float: left; clear: left; width: 9rem; color: #666 } dd { margin-left: 9rem }
"""

_COLUMNS = (
    "setting", "rate/s", "requests/s", "tokens/s", "TTFT p50", "TTFT p95", "e2e p50", "e2e p95", "e2e p95 interval",
    "per token p50", "answered", "slots used", "waste", "rows/step", "verdict",
)  # fmt: skip


def write_report(
    path: Path, meta: dict[str, Any], cells: Sequence[CellResult], choice: Choice | None, chart_svg: str
) -> None:
    """Write the file; it refers to nothing outside itself."""
    predicted = any(isfinite(cell.predicted_e2e_p95_s) for cell in cells)
    columns = (*_COLUMNS, "predicted e2e p95", "error") if predicted else _COLUMNS
    chosen = choice.chosen.at if choice is not None and choice.chosen is not None else None
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = "".join(_row(cell, predicted=predicted, chosen=cell is chosen) for cell in cells)
    facts = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in meta.items()
        if name != "title" and value not in (None, [], "")
    )
    svg = chart_svg[chart_svg.index("<svg") :]
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(meta["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(meta['title'])}</h1>{_choice_html(choice, meta)}{svg}"
        f"<p>Unstable points are hollow: unserved requests pile up, so that their latencies only say how long was "
        f"measured. Failures count as infinitely late. Times in seconds, from the scheduled time.</p>"
        f'<h2>Cells</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
        f"<h2>How</h2><dl>{facts}</dl></html>\n"
    )


def choice_lines(choice: Choice, meta: dict[str, Any]) -> list[str]:
    """What was chosen and why, for a terminal or a report."""
    lines = [f"SLO        {choice.slo.text}"]
    best, second = choice.chosen, choice.runner_up
    if best is None or best.at is None:
        lines.append(f"chosen     none: {choice.why()}")
    else:
        upper = "" if not isfinite(best.open_until) else f", and not {best.open_until:.4g}"
        lines.append(f"chosen     {best.setting.label}: carries {best.passed:.4g} requests/s within the SLO{upper}")
        lines += [f"           {bound.explain(best.at)}" for bound in choice.slo.bounds]
        lines.append(f"runner-up  {'none' if second is None else second.setting.label}: {choice.why()}")
        lines.append(f"serve it   {serve_command(meta['model'], best.setting, meta.get('serve_flags', ()))}")
    for cell in choice.undecided:
        lines.append(f"undecided  {cell.label} at {cell.rate:.4g} requests/s: measure more requests to tell")
    return lines


def _choice_html(choice: Choice | None, meta: dict[str, Any]) -> str:
    return "" if choice is None else f"<pre>{escape(chr(10).join(choice_lines(choice, meta)))}</pre>"


def _row(cell: CellResult, *, predicted: bool, chosen: bool) -> str:
    values = [
        cell.label, f"{cell.rate:.4g}", f"{cell.request_throughput:.3g}", f"{cell.output_throughput:.1f}",
        _seconds(cell.ttft_p50_s), _seconds(cell.ttft_p95_s), _seconds(cell.e2e_p50_s), _seconds(cell.e2e_p95_s),
        f"{_seconds(cell.e2e_p95_low_s)} … {_seconds(cell.e2e_p95_high_s)}", _seconds(cell.tpot_p50_s),
        f"{cell.success:.1%}", f"{cell.slot_utilization:.1%}", f"{cell.waste_fraction:.1%}", f"{cell.mean_rows:.1f}",
        cell.verdict + (", stopped early" if cell.stopped_early else "") + (", INVALID" if cell.invalid else ""),
    ]  # fmt: skip
    if predicted:
        values += [_seconds(cell.predicted_e2e_p95_s), f"{cell.e2e_p95_error:+.0%}"]
    kind = "chosen" if chosen else cell.verdict
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"


def _seconds(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "∞" if value > 0 else "–"
