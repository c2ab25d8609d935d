"""`trio.run` for commands: what is expected to go wrong comes out as it is, not in a group."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from wsbatch.errors import WsbatchError
from wsbatch.nurseries import first_error
from wsbatch_bench.load.http_client import HttpFailed

_T = TypeVar("_T")
Unreachable = (WsbatchError, OSError, HttpFailed)
"""What a server that is not there, or refuses, is told by."""


def run_trio(function: Callable[..., Awaitable[_T]], *args: Any, clock: trio.abc.Clock | None = None) -> _T:
    """Raises the first of `Unreachable`, or KeyboardInterrupt, where a nursery wrapped nothing else; see `trio.run`."""
    try:
        return trio.run(function, *args, clock=clock)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        if group.split(Unreachable)[1] is None:
            raise first_error(group) from None
        raise
