"""What comes out of a nursery, and what does not."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from wsbatch.nurseries import background_tasks, first_error


async def raised_with(
    task: Callable[[], Awaitable[None]], error: Exception, *, before: Callable[[], None] = lambda: None
) -> BaseException:
    """What comes out where the block raises this beside the task, `before` which it calls that."""
    try:
        async with background_tasks() as nursery:
            nursery.start_soon(task)
            await trio.testing.wait_all_tasks_blocked()
            before()
            raise error
    except Exception as raised:  # noqa: BLE001 - whatever it is
        return raised
    raise AssertionError("nothing came out")


async def test_what_the_block_raises_comes_out_as_it_is_once_the_tasks_have_ended() -> None:
    ended = False

    async def task() -> None:
        nonlocal ended
        try:
            await trio.sleep_forever()
        finally:
            ended = True

    error = ValueError("the block's own")
    assert await raised_with(task, error) is error
    assert error.__context__ is None
    assert ended


async def test_a_group_of_the_block_itself_does_not_come_in_another() -> None:
    inner = [ValueError("one"), KeyError("two")]
    raised = await raised_with(trio.sleep_forever, ExceptionGroup("the block's", inner))
    assert isinstance(raised, ExceptionGroup)
    assert (raised.message, list(raised.exceptions)) == ("the block's", inner)


async def test_a_cancelled_nursery_takes_its_cancellations_out_of_a_group_of_the_block() -> None:
    error = ValueError("beside a cancellation")

    async def fail() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise error

    async def scenario() -> None:
        async with background_tasks() as nursery, trio.open_nursery() as inner:
            inner.start_soon(fail)
            inner.start_soon(trio.sleep_forever)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    with pytest.raises(ExceptionGroup) as raised:
        await scenario()
    assert list(raised.value.exceptions) == [error]


async def test_the_end_of_the_block_ends_the_tasks() -> None:
    async with background_tasks() as nursery:
        nursery.start_soon(trio.sleep_forever)


async def test_what_a_task_raises_ends_the_block_and_comes_in_a_group() -> None:
    async def task() -> None:
        raise OSError("a task's")

    raised = await raised_with(task, ValueError("never reached"))
    assert isinstance(raised, ExceptionGroup)
    assert [str(error) for error in raised.exceptions] == ["a task's"]


async def test_nothing_is_lost_where_a_task_raises_after_the_block() -> None:
    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("a task's")

    raised = await raised_with(task, ValueError("the block's"))
    assert isinstance(raised, ExceptionGroup)
    assert {type(error) for error in raised.exceptions} == {ValueError, OSError}


async def test_a_nursery_that_is_cancelled_ends_its_block_and_nothing_else() -> None:
    async with background_tasks() as nursery:
        nursery.cancel_scope.cancel()
        await trio.sleep_forever()
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_cancellation_from_outside_ends_where_it_began(busy: bool) -> None:
    with trio.CancelScope() as outside:
        async with background_tasks() as nursery:
            if busy:
                nursery.start_soon(trio.sleep_forever)
            outside.cancel()
            await trio.sleep_forever()
    assert outside.cancelled_caught


async def test_an_error_in_a_cancelled_block_is_not_lost() -> None:
    error = ValueError("on its way out")
    with trio.CancelScope() as outside:
        outside.cancel()
        with trio.CancelScope(shield=True) as shield:
            assert (
                await raised_with(trio.sleep_forever, error, before=lambda: setattr(shield, "shield", False)) is error
            )


async def test_where_both_the_block_and_what_is_outside_are_cancelled() -> None:
    with trio.CancelScope() as outside:
        async with background_tasks() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            outside.cancel()
            await trio.sleep_forever()
    await trio.lowlevel.checkpoint()


def test_the_first_error_of_nested_groups() -> None:
    error = KeyError("here")
    assert first_error(error) is error
    assert first_error(ExceptionGroup("", [ExceptionGroup("", [error]), ValueError()])) is error
