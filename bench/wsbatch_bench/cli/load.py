"""`wsbatch-bench load`: put load on a running server."""

import argparse
import json
import sys
from functools import partial
from math import inf, isinf
from pathlib import Path

import trio

from wsbatch.cli.parsing import TOKEN_VARIABLE, Commands, add_parser, token_from_environment
from wsbatch.client import connect
from wsbatch.errors import WsbatchError
from wsbatch_bench.cli.workload import WORKLOAD_HELP, add_workload, read_trace, read_warmups
from wsbatch_bench.http_client import HttpFailed, dial_url
from wsbatch_bench.live import show_progress
from wsbatch_bench.load import LoadPlan, LoadRun, run_load
from wsbatch_bench.summary import Summary, parse_goodput, summarise
from wsbatch_bench.target import open_websocket_target
from wsbatch_bench.text_report import summary_lines
from wsbatch_bench.vllm_json import result_json

INVALID = 3

_DESCRIPTION = """\
Put load on a running server, open loop: a schedule is computed first, and every request is sent at
its time, whatever became of the others. Latencies count from the scheduled time. Requests that
fail or are shed count as infinitely late and stay in the denominator.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
examples:
  wsbatch-bench load ws://127.0.0.1:8765 --request-rate 2
  wsbatch-bench load ws://127.0.0.1:8765 --request-rate 2 --burstiness 0.5 --goodput ttft:500 e2el:5000
  wsbatch-bench load ws://127.0.0.1:8765 --arrivals closed:clients=8 --num-prompts 100
  wsbatch-bench load ws://127.0.0.1:8765 --trace mine.jsonl --save-result

exit statuses: 0 a valid run; 1 no connection; 2 bad usage; {INVALID} the run is not to be believed (it says why)
The auth token is read from ${TOKEN_VARIABLE}.
"""


def add_command(commands: Commands) -> None:
    """Add `load` to the command line."""
    parser = add_parser(commands, "load", help="put load on a running server", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("url", help="ws:// or wss://")
    parser.add_argument(
        "--request-rate",
        type=_rate,
        metavar="R",
        help="requests a second; inf sends all at once (default: inf, or the trace's own rate)",
    )
    add_workload(parser, measured=200)
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="bounds for each request: ttft, tpot, e2el (milliseconds)"
    )
    group.add_argument(
        "--max-lag-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="a later client invalidates the run (default: 100)",
    )
    group.add_argument("--connections", type=int, default=16, metavar="N", help="opened beforehand (default: 16)")
    group.add_argument(
        "--save-result", action="store_true", help="write JSON with vLLM's keys, and the trace beside it"
    )
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR", help="default: here")
    group.add_argument("--result-filename", metavar="FILE", help="default: made of the backend, the rate and the date")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the load and print what it showed; the exit status."""
    try:
        trace = read_trace(arguments)
        goodput = parse_goodput(arguments.goodput) if arguments.goodput else None
        rate = arguments.request_rate or trace.natural_rate or inf
        dial_url(arguments.url)
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    plan = LoadPlan(
        trace=trace,
        rate=rate,
        warmup=read_warmups(arguments, rate),
        measured=arguments.num_prompts,
        stop_unstable=False,
    )
    failure: BaseException | None = None
    try:
        done, model = trio.run(_load, arguments, plan)
    except* (WsbatchError, OSError, HttpFailed) as group:
        failure = _first(group)
    if failure is not None:
        return _complain(failure, 1)
    summary = summarise(done, goodput=goodput, max_lag_s=arguments.max_lag_ms / 1000)
    closed = trace.closed
    offered = f"{rate:g} requests/s, {trace.arrivals}" if closed is None else trace.arrivals
    print(
        "\n".join(
            [
                f"trace                sha256 {trace.sha256[:16]}…, seed {trace.seed}",
                *summary_lines(summary, offered=offered),
            ]
        )
    )
    if arguments.save_result:
        _save(arguments, done, summary, model)
    return INVALID if summary.invalid else 0


async def _load(arguments: argparse.Namespace, plan: LoadPlan) -> tuple[LoadRun, str]:
    dial, host, _ = dial_url(arguments.url)
    opening = partial(connect, arguments.url, auth_token=token_from_environment())
    async with (
        open_websocket_target(opening, dial=dial, host=host, connections=arguments.connections) as target,
        trio.open_nursery() as nursery,
    ):
        done = await run_load(target, plan, on_start=lambda run: nursery.start_soon(show_progress, run))
        nursery.cancel_scope.cancel()
    return done, target.model


def _save(arguments: argparse.Namespace, done: LoadRun, summary: Summary, model: str) -> None:
    result = result_json(done, summary, backend="wsbatch", model=model)
    rate = "inf" if isinf(done.plan.rate) else f"{done.plan.rate:g}"
    name = arguments.result_filename or f"wsbatch-{rate}qps-{result['date']}.json"
    path = arguments.result_dir / name
    path.write_text(json.dumps(result, allow_nan=False) + "\n")
    done.plan.trace.save(path.with_suffix(".trace.jsonl"))
    print(f"saved                {path}, and its trace")


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return rate


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _complain(error: BaseException, status: int) -> int:
    print(f"wsbatch-bench load: {' '.join(str(error).split()) or repr(error)}", file=sys.stderr)
    return status
