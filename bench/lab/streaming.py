"""What sockets, sessions and frames take from the model's throughput."""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import NoReturn

import trio

from lab_tools.script import run_script, script_parser
from lab_tools.streams import StreamedRun, stream_all
from wsbatch.cli.parsing import BAD_USAGE, ending_with
from wsbatch.errors import WsbatchError
from wsbatch_bench.cli.flags import add_model_flags, add_sampling, engine_config, read_costs, read_sampling
from wsbatch_bench.load.server import server_process, wsbatch_command
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sampling import GREEDY, shown
from wsbatch_bench.steps.bare_loop import LoopRequest, sampled
from wsbatch_bench.steps.engine_run import run_engine

_DESCRIPTION = """\
Stream the same batch of requests through a server in a process of its own, one connection each, and
through the engine in this process; in turn, and print the ratio pair by pair. With `--model
simulated:tau_ms=1,alpha_ms=0,beta_ms=0` the model costs nothing, and what is measured is the front
end alone: there is no engine run then.
"""

_EPILOG = """\
examples:
  python bench/lab/streaming.py --model demo --scheduler dynamic
  python bench/lab/streaming.py --model simulated:tau_ms=1,alpha_ms=0,beta_ms=0 --clients 64 --output-tokens 2000
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("streaming", description=_DESCRIPTION, epilog=_EPILOG)
    add_model_flags(parser, scheduler="continuous")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="connections (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add_sampling(parser, beside=True)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="pairs (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    draw = draw_trace(arguments.clients).prompt_ids
    prompts = [draw(index, arguments.prompt_tokens) for index in range(arguments.clients)]
    requests = [LoopRequest(prompt, arguments.output_tokens) for prompt in prompts]
    simulated = arguments.model.startswith("simulated")
    # A simulated model draws at no cost.
    choices = dict.fromkeys((GREEDY,) if simulated else (GREEDY, read_sampling(arguments)))
    figures: dict[str, dict[str, list[float]]] = {
        shown(choice): {"served_tokens_per_s": [], "in_process_tokens_per_s": [], "ratios": []} for choice in choices
    }
    with ending_with(BAD_USAGE, ValueError, OSError, RuntimeError, WsbatchError):
        for _, choice in product(range(arguments.runs), choices):
            workload, own = sampled(requests, choice), figures[shown(choice)]
            served = _served(arguments, workload)
            own["served_tokens_per_s"].append(served.tokens_per_s)
            line = f"served {served.tokens_per_s:9.1f} tokens/s, {served.tokens / served.frames:.2f} a frame"
            if not simulated:
                # The first run warms up, the second counts.
                config = engine_config(arguments, max_batch_size=arguments.clients)
                last = run_engine(config, [workload] * 2, costs=read_costs(arguments)[arguments.scheduler])[-1]
                own["in_process_tokens_per_s"].append(last.output_tokens / last.total_s)
                own["ratios"].append(served.tokens_per_s * last.total_s / last.output_tokens)
                line += f"   in process {own['in_process_tokens_per_s'][-1]:9.1f}   ratio {own['ratios'][-1]:.3f}"
            print(f"{line}   {shown(choice)}", flush=True)
    for name, own in figures.items():
        ratio = f", ratio {median(own['ratios']):.3f}" if own["ratios"] else ""
        print(f"median {median(own['served_tokens_per_s']):.1f} tokens/s{ratio}   {name}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _served(arguments: argparse.Namespace, requests: list[LoopRequest]) -> StreamedRun:
    flags = ["--model", arguments.model, "--scheduler", arguments.scheduler, "--dtype", arguments.dtype]
    flags += ["--max-batch-size", str(arguments.clients), "--max-wait-ms", "200", "--no-prefix-cache"]
    if arguments.threads is not None:
        flags += ["--threads", str(arguments.threads)]
    with server_process(wsbatch_command("serve", *flags)) as server:
        trio.run(stream_all, server.url, requests)  # to warm it up
        return trio.run(stream_all, server.url, requests)


if __name__ == "__main__":
    main()
