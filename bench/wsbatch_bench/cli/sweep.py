"""`wsbatch-bench sweep`: every setting at every rate."""

import argparse
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path

from wsbatch.cli.parsing import BAD_USAGE, FAILED, Commands, add_parser, ending_with, say_error
from wsbatch.cli.streams import INTERRUPTED
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.cli.flags import (
    JOBS,
    LONG_S,
    WORKLOAD_HELP,
    add_engine_flags,
    add_overwrite,
    add_request_timeout,
    add_workload,
    prepare_files,
    read_trace,
    read_warmups,
    span,
)
from wsbatch_bench.load.specs import DEFAULT_OUTPUTS, DEFAULT_PROMPTS
from wsbatch_bench.numbers import Number, numbers
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.choose import REFINED, choice_lines, choose, settle
from wsbatch_bench.sweep.grid import (
    FRACTIONS,
    LEAST_VIRTUAL,
    MOST_VIRTUAL,
    REAL,
    Results,
    Sweep,
    grid,
    remembering,
    run_cells,
)
from wsbatch_bench.sweep.setting import (
    Costs,
    Setting,
    check_costs,
    costs_json,
    default_grid,
    parse_costs,
    same_for_both,
    setting_flag,
)
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import RealStage, Stage
from wsbatch_bench.trio_run import Unreachable

_FEWEST = 40  # requests of a cell that can be judged at all
_FRACTION = Number(0.001, 1000)

_DESCRIPTION = """\
Measure every setting at three rates: throughput, latencies, slot utilisation and waste, as CSV,
JSON and one chart. Rates are fractions of the capacity of the best dynamic setting. The same
trace serves every cell, rescaled. A cell in which the server falls behind is stopped early.

A rate above the measured capacity of its setting never passes, and a cell too short to tell is
undecided.

--engine virtual runs the schedulers in virtual time over a simulated model, whose steps cost tau
+ alpha for each decode row + beta for each prompt token: the same every time, and minutes for
the whole grid. --engine real starts `wsbatch serve` for each cell.
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
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that the results are written to")
    add_engine_flags(parser)
    parser.add_argument(
        "--costs",
        metavar="COSTS",
        help="step costs of the simulated model: tau_ms=…,alpha_ms=…,beta_ms=…, or a file that `scaling --out` wrote "
        "(default: 10, 1, 0.5); with --engine real: predict each cell in virtual time, too",
    )
    parser.add_argument(
        "--setting",
        action="append",
        type=setting_flag,
        metavar="SPEC",
        help="measure only this setting; may be repeated",
    )
    parser.add_argument(
        "--fractions",
        type=numbers(_FRACTION),
        default=FRACTIONS,
        metavar="X,X",
        help="rates to measure, as fractions of the capacity (default: 0.3,0.7,1.1)",
    )
    parser.add_argument(
        "--slo", type=_slo, metavar="SLO", help="choose a setting by these conditions, and mark it; see `choose`"
    )
    parser.add_argument(
        "--jobs", type=JOBS.flag, default=1, metavar="N", help="with --engine virtual: cells run at once (default: 1)"
    )
    parser.add_argument("--resume", action="store_true", help="keep the cells that are already in DIR")
    add_overwrite(parser)
    add_request_timeout(parser)
    parser.add_argument("--dry-run", action="store_true", help="list the cells and the time they will take")
    add_workload(
        parser,
        measured=None,
        shown=f"{REAL}; with --engine virtual: as many as the intervals need, {LEAST_VIRTUAL} to {MOST_VIRTUAL}",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Sweep; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        costs = parse_costs(arguments.costs) if arguments.costs else None
        settings = arguments.setting or default_grid()
        sweep = _sweep(arguments, costs, settings)
        results = _results(arguments)
    done: dict[int, CellResult] = {}
    capacity, status = arguments.capacity, 0
    try:
        capacity = capacity or _capacity(sweep, results, settings, dry_run=arguments.dry_run)
        cells = grid(settings, capacity, arguments.fractions)
        print("\n".join(_plan_lines(arguments, sweep, cells, results)), flush=True)
        if arguments.dry_run:
            return 0
        sweep.trace.save(arguments.out / "trace.jsonl")
        for index, result in run_cells(sweep, cells, results, jobs=arguments.jobs):
            done[index] = result
            print(_line(result), flush=True)
        if arguments.slo is not None and arguments.engine == "virtual":
            closer = sweep.closer()
            again = closer.again()
            measure, measure_again = remembering(closer, results), again and remembering(again, results)
            settled = settle([*done.values()], arguments.slo, measure, measure_again, rounds=REFINED)
            done = dict(enumerate(settled))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (*Unreachable, RuntimeError) as error:
        say_error("wsbatch-bench sweep", error)
        status = FAILED
    if status:
        print(f"ended early: {len(done)} cells are kept in {arguments.out}; --resume measures the others", flush=True)
    if done:
        _write(arguments, _meta(arguments, sweep, capacity, costs), [done[index] for index in sorted(done)])
    return status


def _write(arguments: argparse.Namespace, meta: dict[str, object], cells: list[CellResult]) -> None:
    # Here, because matplotlib takes a second to import.
    from wsbatch_bench.sweep.files import SweepDocument

    choice = choose(cells, arguments.slo) if arguments.slo else None
    document = SweepDocument(meta, cells)
    names = document.write(arguments.out, choice)
    if choice is not None:
        print("\n".join(choice_lines(choice, document.meta)))
    print(f"written to {arguments.out}: {', '.join(names)}")


def _sweep(arguments: argparse.Namespace, costs: Costs | None, settings: Sequence[Setting]) -> Sweep:
    """Raises ValueError or OSError."""
    if arguments.engine == "real" and arguments.jobs > 1:
        raise ValueError(f"--jobs is {arguments.jobs}: must be 1 where the machine itself is measured")
    if costs is not None:
        check_costs(costs, settings, name=arguments.costs)
    stage: Stage
    if arguments.engine == "virtual":
        stage, predictor = PoolStage(costs or same_for_both(DEFAULT_COSTS)), None
    else:
        stage, predictor = (
            RealStage(arguments.model, tuple(arguments.serve_flag)),
            PoolStage(costs) if costs else None,
        )
    planned = arguments.num_prompts is None and stage.name == "virtual"
    arguments.num_prompts = arguments.num_prompts or REAL
    trace = read_trace(arguments)
    if trace.closed is not None:
        raise ValueError(
            f"--arrivals is {trace.arrivals}: a rate needs an open loop (`load` and `study` have closed ones)"
        )
    if planned:
        arguments.num_prompts = LEAST_VIRTUAL
    warmup, measured = read_warmups(arguments, 1.0), arguments.num_prompts
    timeout_s = arguments.request_timeout_s if arguments.engine == "real" else inf
    return Sweep(stage, trace, warmup, measured, predictor, timeout_s, most=MOST_VIRTUAL if planned else measured)


def _results(arguments: argparse.Namespace) -> Results:
    """The results so far, of the cells that `--out` may keep. Raises ValueError or OSError."""
    path: Path = arguments.out / "cells.jsonl"
    if arguments.dry_run:
        return Results(path)
    if arguments.resume and arguments.overwrite:
        raise ValueError("--resume and --overwrite: only one of them")
    prepare_files(arguments)
    if arguments.overwrite:
        path.unlink(missing_ok=True)
    results = Results(path)
    if not arguments.resume and (len(results) or (arguments.out / "sweep.json").exists()):
        raise ValueError(
            f"{arguments.out} holds {len(results)} results: --resume keeps them and measures what is missing, "
            "--overwrite begins anew"
        )
    return results


def _capacity(sweep: Sweep, results: Results, settings: Sequence[Setting], *, dry_run: bool) -> float:
    """The capacity of the best dynamic setting: a full batch always waiting, for every batch size that is swept."""
    sizes = sorted({setting.max_batch_size for setting in settings})
    keys = {size: f"capacity {size} {sweep.trace.sha256} {sweep.stage!r}" for size in sizes}
    real = sweep.stage.name == "real"
    if real and (missing := [size for size in sizes if results.get(keys[size]) is None]):
        requests = sum(map(sweep.probe_requests, missing))
        print(
            f"the reference rate is measured first: {requests:,} requests in {len(missing)} runs, each with a full "
            "batch always waiting (--capacity R does without)",
            flush=True,
        )
    best = 0.0
    for size in sizes:
        known = results.get(keys[size])
        if known is None and not (dry_run and real):
            known = sweep.capacity(Setting("dynamic", size))
            if not dry_run:
                results.put(keys[size], known)
        if known is not None:
            print(f"capacity of dynamic b{size}: {known:.4g} requests/s", flush=True)
        best = max(best, known or 0.0)
    return best or 1.0


def _plan_lines(arguments: argparse.Namespace, sweep: Sweep, cells: Sequence[Cell], results: Results) -> list[str]:
    """What is to be measured, how long that takes, what would shorten it, and what it will not show."""
    left = [cell for cell in cells if results.get(sweep.key(cell)) is None]
    takes_s = sum(map(sweep.estimate_s, left)) / arguments.jobs
    lines = [f"{len(cells)} cells, {len(left)} to measure: about {span(takes_s)}"]
    if takes_s > LONG_S:
        lines.append(f"shorter: {_shorter(arguments, sweep, left, takes_s)}")
    if arguments.slo is not None:
        lines += arguments.slo.lacking(max(sweep.measured, sweep.most))
    if arguments.dry_run:
        lines += [
            f"  {cell.setting.label:40} {cell.rate:8.4g} requests/s  {span(sweep.estimate_s(cell)):>8}"
            for cell in cells
        ]
    return lines


def _shorter(arguments: argparse.Namespace, sweep: Sweep, left: Sequence[Cell], takes_s: float) -> str:
    fewer = max(1, int(sweep.measured * LONG_S / takes_s))
    ways = ["fewer cells (--setting, --fractions)"]
    if fewer >= _FEWEST:
        ways.append(f"--num-prompts {fewer} (about {span(LONG_S)})")
    if arguments.engine == "real":
        virtual = Sweep(PoolStage(same_for_both(DEFAULT_COSTS)), sweep.trace, LEAST_VIRTUAL // 5, LEAST_VIRTUAL)
        ways.append(
            f"--engine virtual --costs FILE, of `scaling --out` (about {span(sum(map(virtual.estimate_s, left)))}), "
            "and then the best few on the real one"
        )
    elif arguments.jobs == 1:
        ways.append("--jobs 2, and more where there are cores")
    return "; ".join(ways) + ". Ctrl-C keeps what is measured, --resume goes on"


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
        "most": sweep.most,
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


def _slo(text: str) -> object:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
