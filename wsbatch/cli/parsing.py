"""What every command's parser shares: one-line errors, help that keeps its line breaks."""

import argparse
import os
import shutil
import sys
from typing import Any, NoReturn, TypeAlias

# argparse keeps the class of its subparsers to itself.
Commands: TypeAlias = Any

TOKEN_VARIABLE = "WSBATCH_AUTH_TOKEN"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: with fifty flags, the usage before it would hide it."""

    def __init__(self, **options: Any) -> None:
        # A script that relies on an abbreviation breaks when a flag is added.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def help_format(prog: str) -> argparse.HelpFormatter:
    """Descriptions and epilogs as they are written; flags in one column."""
    width = min(100, shutil.get_terminal_size().columns - 2)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width)


def add_parser(commands: Commands, name: str, *, help: str, description: str, epilog: str) -> Parser:
    """A subcommand's parser."""
    parser: Parser = commands.add_parser(
        name, help=help, description=description, epilog=epilog, formatter_class=help_format
    )
    return parser


def token_from_environment() -> str | None:
    """The auth token, where it is not given as a flag: a flag can be read by every user of the machine."""
    return os.environ.get(TOKEN_VARIABLE) or None


def complain(command: str, message: object) -> None:
    """One line on stderr, however many the message has."""
    print(f"wsbatch {command}: {' '.join(str(message).split())}", file=sys.stderr)
