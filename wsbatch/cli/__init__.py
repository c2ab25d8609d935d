"""The command line. Only here: trio.run, signals, logging set-up, the standard streams, sys.setswitchinterval."""

from collections.abc import Sequence

from wsbatch import __version__
from wsbatch.cli import chat, demo, generate, route, serve, top
from wsbatch.cli.parsing import Parser, help_format, run_parsed
from wsbatch.cli.streams import run_command

_EPILOG = """\
start here:
  wsbatch demo                          fetch a small model, serve it, watch it stream
  wsbatch serve --model ./my-model      serve a model of your own
  wsbatch generate "Once upon a time"   ask a running server from another terminal
  wsbatch chat                          talk to it
  wsbatch top                           see its batch, live

`wsbatch COMMAND --help` explains each command in full.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: sys.argv) names; returns the exit status. Bad usage exits with 2."""
    return run_command("wsbatch", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="wsbatch",
        description="An LLM inference server that streams tokens over WebSockets, batching everybody's requests.",
        epilog=_EPILOG,
        formatter_class=help_format,
    )
    parser.add_argument("--version", action="version", version=f"wsbatch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, demo, generate, chat, top, route):
        command.add_command(commands)
    return run_parsed(parser, argv)
