"""`wsbatch route`: one address for many servers."""

import argparse
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from wsbatch.auth import clean_token
from wsbatch.cli.hosting import CANNOT_START, EXIT_STATUSES, announce, host_engine
from wsbatch.cli.logs import add_log_level, set_up_logging
from wsbatch.cli.parsing import TOKEN_VARIABLE, Commands, add_parser, ending_with, text, token_from_environment
from wsbatch.cli.settings import ROUTER_DEFAULTS, add_settings, read_settings
from wsbatch.config import PoolConfig, ServerConfig

if TYPE_CHECKING:
    from wsbatch.engine.interface import Engine

_REPLICA_TOKEN_VARIABLE = "WSBATCH_REPLICA_TOKEN"

_DESCRIPTION = """\
Route requests to wsbatch servers that something else runs (systemd, Kubernetes), and be one
server to clients: each request goes to the replica with the least work to do, or to the one
that has its prompt's beginning; when a replica is lost, its streams go on with another one.

Once it listens, one line goes to stdout: `listening on ws://HOST:PORT`. Everything else goes to
stderr. SIGTERM or Ctrl-C drains the router; the replicas are left as they are.
"""

_EPILOG = f"""\
examples:
  wsbatch route ws://10.0.0.1:8765 ws://10.0.0.2:8765
  wsbatch route --host 0.0.0.0 --port 80 wss://a.example wss://b.example

environment, for what would else be read by every user of the machine:
  {TOKEN_VARIABLE}      the auth token of clients
  {_REPLICA_TOKEN_VARIABLE}   the auth token of the replicas

{EXIT_STATUSES}"""


def add_command(commands: Commands) -> None:
    """Add `route` to the command line."""
    parser = add_parser(
        commands, "route", help="one address for many servers", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("replicas", type=text, nargs="+", metavar="URL", help="of a replica: ws://HOST:PORT or wss://…")
    parser.add_argument(
        "--replica-token",
        type=text,
        metavar="TEXT",
        help=f"auth token of the replicas (default: ${_REPLICA_TOKEN_VARIABLE}, else that of clients)",
    )
    add_settings(parser, PoolConfig, title="replicas")
    add_settings(parser, ServerConfig, title="server", **ROUTER_DEFAULTS)
    add_log_level(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Route until the end; the exit status."""
    with ending_with(CANNOT_START, ValueError):
        pool_config = read_settings(arguments, PoolConfig)
        server_config = read_settings(arguments, ServerConfig, auth_token=token_from_environment(), **ROUTER_DEFAULTS)
        replica_token = _replica_token(arguments.replica_token)
    set_up_logging(arguments.log_level)
    token = server_config.auth_token if replica_token is None else replica_token

    def opening() -> "AbstractAsyncContextManager[Engine]":
        from wsbatch.pool import open_pool

        return open_pool(arguments.replicas, pool_config, auth_token=token)

    return host_engine(opening, server_config, while_serving=announce)


def _replica_token(flag: str | None) -> str | None:
    """Raises ValueError for one that is none."""
    return (
        token_from_environment(_REPLICA_TOKEN_VARIABLE) if flag is None else clean_token(flag, name="--replica-token")
    )
