"""Exceptions and nurseries: a nursery that does not put what its block raises into a group, and what is in a group."""

from collections.abc import AsyncIterator, Iterator
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
        blocks, tasks = _split(group, raised)
        if len(blocks) != 1 or not all(isinstance(error, trio.Cancelled) for error in tasks):
            raise
        (raised,) = blocks
    else:
        return
    raise raised


def first_error(error: BaseException) -> BaseException:
    """The first exception in a group, in the groups in it, and so on; one that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _split(
    group: BaseExceptionGroup[BaseException], raised: BaseException | None
) -> tuple[list[BaseException], list[BaseException]]:
    """What is in a nursery's group: of that which its block raised (a group, perhaps, of which Trio has taken the
    cancellations that were the nursery's own); and the single exceptions in all the rest."""
    own = set() if raised is None else {id(error) for error in _singles(raised)}
    blocks = [error for error in group.exceptions if own.issuperset(id(each) for each in _singles(error))]
    return blocks, [each for error in group.exceptions if error not in blocks for each in _singles(error)]


def _singles(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _singles(inner)
    else:
        yield error
