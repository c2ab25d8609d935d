"""`wsbatch-bench load`: put load on a running server."""

import argparse
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from math import inf, isinf
from pathlib import Path
from statistics import fmean
from typing import Any

import trio

from wsbatch.cli.parsing import TOKEN_VARIABLE, Commands, add_parser, say_error, token_from_environment
from wsbatch.client import connect
from wsbatch.errors import WsbatchError
from wsbatch_bench.cli.calibrate import load_calibration
from wsbatch_bench.cli.flags import THREADS, WORKLOAD_HELP, add_workload, read_trace, read_warmups
from wsbatch_bench.load.baseline import open_transformers_target
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.http_client import HttpFailed, dial_url
from wsbatch_bench.load.live import show_progress
from wsbatch_bench.load.openai_target import OpenAiTarget, TextPrompts
from wsbatch_bench.load.results import result_json, summary_lines
from wsbatch_bench.load.summary import parse_goodput, summarise
from wsbatch_bench.load.target import Target, open_websocket_target
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.numbers import BATCH, MILLISECONDS, RATE, Number

INVALID = 3
_BASELINE = "transformers:"

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
  wsbatch-bench load http://127.0.0.1:8000/v1/completions --model NAME --request-rate 2      vLLM, llama.cpp, …
  wsbatch-bench load transformers:demo --max-batch-size 8 --max-wait-ms 20 --request-rate 1  the baseline

exit statuses: 0 a valid run; 1 no connection; 2 bad usage; {INVALID} the run is not to be believed (it says why)
The auth token is read from ${TOKEN_VARIABLE}.
"""


def add_command(commands: Commands) -> None:
    """Add `load` to the command line."""
    parser = add_parser(commands, "load", help="put load on a running server", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "url", help="ws(s)://HOST:PORT; http(s)://HOST:PORT/v1/completions of a peer; or transformers:MODEL"
    )
    parser.add_argument(
        "--request-rate",
        type=replace(RATE, infinite=True).flag,
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
        type=MILLISECONDS.flag,
        default=100.0,
        metavar="MS",
        help="a later client invalidates the run (default: 100)",
    )
    group.add_argument(
        "--connections",
        type=Number(0, 10_000, whole=True).flag,
        default=16,
        metavar="N",
        help="opened beforehand (default: 16)",
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument("--model", metavar="NAME", help="http: the model's name there")
    peers.add_argument(
        "--extra-body",
        type=_object,
        metavar="JSON",
        help='http: more fields of each request; null leaves one of ours out: {"min_tokens": null}',
    )
    peers.add_argument(
        "--text-prompts",
        type=_text_prompts,
        default=list,
        metavar="FILE",
        help="http: send text of the same number of tokens by this tokenizer.json, where ids are not taken",
    )
    peers.add_argument("--max-batch-size", type=BATCH.flag, default=8, metavar="N", help="transformers: default: 8")
    peers.add_argument(
        "--max-wait-ms", type=MILLISECONDS.flag, default=0.0, metavar="MS", help="transformers: default: 0"
    )
    peers.add_argument("--dtype", default="auto", metavar="TEXT", help="transformers: as `wsbatch serve` takes it")
    peers.add_argument("--threads", type=THREADS.flag, metavar="N", help="transformers: default: torch's own choice")
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
        if arguments.url.startswith("http") and arguments.model is None:
            raise ValueError("--model is required for an http URL")
        if not arguments.url.startswith(_BASELINE):
            dial_url(arguments.url)
        token = token_from_environment()
        refusal = _refusal(trace, rate)
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    plan = LoadPlan(
        trace=trace,
        rate=rate,
        warmup=read_warmups(arguments, rate),
        measured=arguments.num_prompts,
        stop_unstable=False,
    )
    if refusal is not None:
        return _complain(ValueError(refusal), 2)
    failure: BaseException | None = None
    try:
        done, target = trio.run(_load, arguments, plan, token)
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
        _save(arguments, done, result_json(done, summary, backend=target.backend, model=target.model))
    return INVALID if summary.invalid else 0


async def _load(arguments: argparse.Namespace, plan: LoadPlan, token: str | None) -> tuple[LoadRun, Target]:
    async with _open_target(arguments, token) as target, trio.open_nursery() as nursery:
        done = await run_load(target, plan, on_start=lambda run: nursery.start_soon(show_progress, run))
        nursery.cancel_scope.cancel()
    return done, target


@asynccontextmanager
async def _open_target(arguments: argparse.Namespace, token: str | None) -> AsyncIterator[Target]:
    url: str = arguments.url
    if url.startswith(_BASELINE):
        async with open_transformers_target(
            url.removeprefix(_BASELINE),
            dtype=arguments.dtype,
            threads=arguments.threads,
            max_batch_size=arguments.max_batch_size,
            max_wait_ms=arguments.max_wait_ms,
        ) as baseline:
            yield baseline
        return
    dial, host, path = dial_url(url)
    if url.startswith("http"):
        yield OpenAiTarget(
            arguments.model,
            dial=dial,
            host=host,
            path=path,
            auth_token=token,
            extra=arguments.extra_body,
            make_prompt=arguments.text_prompts,
        )
        return
    opening = partial(connect, url, auth_token=token)
    async with open_websocket_target(opening, dial=dial, host=host, connections=arguments.connections) as target:
        yield target


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
    path.write_text(json.dumps(result, allow_nan=False) + "\n")
    done.plan.trace.save(path.with_suffix(".trace.jsonl"))
    print(f"saved                {path}, and its trace")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be an object, got {text!r}")
    return value


def _text_prompts(text: str) -> TextPrompts:
    try:
        return TextPrompts(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _complain(error: BaseException, status: int) -> int:
    say_error("wsbatch-bench load", error)
    return status
