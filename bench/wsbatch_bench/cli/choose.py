"""`wsbatch-bench choose`: a setting for an SLO."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch_bench.load.trace import load_trace
from wsbatch_bench.numbers import Number
from wsbatch_bench.sweep.choose import choice_lines, choose, refine
from wsbatch_bench.sweep.grid import Sweep
from wsbatch_bench.sweep.setting import parse_costs_json
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import RealStage, Stage, VirtualStage

if TYPE_CHECKING:
    from wsbatch_bench.sweep.files import SweepDocument

NONE, UNDECIDED = 4, 5
_CELLS = Number(0, 1000, whole=True)

_DESCRIPTION = """\
Pick the setting that carries the highest rate within an SLO, from a sweep. A rate counts where the
SLO certainly holds, by the bounds of what was measured; ties go to the smaller batch, then to the
shorter wait. What the measurements cannot tell is called undecided.
"""

_EPILOG = f"""\
SLO: conditions that must all hold, of e2e_p95, ttft_p95, tpot_p95 (s or ms) and success (%):
  "e2e_p95<=5s,ttft_p95<=1s,success>=99%"

examples:
  wsbatch-bench choose sweep --slo "e2e_p95<=5s,ttft_p95<=1s,success>=99%"
  wsbatch-bench choose sweep --slo "ttft_p95<=500ms" --refine 6      measure six more cells where it matters

exit statuses: 0 chosen; 2 bad usage; {NONE} no setting meets the SLO; {UNDECIDED} none certainly does, some may
"""


def add_command(commands: Commands) -> None:
    """Add `choose` to the command line."""
    parser = add_parser(commands, "choose", help="pick a setting for an SLO", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("sweep", type=Path, metavar="DIR", help="where `sweep --out` wrote to")
    parser.add_argument("--slo", required=True, metavar="SLO", help="the conditions")
    parser.add_argument("--refine", type=_CELLS.flag, default=0, metavar="N", help="measure N more cells (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Choose; the exit status."""
    # Here, because matplotlib takes a second to import.
    from wsbatch_bench.sweep.files import SweepDocument, read_sweep

    try:
        slo = parse_slo(arguments.slo)
        document = read_sweep(arguments.sweep)
    except (ValueError, OSError) as error:
        say_error("wsbatch-bench choose", error)
        return 2
    if arguments.refine:
        cells = refine(document.cells, slo, _sweep(document, arguments.sweep).measure, rounds=arguments.refine)
        document = SweepDocument(document.meta, cells)
    choice = choose(document.cells, slo)
    document.write(arguments.sweep, choice)
    print("\n".join(choice_lines(choice, document.meta)))
    if choice.chosen is not None:
        return 0
    return UNDECIDED if choice.undecided else NONE


def _sweep(document: "SweepDocument", out: Path) -> Sweep:
    """The sweep that the document came from, to measure more of it."""
    meta = document.meta
    costs = None if meta["costs"] is None else parse_costs_json(meta["costs"])
    predictor = VirtualStage(costs) if costs is not None else None
    trace = load_trace(out / "trace.jsonl")
    stage: Stage
    if meta["engine"] == "real":
        stage = RealStage(meta["model"], tuple(meta["serve_flags"]))
        return Sweep(stage, trace, meta["warmup"], meta["measured"], predictor)
    assert predictor is not None
    return Sweep(predictor, trace, meta["warmup"], meta["measured"])
