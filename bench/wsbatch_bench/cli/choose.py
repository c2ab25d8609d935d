"""`wsbatch-bench choose`: a setting for an SLO, from a sweep or for a stated rate."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from wsbatch.cli.parsing import BAD_USAGE, FAILED, Commands, Parser, add_parser, ending_with, say_error
from wsbatch.cli.streams import INTERRUPTED
from wsbatch_bench.cli.choose_rate import add_rate_flags, run_rate
from wsbatch_bench.cli.flags import WORKLOAD_HELP
from wsbatch_bench.load.trace import load_trace
from wsbatch_bench.numbers import Number
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.choose import Measure, choice_lines, choose, settle
from wsbatch_bench.sweep.grid import Results, Sweep, remembering
from wsbatch_bench.sweep.setting import parse_costs_json
from wsbatch_bench.sweep.slo import Slo, parse_slo
from wsbatch_bench.sweep.stage import RealStage, Stage
from wsbatch_bench.trio_run import Unreachable

if TYPE_CHECKING:
    from wsbatch_bench.sweep.files import SweepDocument

NONE, UNDECIDED = 4, 5
_CELLS = Number(0, 1000, whole=True)

_DESCRIPTION = """\
Pick a setting for an SLO. Of a sweep, the one that carries the highest rate within it; with --rate,
the cheapest one that carries this rate, from the model's step costs in virtual time. A rate counts
where the SLO certainly holds, by the bounds of what was measured; ties go to the smaller batch, then
to the shorter wait. What the measurements cannot tell is called undecided.
"""

_EPILOG = f"""\
SLO: conditions that must all hold, of e2e_p95, ttft_p95, tpot_p95 (s or ms) and success (%):
  "e2e_p95<=5s,ttft_p95<=1s,success>=99%"
{WORKLOAD_HELP}
examples:
  wsbatch-bench choose sweep --slo "e2e_p95<=5s,ttft_p95<=1s,success>=99%"
  wsbatch-bench choose sweep --slo "ttft_p95<=500ms" --refine 6      measure six more cells where it matters
  wsbatch-bench choose --rate 3 --slo "ttft_p95<=500ms"              measures the demo model's step costs first
  wsbatch-bench choose --rate 3 --slo "ttft_p95<=500ms" --costs scaling/costs.json --confirm 300

exit statuses: 0 chosen; 1 the server that should confirm it did not start, or was lost; 2 bad usage; {NONE} no
setting meets the SLO; {UNDECIDED} none certainly does, some may; {INTERRUPTED} interrupted
"""


def add_command(commands: Commands) -> None:
    """Add `choose` to the command line."""
    parser = add_parser(commands, "choose", help="pick a setting for an SLO", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("sweep", nargs="?", type=Path, metavar="DIR", help="folder that `sweep --out` wrote to")
    parser.add_argument("--slo", required=True, metavar="SLO", help="conditions that a setting must meet; see below")
    parser.add_argument(
        "--refine",
        type=_CELLS.flag,
        default=0,
        metavar="N",
        help="with DIR: measure N more cells, where the choice is undecided (default: 0)",
    )
    add_rate_flags(parser)
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: Parser) -> int:
    """Choose; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        slo = parse_slo(arguments.slo)
        _check_mode(arguments, parser)
        if arguments.rate is not None:
            return run_rate(arguments, slo)
        return _run_sweep(arguments, slo)


def _check_mode(arguments: argparse.Namespace, parser: Parser) -> None:
    """Raise ValueError where flags of the one way to choose are given with the other."""
    if (arguments.sweep is None) == (arguments.rate is None):
        raise ValueError("either DIR, of a sweep, or --rate is required")
    if arguments.rate is not None and arguments.refine:
        raise ValueError("--refine goes with DIR, the sweep that it adds to")
    if arguments.sweep is not None:
        for name, value in vars(arguments).items():
            if name not in ("sweep", "slo", "refine", "run") and value != parser.get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} goes with --rate: a sweep has its own")


def _run_sweep(arguments: argparse.Namespace, slo: Slo) -> int:
    # Here, because matplotlib takes a second to import.
    from wsbatch_bench.sweep.files import SweepDocument, read_sweep

    document = read_sweep(arguments.sweep)
    for line in slo.lacking(max(document.meta["measured"], document.meta["most"])):
        print(line, flush=True)
    status = 0
    if arguments.refine:
        cells = list(document.cells)
        try:
            settle(
                document.cells,
                slo,
                *_measures(_sweep(document, arguments.sweep), arguments.sweep, cells),
                rounds=arguments.refine,
            )
        except KeyboardInterrupt:
            status = INTERRUPTED
        except (*Unreachable, RuntimeError) as error:
            say_error("wsbatch-bench choose", error)
            status = FAILED
        document = SweepDocument(document.meta, cells)
    choice = choose(document.cells, slo)
    document.write(arguments.sweep, choice)
    print("\n".join(choice_lines(choice, document.meta)))
    if status or choice.chosen is not None:
        return status
    return UNDECIDED if choice.undecided else NONE


def _measures(sweep: Sweep, out: Path, cells: list[CellResult]) -> tuple[Measure, Measure | None]:
    """On the sweep's own trace and on another one; what was measured is added to `cells`, whatever comes after it."""
    closer = sweep.closer()
    again, results = closer.again(), Results(out / "cells.jsonl")

    def adding(measure: Measure) -> Measure:
        def measure_one(cell: Cell) -> CellResult:
            cells.append(measure(cell))
            return cells[-1]

        return measure_one

    return adding(remembering(closer, results)), again and adding(remembering(again, results))


def _sweep(document: "SweepDocument", out: Path) -> Sweep:
    """The sweep that the document came from, to measure more of it. Raises ValueError or OSError."""
    meta = document.meta
    costs = None if meta["costs"] is None else parse_costs_json(meta["costs"])
    predictor = PoolStage(costs) if costs is not None else None
    trace = load_trace(out / "trace.jsonl")
    stage: Stage
    if meta["engine"] == "real":
        stage = RealStage(meta["model"], tuple(meta["serve_flags"]))
        return Sweep(stage, trace, meta["warmup"], meta["measured"], predictor)
    assert predictor is not None
    return Sweep(predictor, trace, meta["warmup"], meta["measured"], most=meta.get("most", 0))
