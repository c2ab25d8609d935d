"""The command line of a script of the laboratory."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from wsbatch.cli.parsing import Parser, help_format, run_parsed
from wsbatch.cli.streams import run_command
from wsbatch.model.processes import keep_working_directory_off_paths


def script_parser(name: str, *, description: str, epilog: str) -> Parser:
    """Its parser."""
    return Parser(prog=f"{name}.py", description=description, epilog=epilog, formatter_class=help_format)


def run_script(parser: Parser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None) -> NoReturn:
    """Run it; exits with its status."""
    keep_working_directory_off_paths()
    parser.set_defaults(program=parser.prog, run=run)
    sys.exit(run_command(parser.prog, lambda: run_parsed(parser, argv)))
