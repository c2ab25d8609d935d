"""`wsbatch serve`: load a model and serve it until a signal comes."""

import argparse
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from wsbatch.cli.hosting import CANNOT_START, EXIT_STATUSES, LOG, announce, host, host_engine, say_where
from wsbatch.cli.logs import add_log_level, set_up_logging
from wsbatch.cli.parsing import TOKEN_VARIABLE, Commands, add_parser, ending_with, text, token_from_environment
from wsbatch.cli.settings import ROUTER_DEFAULTS, add_settings, read_settings
from wsbatch.config import EngineConfig, FleetConfig, PoolConfig, ServerConfig
from wsbatch.errors import WsbatchError

if TYPE_CHECKING:
    from wsbatch.engine.interface import Engine
    from wsbatch.pool.ray import Fleet
    from wsbatch.server.serve import Server

_DESCRIPTION = """\
Load a model and serve it over WebSockets, with /livez, /readyz and /metrics on the same port.

Once it listens, one line goes to stdout: `listening on ws://HOST:PORT`. Everything else goes to
stderr. SIGTERM or Ctrl-C drains: no new requests, live ones may finish, then it exits; a second
signal ends it at once.
"""

_EPILOG = f"""\
examples:
  wsbatch serve                                      the demo model on ws://127.0.0.1:8765
  wsbatch serve --model ./my-model --port 0          a local directory, on a free port
  wsbatch serve --model org/name --host 0.0.0.0 --max-batch-size 32
  wsbatch serve --model simulated --port 0           no model: made-up text, to try clients with
  wsbatch serve --model simulated:tau_ms=50          the same, with 50 ms a step
  wsbatch serve --ray auto --replicas 4 --replica-gpus 1   four replicas on a Ray cluster, and a router here

With --ray the model runs in Ray actors and this process is their router (see `wsbatch route`); then
--frame-interval-ms is 0 by default.
SIGHUP replaces the replicas one at a time; SIGTTIN and SIGTTOU make them one more or one less.

environment:
  {TOKEN_VARIABLE}      the auth token: a flag can be read by every user of the machine
  WSBATCH_CACHE           where converted models are kept
  OMP_WAIT_POLICY=passive where other programs keep the cores busy: else the model's threads wait
                          for each other by spinning, which has made tokens 20 times slower

{EXIT_STATUSES}"""


def add_command(commands: Commands) -> None:
    """Add `serve` to the command line."""
    parser = add_parser(commands, "serve", help="load a model and serve it", description=_DESCRIPTION, epilog=_EPILOG)
    add_settings(parser, EngineConfig, title="model and batching")
    add_settings(parser, ServerConfig, title="server")
    parser.add_argument(
        "--ray",
        type=text,
        metavar="ADDRESS",
        help="run replicas on this Ray cluster; `auto`: one that runs here; `local`: start one on 127.0.0.1",
    )
    add_settings(parser, FleetConfig, title="replicas on Ray (with --ray)")
    add_settings(parser, PoolConfig, title="router (with --ray)")
    add_log_level(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the end; the exit status."""
    with ending_with(CANNOT_START, ValueError):
        engine_config = read_settings(arguments, EngineConfig)
        defaults = {} if arguments.ray is None else ROUTER_DEFAULTS
        server_config = read_settings(arguments, ServerConfig, auth_token=token_from_environment(), **defaults)
        fleet_config = read_settings(arguments, FleetConfig)
        pool_config = read_settings(arguments, PoolConfig)
        if arguments.ray is None and fleet_config.replicas > 1:
            raise ValueError(f"--replicas is {fleet_config.replicas}: more than one needs --ray, or `wsbatch route`")
    set_up_logging(arguments.log_level)
    if arguments.ray is not None:

        def opening() -> "AbstractAsyncContextManager[Fleet]":
            from wsbatch.pool.ray import open_fleet

            return open_fleet(
                engine_config,
                fleet_config,
                address=arguments.ray,
                pool_config=pool_config,
                drain_s=server_config.drain_s,
            )

        replicas = _Replicas(opening)
        return host_engine(replicas.open, server_config, while_serving=replicas.command)
    return host(engine_config, server_config, while_serving=announce)


class _Replicas:
    """Those on Ray, while the router here serves them."""

    def __init__(self, opening: "Callable[[], AbstractAsyncContextManager[Fleet]]") -> None:
        self._opening = opening
        self._fleet: Fleet

    @asynccontextmanager
    async def open(self) -> "AsyncIterator[Engine]":
        """Start them, and end them at the end."""
        async with self._opening() as self._fleet:
            yield self._fleet.pool

    async def command(self, server: "Server") -> None:
        """SIGHUP replaces them; SIGTTIN and SIGTTOU, as for other servers, mean one more and one less."""
        fleet = self._fleet
        with trio.open_signal_receiver(signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU) as signals:
            say_where(server)
            async for number in signals:
                try:
                    if number == signal.SIGHUP:
                        LOG.info("replacing %d replicas, one at a time", len(fleet.actors))
                        await fleet.replace_all()
                    else:
                        await fleet.scale(len(fleet.actors) + (1 if number == signal.SIGTTIN else -1))
                    LOG.info("there are %d replicas", len(fleet.actors))
                except WsbatchError as error:
                    LOG.error("the replicas are left as they are: %s", error)
