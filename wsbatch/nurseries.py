"""Exceptions and nurseries: a nursery that does not put what its block raises into a group, and what is in a group."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background_tasks() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks are cancelled at the end of the block, and that raises what the block raises, as it is.

    `trio.open_nursery` would put it into a group. What a task raises does come in a group, and cancels the block.
    """
    raised: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as error:
                raised = error
                raise
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        others = [error for error in group.exceptions if error is not raised]
        if len(others) == len(group.exceptions) or not all(isinstance(error, trio.Cancelled) for error in others):
            raise
    else:
        return
    assert raised is not None
    raise raised


def first_error(error: BaseException) -> BaseException:
    """The first exception in a group, in the groups in it, and so on; one that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
