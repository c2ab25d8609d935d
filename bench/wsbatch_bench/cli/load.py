"""`wsbatch-bench load`: put load on a running server."""

import argparse
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from math import inf, isinf
from pathlib import Path
from statistics import fmean
from typing import Any

import trio

from wsbatch.cli.parsing import (
    BAD_USAGE,
    FAILED,
    TOKEN_VARIABLE,
    Commands,
    add_parser,
    ending_with,
    token_from_environment,
)
from wsbatch.cli.streams import INTERRUPTED
from wsbatch_bench.cli.calibrate import load_calibration
from wsbatch_bench.cli.flags import (
    LONG_S,
    WORKLOAD_HELP,
    add_overwrite,
    add_request_timeout,
    add_sampling,
    add_workload,
    read_sampling,
    read_trace,
    read_warmups,
    span,
)
from wsbatch_bench.cli.targets import add_target_flags, check_target, open_target
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.live import show_progress
from wsbatch_bench.load.results import result_json, summary_lines
from wsbatch_bench.load.summary import Summary, parse_goodput, summarise
from wsbatch_bench.load.target import Target, WebSocketTarget
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.numbers import MILLISECONDS, RATE
from wsbatch_bench.sweep.cell import Cell, cell_result
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.slo import Slo, parse_slo
from wsbatch_bench.trio_run import Unreachable, run_trio

MISSED, INVALID, UNDECIDED = 1, 3, 5
_UNKNOWN = Setting("unknown", 1)  # how the server is set, nobody says here

_DESCRIPTION = """\
Put load on a running server, open loop: a schedule is computed first, and every request is sent at
its time, whatever became of the others. Latencies count from the scheduled time. Requests that
fail or are shed count as infinitely late and stay in the denominator. Ctrl-C ends the run early:
what was measured is reported and saved all the same.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
examples:
  wsbatch-bench load ws://127.0.0.1:8765 --request-rate 2
  wsbatch-bench load ws://127.0.0.1:8765 --request-rate 3 --slo "ttft_p95<=500ms,success>=99%" --num-prompts 300
  wsbatch-bench load ws://127.0.0.1:8765 --request-rate 2 --burstiness 0.5 --goodput ttft:500 e2el:5000
  wsbatch-bench load ws://127.0.0.1:8765 --arrivals closed:clients=8 --num-prompts 100
  wsbatch-bench load ws://127.0.0.1:8765 --trace mine.jsonl --save-result
  wsbatch-bench load http://127.0.0.1:8000/v1/completions --model NAME --request-rate 2      vLLM, llama.cpp, …
  wsbatch-bench load transformers:demo --max-batch-size 8 --max-wait-ms 20 --request-rate 1  the baseline

exit statuses: 0 a valid run, and the SLO certainly holds; {MISSED} it certainly does not, or there is no
connection, no answer at all, or the server was lost; 2 bad usage; {INVALID} the run is not to be believed (it
says why); {UNDECIDED} the SLO is undecided: measure more requests; {INTERRUPTED} interrupted
The auth token is read from ${TOKEN_VARIABLE}.
"""


def add_command(commands: Commands) -> None:
    """Add `load` to the command line."""
    parser = add_parser(commands, "load", help="put load on a running server", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "--request-rate",
        type=replace(RATE, infinite=True).flag,
        metavar="R",
        help="requests a second; inf sends all at once (default: inf, or the trace's own rate)",
    )
    add_workload(parser, measured=200, seed=None)
    group = parser.add_argument_group("measuring")
    group.add_argument("--slo", metavar="SLO", help="judge the run by these conditions, as `choose` takes them")
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="bounds that a request must meet to count as goodput: ttft, tpot, e2el (milliseconds)",
    )
    add_request_timeout(group)
    group.add_argument(
        "--max-lag-ms",
        type=MILLISECONDS.flag,
        default=100.0,
        metavar="MS",
        help="longest lag of this client behind its schedule; more makes the run invalid (default: 100)",
    )
    group.add_argument(
        "--save-result", action="store_true", help="write JSON with vLLM's keys, and the trace beside it"
    )
    group.add_argument(
        "--result-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory of the saved result (default: the current one)",
    )
    group.add_argument(
        "--result-filename",
        metavar="FILE",
        help="name of the saved result (default: made of the backend, the rate and the date)",
    )
    add_overwrite(group)
    add_sampling(parser, beside=False)
    add_target_flags(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Job:
    """What the flags ask for, checked."""

    plan: LoadPlan
    slo: Slo | None
    goodput: dict[str, float] | None
    token: str | None


def run(arguments: argparse.Namespace) -> int:
    """Run the load and print what it showed; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        job = _read(arguments)
    plan = job.plan
    _say_beforehand(plan, job.slo)
    with ending_with(FAILED, *Unreachable):
        done, target = run_trio(_load, arguments, job)
    summary = summarise(done, goodput=job.goodput, max_lag_s=arguments.max_lag_ms / 1000)
    print("\n".join([*summary_lines(done, summary), *_notes(done, target)]))
    if arguments.save_result:
        _save(arguments, done, result_json(done, summary, backend=target.backend, model=target.model))
    return _status(done, summary, _judge(job.slo, summary, plan.rate))


def _read(arguments: argparse.Namespace) -> _Job:
    """Raises ValueError or OSError."""
    trace = read_trace(arguments, rescaled=arguments.request_rate not in (None, inf))
    if arguments.request_rate is not None and trace.closed is not None:
        raise ValueError(f"--request-rate with arrivals {trace.arrivals}: its answers set the pace")
    rate = arguments.request_rate or trace.natural_rate or inf
    job = _Job(
        LoadPlan(
            trace=trace,
            rate=rate,
            warmup=read_warmups(arguments, rate if trace.closed is None else 1.0),
            measured=arguments.num_prompts,
            request_timeout_s=arguments.request_timeout_s,
            sampling=read_sampling(arguments),
        ),
        parse_slo(arguments.slo) if arguments.slo is not None else None,
        parse_goodput(arguments.goodput) if arguments.goodput else None,
        token_from_environment(),
    )
    check_target(arguments)
    if arguments.save_result:
        _prepare_results(arguments)
    if (refusal := _refusal(trace, rate)) is not None:
        raise ValueError(refusal)
    return job


def _prepare_results(arguments: argparse.Namespace) -> None:
    """Make the folder now: a run is not lost because there is no place for it. Raises ValueError or OSError."""
    folder: Path = arguments.result_dir
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--result-dir {folder}: cannot be written to")
    if arguments.result_filename is None:
        return
    path = folder / arguments.result_filename
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"--result-filename {arguments.result_filename}: must name a file in {folder}")
    for each in (path, path.with_suffix(".trace.jsonl")):
        if each.exists() and not arguments.overwrite:
            raise ValueError(f"{each} exists: give another --result-filename, or --overwrite")


def _say_beforehand(plan: LoadPlan, slo: Slo | None) -> None:
    lines = slo.lacking(plan.measured) if slo is not None else []
    requests = f"{plan.warmup} warm-up and {plan.measured} measured requests"
    if plan.span_s is None:
        lines.append(f"{requests}, as fast as the server answers them")
    else:
        lines.append(f"{requests}: about {span(plan.span_s)}, and until the last one is answered")
        if plan.span_s > LONG_S:
            lines.append(
                f"shorter: --num-prompts {max(1, int(plan.measured * LONG_S / plan.span_s))}, or a higher rate"
            )
    print("\n".join(lines), file=sys.stderr)


async def _load(arguments: argparse.Namespace, job: _Job) -> tuple[LoadRun, Target]:
    interrupt = trio.Event()
    async with open_target(arguments, job.plan, job.token) as target, trio.open_nursery() as nursery:
        await nursery.start(_catch_signals, interrupt)
        done = await run_load(
            target, job.plan, on_start=lambda run: nursery.start_soon(show_progress, run), interrupt=interrupt
        )
        nursery.cancel_scope.cancel()
    return done, target


async def _catch_signals(interrupt: trio.Event, task_status: trio.TaskStatus[None]) -> None:
    """The first one ends the run and keeps what was measured; the next one is Python's again."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            interrupt.set()
            return


def _notes(done: LoadRun, target: Target) -> list[str]:
    """What a reader of the summary should know besides."""
    lines = []
    if isinstance(target, WebSocketTarget) and target.connections > target.opened:
        lines.append(
            f"connections          {target.opened} opened beforehand, {target.connections - target.opened} under load"
        )
    first = {record.error: record for record in reversed(done.records) if record.message}
    lines += [f"first {code:14} request {record.index}: {record.message}" for code, record in first.items()]
    return lines


def _judge(slo: Slo | None, summary: Summary, rate: float) -> str:
    if slo is None:
        return "pass"
    cell = cell_result(Cell(_UNKNOWN, 1.0, rate), summary, engine="real")
    verdict = slo.judge(cell)
    print(f"SLO                  {slo.text}: {verdict}")
    print("\n".join(f"  {bound.explain(cell)}" for bound in slo.bounds))
    if verdict == "fail" and cell.verdict == "unstable":
        print("  the server does not keep up with the rate")
    if verdict == "undecided":
        print("  more requests tell more (--num-prompts)")
    return verdict


def _status(done: LoadRun, summary: Summary, verdict: str) -> int:
    if done.interrupted:
        return INTERRUPTED
    if done.lost or not summary.completed or verdict == "fail":
        return MISSED
    if summary.invalid:
        return INVALID
    return 0 if verdict == "pass" else UNDECIDED


def _refusal(trace: Trace, rate: float) -> str | None:
    """Why this client must not measure such a load, as far as is known."""
    known = load_calibration()
    if known is None:
        print("this client is not calibrated (`wsbatch-bench calibrate`): only its lag tells", file=sys.stderr)
        return None
    if isinf(rate) or trace.closed is not None:
        return None  # the server decides how fast these go
    return known.refusal(rate, fmean(entry.output_tokens for entry in trace.entries))


def _save(arguments: argparse.Namespace, done: LoadRun, result: Any) -> None:
    rate = "inf" if isinf(done.plan.rate) else f"{done.plan.rate:g}"
    name = arguments.result_filename or f"{result['backend']}-{rate}qps-{result['date']}.json"
    path = arguments.result_dir / name
    if arguments.result_filename is None and path.exists():  # of another run that ended in this second
        path = path.with_stem(f"{path.stem}-{os.getpid()}")
    path.write_text(json.dumps(result, allow_nan=False) + "\n")
    done.plan.trace.save(path.with_suffix(".trace.jsonl"))
    print(f"saved                {path}, and its trace")
