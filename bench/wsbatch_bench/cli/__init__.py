"""`wsbatch-bench`: the command line."""

import os
import sys
from collections.abc import Sequence

from wsbatch.cli.parsing import Parser, help_format
from wsbatch_bench.cli import (
    calibrate,
    choose,
    compare,
    convoy,
    load,
    offline,
    overload,
    plan,
    replicas,
    router,
    scaling,
    soak,
    stall,
    static,
    streaming,
    study,
    sweep,
)

_DESCRIPTION = """\
Measure a token server: put load on it, find out what each batching setting costs and buys, and
which setting meets a stated SLO.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with the command's status."""
    parser = Parser(prog="wsbatch-bench", description=_DESCRIPTION, formatter_class=help_format)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (
        load,
        compare,
        calibrate,
        sweep,
        choose,
        study,
        static,
        scaling,
        soak,
        stall,
        streaming,
        convoy,
        offline,
        overload,
        router,
        plan,
        replicas,
    ):
        command.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not raise once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)
