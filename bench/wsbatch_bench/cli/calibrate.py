"""`wsbatch-bench calibrate`: what this client can take."""

import argparse

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch_bench.calibration import SHARE, calibrate

_DESCRIPTION = """\
Measure this client's own floor against a server that computes nothing: what a frame costs it, and
the time to first token that is not the model's. `load` refuses to ask for more than half of it.
"""

_EPILOG = """\
example:
  wsbatch-bench calibrate         a few seconds; kept in the user's cache ($WSBATCH_CACHE)
"""


def add_command(commands: Commands) -> None:
    """Add `calibrate` to the command line."""
    parser = add_parser(
        commands, "calibrate", help="what this client can take", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Measure, print, keep; the exit status."""
    try:
        measured = calibrate()
    except RuntimeError as error:
        say_error("wsbatch-bench calibrate", error)
        return 1
    path = measured.save()
    print(
        f"machine              {measured.machine}\n"
        f"frames of tokens     {measured.frames_per_s:,.0f} a second of this client's CPU, "
        f"{1e6 / measured.frames_per_s:.0f} µs each\n"
        f"TTFT without a model {1000 * measured.ttft_p50_s:.1f} ms p50, {1000 * measured.ttft_p95_s:.1f} ms p95\n"
        f"load is refused from {SHARE * measured.frames_per_s:,.0f} tokens/s on\n"
        f"kept in              {path}"
    )
    return 0
