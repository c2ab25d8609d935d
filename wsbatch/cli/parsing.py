"""What every command shares: how it is parsed and run, errors in one line, help that keeps its line breaks."""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from wsbatch.auth import clean_token
from wsbatch.cli.printing import without_controls

# argparse keeps the class of its subparsers to itself.
Commands: TypeAlias = Any

TOKEN_VARIABLE = "WSBATCH_AUTH_TOKEN"

FAILED, BAD_USAGE = 1, 2


class CommandError(Exception):
    """Ends a command with one line on stderr.

    Attributes:
        status: the exit status.
    """

    def __init__(self, why: object, status: int) -> None:
        super().__init__(why)
        self.status = status


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: with fifty flags, the usage before it would hide it."""

    def __init__(self, **options: Any) -> None:
        # A script that relies on an abbreviation breaks when a flag is added.
        super().__init__(allow_abbrev=False, **options)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the `--` of `--flag=--` for the end of flags, and makes a list of what is left: nothing.
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "is '--': must be a value")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        say_error(self.prog, message)
        self.exit(BAD_USAGE)


def help_format(prog: str) -> argparse.HelpFormatter:
    """Descriptions and epilogs as they are written; flags in one column."""
    width = min(100, shutil.get_terminal_size().columns - 2)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width)


def add_parser(commands: Commands, name: str, *, help: str, description: str, epilog: str) -> Parser:
    """A subcommand's parser."""
    parser: Parser = commands.add_parser(
        name, help=help, description=description, epilog=epilog, formatter_class=help_format
    )
    parser.set_defaults(program=parser.prog)
    return parser


def run_parsed(parser: Parser, argv: Sequence[str] | None) -> int:
    """Run the subcommand that `argv` names (default: sys.argv); the exit status. Bad usage exits with 2."""
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except CommandError as error:
        say_error(arguments.program, error.args[0])
        return error.status
    return status


@contextmanager
def ending_with(status: int, *errors: type[Exception]) -> Iterator[None]:
    """Within the block, errors of these kinds end the command with this exit status."""
    try:
        yield
    except errors as error:
        raise CommandError(error, status) from error


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


def say_error(program: str, message: object) -> None:
    """One line on stderr, however many the message has, and without control characters."""
    print(f"{program}: {without_controls(' '.join(str(message).split())) or repr(message)}", file=sys.stderr)
