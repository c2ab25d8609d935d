"""When freed memory is given back."""

import pytest
import trio
import trio.testing

from wsbatch.server import memory
from wsbatch.server.memory import FreedMemory, HighWaterMark


def test_a_tide_falls_at_each_half_of_a_height_worth_noting() -> None:
    mark = HighWaterMark(100)
    assert [mark.halved(level) for level in (99, 0, 100, 51, 50, 20, 0)] == [
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert [mark.halved(level) for level in (500, 250, 240, 125, 62)] == [False, True, False, True, True]


async def test_what_was_freed_is_given_back_a_second_later_and_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_s: list[float] = []
    monkeypatch.setattr(memory, "give_back", lambda: given_s.append(trio.current_time()))
    freed = FreedMemory()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(freed.run)
        await trio.sleep(10)
        for _ in range(5):
            freed.note()
        await trio.sleep(10)
        freed.note()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert given_s == pytest.approx([11, 21])


def test_the_system_takes_memory_back() -> None:
    memory.give_back()
