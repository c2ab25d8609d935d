"""A finished sweep on disk: sweep.json holds it, the other files are drawn from it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsbatch_bench.cell import CellResult, from_json, to_json, write_csv
from wsbatch_bench.chart import draw_sweep
from wsbatch_bench.choose import Choice
from wsbatch_bench.html_report import write_report


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
        """CSV, JSON, the chart and the report, into a directory; the files' names."""
        write_csv(out / "sweep.csv", self.cells)
        document = {"meta": self.meta, "cells": [to_json(cell) for cell in self.cells]}
        (out / "sweep.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        draw_sweep(self.cells, [out / "sweep.png", out / "sweep.svg"], choice=choice, title=self.meta["title"])
        write_report(out / "report.html", self.meta, self.cells, choice, (out / "sweep.svg").read_text())
        return ["sweep.csv", "sweep.json", "sweep.png", "sweep.svg", "report.html"]


def read_sweep(path: Path) -> SweepDocument:
    """From a directory that `write` filled. Raises OSError, or ValueError where it is something else."""
    document = json.loads((path / "sweep.json").read_text())
    try:
        return SweepDocument(document["meta"], [from_json(cell) for cell in document["cells"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / 'sweep.json'}: not a sweep ({error!r})") from None
