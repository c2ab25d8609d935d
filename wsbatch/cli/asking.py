"""What the commands that ask a server have in common: its address, how to sample, Ctrl-C."""

import argparse
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import trio

from wsbatch.auth import clean_token
from wsbatch.cli.parsing import BAD_USAGE, FAILED, TOKEN_VARIABLE, ending_with, text, token_from_environment
from wsbatch.cli.settings import number, whole_number
from wsbatch.client import Client, connect
from wsbatch.errors import WsbatchError
from wsbatch.messages import SamplingParams

DEFAULT_URL = "ws://127.0.0.1:8765"


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and what it wants to be shown."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", type=text, default=DEFAULT_URL, help=f"ws:// or wss:// address (default: {DEFAULT_URL})"
    )
    group.add_argument("--token", type=text, help=f"the server's auth token (default: ${TOKEN_VARIABLE})")
    group.add_argument(
        "--cafile", type=text, metavar="FILE", help="wss: trust this certificate (PEM), not the system's authorities"
    )


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: SamplingParams, *, max_tokens: str) -> None:
    """How tokens are chosen. The server checks the values: it knows its model's bounds.

    `max_tokens` says what a request gets whose flag of that name is not given: that depends on the model's context.
    """
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=whole_number, metavar="N", help=f"tokens generated at most (default: {max_tokens})"
    )
    group.add_argument(
        "--temperature",
        type=number,
        metavar="X",
        default=defaults.temperature,
        help="0 is greedy; higher is more varied (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=number,
        metavar="X",
        default=defaults.top_p,
        help="choose among the likeliest tokens that together reach this probability (default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=whole_number,
        metavar="N",
        default=defaults.top_k,
        help="choose among the N likeliest tokens; 0: among all (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=whole_number, metavar="N", help="repeats a run; the server draws one where none is given"
    )
    group.add_argument(
        "--stop",
        type=text,
        action="append",
        metavar="TEXT",
        default=[],
        help="end before this text; may be given several times",
    )


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """What `add_sampling_flags` was given."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
    )


def dial(arguments: argparse.Namespace, *, retries: int = 0) -> AbstractAsyncContextManager[Client]:
    """`connect` as the connection flags say. Raises ValueError for a token or a --cafile that is none."""
    token = token_from_environment() if arguments.token is None else clean_token(arguments.token, name="--token")
    try:
        context = None if arguments.cafile is None else ssl.create_default_context(cafile=arguments.cafile)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"--cafile {arguments.cafile} cannot be loaded: {error.strerror or error}") from error
    return connect(arguments.url, auth_token=token, ssl_context=context, retries=retries)


@contextmanager
def ending_with_its_error() -> Iterator[None]:
    """Within the block, what goes wrong in asking a server ends the command: with 2 where the usage was bad, else 1."""
    with ending_with(FAILED, WsbatchError, OSError), ending_with(BAD_USAGE, ValueError):
        yield


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Within the block, Ctrl-C calls `act` on the event loop instead of raising KeyboardInterrupt anywhere."""
    token = trio.lowlevel.current_trio_token()
    previous = signal.signal(signal.SIGINT, lambda number, frame: token.run_sync_soon(act))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
