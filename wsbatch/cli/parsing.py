"""What every command's parser shares: one-line errors, help that keeps its line breaks."""

import argparse
import os
import shutil
import sys
from typing import Any, NoReturn, TypeAlias

from wsbatch.auth import clean_token
from wsbatch.cli.printing import without_controls

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
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


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


def token_from_environment(variable: str = TOKEN_VARIABLE) -> str | None:
    """An auth token, where it is not given as a flag: a flag can be read by every user of the machine.

    Raises ValueError where the variable is set and holds none.
    """
    token = os.environ.get(variable)
    return None if token is None else clean_token(token, name=f"${variable}")


def text(value: str) -> str:
    """An argparse type: text that is not empty. An empty variable in a script must not pass for a flag not given."""
    if not value:
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def complain(command: str, message: object) -> None:
    """One line on stderr, however many the message has."""
    say_error(f"wsbatch {command}", message)


def say_error(program: str, message: object) -> None:
    """The same, from another program than `wsbatch`."""
    print(f"{program}: {without_controls(' '.join(str(message).split())) or repr(message)}", file=sys.stderr)
