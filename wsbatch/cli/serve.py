"""`wsbatch serve`: load a model and serve it until a signal comes."""

import argparse
from typing import TYPE_CHECKING

import trio

from wsbatch.cli.hosting import CANNOT_START, EXIT_STATUSES, host, set_up_logging
from wsbatch.cli.parsing import TOKEN_VARIABLE, Commands, add_parser, complain, token_from_environment
from wsbatch.cli.settings import add_settings, read_settings
from wsbatch.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from wsbatch.server import Server

LOG_LEVELS = ("debug", "info", "warning", "error")

_DESCRIPTION = f"""\
Load a model and serve it over WebSockets, with /livez, /readyz and /metrics on the same port.

Once it listens, one line goes to stdout: `listening on ws://HOST:PORT`. Everything else goes to
stderr. SIGTERM or Ctrl-C drains: no new requests, live ones may finish, then it exits; a second
signal ends it at once. The auth token can also be given as ${TOKEN_VARIABLE}.
"""

_EPILOG = f"""\
examples:
  wsbatch serve                                      the demo model on ws://127.0.0.1:8765
  wsbatch serve --model ./my-model --port 0          a local directory, on a free port
  wsbatch serve --model org/name --host 0.0.0.0 --max-batch-size 32
  wsbatch serve --model simulated --port 0           no model: made-up text, to try clients with
  wsbatch serve --model simulated:tau_ms=50          the same, with 50 ms a step

{EXIT_STATUSES}"""


def add_command(commands: Commands) -> None:
    """Add `serve` to the command line."""
    parser = add_parser(commands, "serve", help="load a model and serve it", description=_DESCRIPTION, epilog=_EPILOG)
    add_settings(parser, EngineConfig, title="model and batching")
    add_settings(parser, ServerConfig, title="server")
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="least severity logged to stderr (default: info)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the end; the exit status."""
    try:
        engine_config = read_settings(arguments, EngineConfig)
        server_config = read_settings(arguments, ServerConfig, auth_token=token_from_environment())
    except ValueError as error:
        complain("serve", error)
        return CANNOT_START
    set_up_logging(arguments.log_level)
    return host("serve", engine_config, server_config, visit=_announce)


async def _announce(server: "Server") -> None:
    print(f"listening on {server.url}", flush=True)
    await trio.sleep_forever()
