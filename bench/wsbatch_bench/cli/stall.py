"""`wsbatch-bench stall`: what a long prompt does to the streams beside it."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch_bench.cli.model_flags import add_model_flags, engine_config, read_costs, sizes
from wsbatch_bench.stall import StallPoint, measure_stall
from wsbatch_bench.trace import draw_trace

_DESCRIPTION = """\
Let streams decode in continuous batching, add a request with a long prompt, and measure, for each
size of prefill chunk: the longest gap between a stream's tokens, the newcomer's time to first
token, and the streams' tokens a second meanwhile. A chunk as long as the prompt is no chunking.
"""

_EPILOG = """\
examples:
  wsbatch-bench stall --model demo
  wsbatch-bench stall --model simulated --chunks 64,256,1024,4096
"""


def add_command(commands: Commands) -> None:
    """Add `stall` to the command line."""
    parser = add_parser(
        commands, "stall", help="what a long prompt does to its neighbours", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_model_flags(parser, scheduler=None)
    parser.add_argument("--chunks", type=sizes, default=(64, 128, 256, 512, 1024, 4096), metavar="N,N", help="tokens "
                        "(default: 64,128,256,512,1024,4096)")  # fmt: skip
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of the streams (default: 64)")
    parser.add_argument("--newcomer-tokens", type=int, default=4000, metavar="N", help="of its prompt (default: 4000)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    points: list[StallPoint] = []
    print(f"{'chunk':>6} {'gap before':>11} {'longest gap':>12} {'newcomer TTFT':>14} {'tokens/s beside it':>19}")
    try:
        costs = read_costs(arguments)["continuous"]
        for chunk in arguments.chunks:
            config = engine_config(
                arguments,
                scheduler="continuous",
                max_batch_size=arguments.streams + 1,
                prefill_chunk_tokens=chunk,
                max_batch_prefill_tokens=max(chunk, 2048),
            )
            point = measure_stall(
                config,
                streams=arguments.streams,
                prompt_tokens=arguments.prompt_tokens,
                newcomer_tokens=arguments.newcomer_tokens,
                make_prompt=draw_trace(1).prompt_ids,
                costs=costs,
            )
            points.append(point)
            print(
                f"{chunk:6} {1000 * point.gap_before_s:8.1f} ms {1000 * point.longest_gap_s:9.1f} ms "
                f"{point.newcomer_ttft_s:12.2f} s {point.tokens_per_s:19.1f}",
                flush=True,
            )
    except (ValueError, OSError) as error:
        say_error("wsbatch-bench stall", error)
        return 2
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    return 0
