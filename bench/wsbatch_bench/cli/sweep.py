"""`wsbatch-bench sweep`: every setting at every rate."""

import argparse
import platform
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.cli.flags import JOBS, WORKLOAD_HELP, add_workload, read_trace, read_warmups
from wsbatch_bench.load.specs import DEFAULT_OUTPUTS, DEFAULT_PROMPTS
from wsbatch_bench.numbers import RATE, Number, numbers
from wsbatch_bench.sweep.cell import CellResult
from wsbatch_bench.sweep.choose import choice_lines, choose
from wsbatch_bench.sweep.grid import FRACTIONS, Results, Sweep, grid, run_cells
from wsbatch_bench.sweep.setting import (
    BATCH_SIZES,
    Costs,
    Setting,
    costs_json,
    default_grid,
    parse_costs,
    parse_setting,
    same_for_both,
)
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import RealStage, Stage, VirtualStage

_FRACTION = Number(0.001, 1000)

_DESCRIPTION = """\
Measure every setting at three rates: throughput, latencies, slot utilisation and waste, as CSV,
JSON and one chart. Rates are fractions of the capacity of the best dynamic setting. The same
trace serves every cell, rescaled. A cell in which the server falls behind is stopped early.

--engine virtual runs the whole server in virtual time over a simulated model, whose steps cost
tau + alpha for each decode row + beta for each prompt token: the same every time, and minutes
for the whole grid. --engine real starts `wsbatch serve` for each cell.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
examples:
  wsbatch-bench sweep --out sweep --jobs 2
  wsbatch-bench sweep --out sweep --resume --slo "e2e_p95<=5s,ttft_p95<=1s,success>=99%"
  wsbatch-bench sweep --out real --engine real --model demo --costs fitted.json --dry-run
  wsbatch-bench sweep --out few --setting dynamic:max_batch_size=8,max_wait_ms=20 --setting continuous:max_batch_size=8
"""


def add_command(commands: Commands) -> None:
    """Add `sweep` to the command line."""
    parser = add_parser(
        commands, "sweep", help="measure every setting at every rate", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--engine", choices=("virtual", "real"), default="virtual", help="default: %(default)s")
    parser.add_argument(
        "--costs",
        metavar="COSTS",
        help="tau_ms=…,alpha_ms=…,beta_ms=… or a file that `scaling` wrote. virtual: the model's (default: 10, 1, "
        "0.5); real: predict each cell in virtual time, too",
    )
    parser.add_argument("--model", default="demo", metavar="TEXT", help="real: as `wsbatch serve` takes it")
    parser.add_argument("--serve-flag", action="append", default=[], metavar="FLAG", help="real: one more flag of it")
    parser.add_argument("--setting", action="append", type=_setting, metavar="SPEC", help="instead of the whole grid")
    parser.add_argument(
        "--fractions", type=numbers(_FRACTION), default=FRACTIONS, metavar="X,X", help="default: 0.3,0.7,1.1"
    )
    parser.add_argument(
        "--capacity", type=RATE.flag, metavar="R", help="the reference rate, requests/s (default: it is measured first)"
    )
    parser.add_argument("--slo", type=_slo, metavar="SLO", help="choose a setting and mark it; see `choose`")
    parser.add_argument("--jobs", type=JOBS.flag, default=1, metavar="N", help="virtual: cells at once (default: 1)")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are already in DIR")
    parser.add_argument("--dry-run", action="store_true", help="list the cells and the time they will take")
    # Zero failures of fewer than 299 do not show that 99 % succeed.
    add_workload(parser, measured=300)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Sweep; the exit status."""
    try:
        costs = parse_costs(arguments.costs) if arguments.costs else None
        sweep = _sweep(arguments, costs)
    except (ValueError, OSError) as error:
        say_error("wsbatch-bench sweep", error)
        return 2
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    settings = arguments.setting or default_grid()
    results = Results(out / "cells.jsonl", resume=arguments.resume)
    if arguments.dry_run and arguments.capacity is None and arguments.engine == "real":
        print("the reference rate would be measured first (give --capacity to see the schedule):")
    capacity = arguments.capacity or _capacity(sweep, results, dry_run=arguments.dry_run)
    cells = grid(settings, capacity, arguments.fractions)
    left = [cell for cell in cells if results.get(sweep.key(cell)) is None]
    print(
        f"{len(cells)} cells, {len(left)} to measure: about {_span(sum(map(sweep.estimate_s, left)) / arguments.jobs)}"
    )
    if arguments.dry_run:
        for cell in cells:
            print(f"  {cell.setting.label:40} {cell.rate:8.4g} requests/s  {_span(sweep.estimate_s(cell)):>8}")
        return 0
    sweep.trace.save(out / "trace.jsonl")
    done = run_cells(
        sweep, cells, results, jobs=arguments.jobs, on_result=lambda _, result: print(_line(result), flush=True)
    )
    choice = choose(done, arguments.slo) if arguments.slo else None
    # Here, because matplotlib takes a second to import.
    from wsbatch_bench.sweep.files import SweepDocument

    document = SweepDocument(_meta(arguments, sweep, capacity, costs), done)
    names = document.write(out, choice)
    if choice is not None:
        print("\n".join(choice_lines(choice, document.meta)))
    print(f"written to {out}: {', '.join(names)}")
    return 0


def _sweep(arguments: argparse.Namespace, costs: Costs | None) -> Sweep:
    stage: Stage
    if arguments.engine == "virtual":
        stage, predictor = VirtualStage(costs or same_for_both(DEFAULT_COSTS)), None
    else:
        stage, predictor = (
            RealStage(arguments.model, tuple(arguments.serve_flag)),
            VirtualStage(costs) if costs else None,
        )
    return Sweep(stage, read_trace(arguments), read_warmups(arguments, 1.0), arguments.num_prompts, predictor)


def _capacity(sweep: Sweep, results: Results, *, dry_run: bool) -> float:
    """The capacity of the best dynamic setting: a full batch always waiting, for every batch size."""
    best = 0.0
    for size in BATCH_SIZES:
        key = f"capacity {size} {sweep.trace.sha256} {sweep.stage!r}"
        known = results.get(key)
        if known is None and not (dry_run and sweep.stage.name == "real"):
            known = sweep.capacity(Setting("dynamic", size))
            results.put(key, known)
        if known is not None:
            print(f"capacity of dynamic b{size}: {known:.4g} requests/s", flush=True)
        best = max(best, known or 0.0)
    return best or 1.0


def _meta(arguments: argparse.Namespace, sweep: Sweep, capacity: float, costs: Costs | None) -> dict[str, object]:
    model = arguments.model if arguments.engine == "real" else "simulated"
    shown = "" if arguments.engine == "real" else ", in virtual time"
    title = f"{model} model{shown}: {sweep.trace.arrivals} arrivals, {sweep.measured} requests a point"
    if (sweep.trace.prompts, sweep.trace.outputs) != (DEFAULT_PROMPTS, DEFAULT_OUTPUTS):
        title += f"\nnot the standard lengths: prompts {sweep.trace.prompts},\noutputs {sweep.trace.outputs}"
    return {
        "title": title,
        "engine": arguments.engine,
        "model": model,
        "serve_flags": arguments.serve_flag,
        "costs": None
        if costs is None and arguments.engine == "real"
        else costs_json(costs or same_for_both(DEFAULT_COSTS)),
        "capacity": capacity,
        "arrivals": sweep.trace.arrivals,
        "prompts": sweep.trace.prompts,
        "outputs": sweep.trace.outputs,
        "seed": sweep.trace.seed,
        "trace_sha256": sweep.trace.sha256,
        "warmup": sweep.warmup,
        "measured": sweep.measured,
        "machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _line(result: CellResult) -> str:
    notes = [result.verdict]
    if result.stopped_early:
        notes.append("stopped early")
    if result.invalid:
        notes.append(f"INVALID: {result.invalid}")
    if isfinite(result.predicted_e2e_p95_s):
        notes.append(f"predicted p95 {result.predicted_e2e_p95_s:.3g} s")
    return (
        f"{result.label:32} {result.rate:7.4g}/s  {result.output_throughput:7.1f} tokens/s  "
        f"TTFT p95 {result.ttft_p95_s:7.3g} s  e2e p95 {result.e2e_p95_s:7.3g} s  "
        f"slots {result.slot_utilization:5.1%}  {', '.join(notes)}"
    )


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _setting(text: str) -> Setting:
    try:
        return parse_setting(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _slo(text: str) -> object:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
