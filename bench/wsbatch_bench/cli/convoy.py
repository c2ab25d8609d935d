"""`wsbatch-bench convoy`: do live connections make the model's steps longer, and the event loop late?"""

import argparse
from statistics import median

import trio

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch_bench.bare_loop import LoopRequest
from wsbatch_bench.cli.model_flags import add_model_flags, engine_config
from wsbatch_bench.convoy import Steps, run_alone, steps_with_streams
from wsbatch_bench.server_process import serving_process
from wsbatch_bench.trace import draw_trace

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
  wsbatch-bench convoy
  wsbatch-bench convoy --model demo --threads 2 --streams 32

exit statuses: 0 within both; 2 bad usage or no model; {OVER} over one of them
"""


def add_command(commands: Commands) -> None:
    """Add `convoy` to the command line."""
    parser = add_parser(commands, "convoy", help="connections against steps", description=_DESCRIPTION, epilog=_EPILOG)
    add_model_flags(parser, scheduler="continuous")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    draw = draw_trace(arguments.streams).prompt_ids
    requests = [LoopRequest(draw(index, 32), arguments.output_tokens) for index in range(arguments.streams)]
    try:
        config = engine_config(arguments, max_batch_size=arguments.streams)
        served = trio.run(_served, arguments, requests)
        alone = run_alone(config, requests, runs=arguments.runs)
    except (RuntimeError, ValueError, OSError) as error:
        say_error("wsbatch-bench convoy", error)
        return 2
    with_s, without_s = (median(steps.mean_s for steps in runs) for runs in (served, alone))
    lag_s = max(steps.lag_p99_s for steps in served)
    good = with_s <= _MAX_RATIO * without_s and lag_s <= _MAX_LAG_S
    print(f"mean step with {arguments.streams} streams   {_each(served)} ms")
    print(f"mean step without         {_each(alone)} ms")
    print(f"ratio of the medians      {with_s / without_s:.3f} (wanted: at most {_MAX_RATIO:g})")
    print(f"event loop, lateness p99  ≤ {1000 * lag_s:g} ms (wanted: {1000 * _MAX_LAG_S:g})")
    return 0 if good else OVER


async def _served(arguments: argparse.Namespace, requests: list[LoopRequest]) -> list[Steps]:
    flags = ["--model", arguments.model, "--scheduler", arguments.scheduler, "--dtype", arguments.dtype]
    flags += ["--max-batch-size", str(arguments.streams), "--max-wait-ms", "0", "--no-prefix-cache"]
    flags += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    async with serving_process(*flags) as server:
        await steps_with_streams(server, requests)
        return [await steps_with_streams(server, requests) for _ in range(arguments.runs)]


def _each(runs: list[Steps]) -> str:
    return " ".join(f"{1000 * steps.mean_s:.2f}" for steps in runs)
