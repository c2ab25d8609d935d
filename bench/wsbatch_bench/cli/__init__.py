"""`wsbatch-bench`: the command line."""

import sys
from collections.abc import Sequence

from wsbatch.cli.parsing import Parser, help_format, run_parsed, say_error
from wsbatch.cli.streams import run_command
from wsbatch.model.processes import keep_working_directory_off_paths

_DESCRIPTION = """\
Measure a token server: put load on it, find out what each batching setting costs and buys, and
which setting meets a stated SLO.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with the command's status."""
    keep_working_directory_off_paths()
    sys.exit(run_command("wsbatch-bench", lambda: _run(argv)))


def _run(argv: Sequence[str] | None) -> int:
    try:
        parser = make_parser()
    except ModuleNotFoundError as error:
        say_error("wsbatch-bench", f"{error.name} is not installed: the bench needs `pip install 'wsbatch[bench]'`")
        return 1
    return run_parsed(parser, argv)


def make_parser() -> Parser:
    """The parser of every command. Raises ModuleNotFoundError without the extra."""
    # Here, because the base install brings this package, but not the libraries that it needs.
    from wsbatch_bench.cli import calibrate, choose, compare, load, plan, scaling, static, study, sweep

    parser = Parser(prog="wsbatch-bench", description=_DESCRIPTION, formatter_class=help_format)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (load, compare, calibrate, sweep, choose, study, static, scaling, plan):
        command.add_command(commands)
    return parser
