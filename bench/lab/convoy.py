"""Do live connections make the model's steps longer, and the event loop late? Two threads share the GIL."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NoReturn

import trio

from lab_tools.looks import look
from lab_tools.script import run_script, script_parser
from lab_tools.streams import stream_all
from wsbatch.cli.parsing import BAD_USAGE, ending_with
from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.open import open_engine
from wsbatch.messages import GenerateRequest, SamplingParams
from wsbatch_bench.cli.flags import add_model_flags, engine_config
from wsbatch_bench.load.server import ServerProcess, parse_totals, server_process, wsbatch_command
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.steps.bare_loop import LoopRequest

OVER = 3
_MAX_RATIO = 1.05
_MAX_LAG_S = 0.020

_DESCRIPTION = f"""\
Run the same requests through a server with one connection each, and through the engine in this
process with nobody reading: the mean time of a model step in both, and how late the server's event
loop was. Wanted: a ratio of at most {_MAX_RATIO:g}, and p99 of the lateness under {1000 * _MAX_LAG_S:g} ms. The clients
take their share of the machine too: with few cores the ratio holds that as well. (The simulated
model's steps take what they are told to; there only the lateness means anything.)
"""

_EPILOG = f"""\
examples:
  python bench/lab/convoy.py
  python bench/lab/convoy.py --model demo --threads 2 --streams 32

exit statuses: 0 within both; 2 bad usage or no model; {OVER} over one of them
"""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one run: their mean, and an upper bound on the event loop's lateness at p99 (nan: not measured)."""

    mean_s: float
    lag_p99_s: float


async def steps_with_streams(server: ServerProcess, requests: Sequence[LoopRequest]) -> Steps:
    """Stream every request over a connection of its own, all at once."""
    before = await look(server)
    await stream_all(server.url, requests)
    after = await look(server)
    seconds, count = (
        after.values[name] - before.values[name] for name in ("wsbatch_step_seconds_sum", "wsbatch_step_seconds_count")
    )
    return Steps(seconds / count, after.lag_quantile_s(before, 0.99))


async def steps_alone(config: EngineConfig, requests: Sequence[LoopRequest], *, runs: int) -> list[Steps]:
    """The same in this process, without a server: nobody reads a token before the end."""
    async with open_engine(config) as engine:
        await _run_alone(engine, requests)  # as the server is warmed up
        return [await _run_alone(engine, requests) for _ in range(runs)]


async def _run_alone(engine: BatchEngine, requests: Sequence[LoopRequest]) -> Steps:
    before = parse_totals(engine.metrics.render().decode())
    streams = []
    for index, request in enumerate(requests):
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        ask = GenerateRequest(id=index, token_ids=request.prompt_ids, sampling=sampling, stream=False)
        streams.append(await engine.submit(ask))
    for stream in streams:
        async for _ in stream:
            pass
    spent = parse_totals(engine.metrics.render().decode()).since(before)
    return Steps(spent.step_seconds / spent.steps, float("nan"))


def run_alone(config: EngineConfig, requests: Sequence[LoopRequest], *, runs: int) -> list[Steps]:
    """`steps_alone` in an event loop of its own. Raises what loading the model raises."""
    return trio.run(lambda: steps_alone(config, requests, runs=runs))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("convoy", description=_DESCRIPTION, epilog=_EPILOG)
    add_model_flags(parser, scheduler="continuous")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    draw = draw_trace(arguments.streams).prompt_ids
    requests = [LoopRequest(draw(index, 32), arguments.output_tokens) for index in range(arguments.streams)]
    with ending_with(BAD_USAGE, RuntimeError, ValueError, OSError):
        config = engine_config(arguments, max_batch_size=arguments.streams)
        served = _served(arguments, requests)
        alone = run_alone(config, requests, runs=arguments.runs)
    with_s, without_s = (median(steps.mean_s for steps in runs) for runs in (served, alone))
    lag_s = max(steps.lag_p99_s for steps in served)
    good = with_s <= _MAX_RATIO * without_s and lag_s <= _MAX_LAG_S
    print(f"mean step with {arguments.streams} streams   {_each(served)} ms")
    print(f"mean step without         {_each(alone)} ms")
    print(f"ratio of the medians      {with_s / without_s:.3f} (wanted: at most {_MAX_RATIO:g})")
    print(f"event loop, lateness p99  ≤ {1000 * lag_s:g} ms (wanted: {1000 * _MAX_LAG_S:g})")
    return 0 if good else OVER


def _served(arguments: argparse.Namespace, requests: list[LoopRequest]) -> list[Steps]:
    flags = ["--model", arguments.model, "--scheduler", arguments.scheduler, "--dtype", arguments.dtype]
    flags += ["--max-batch-size", str(arguments.streams), "--max-wait-ms", "0", "--no-prefix-cache"]
    flags += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    with server_process(wsbatch_command("serve", *flags)) as server:
        runs = [trio.run(steps_with_streams, server, requests) for _ in range(1 + arguments.runs)]
    return runs[1:]  # the first one warms it up


def _each(runs: list[Steps]) -> str:
    return " ".join(f"{1000 * steps.mean_s:.2f}" for steps in runs)


if __name__ == "__main__":
    main()
