"""Deadlines are put off by the time in which the event loop did not run, and by nothing else."""

import pytest
import trio
import trio.testing

from wsbatch.server.client_deadlines import ClientDeadlines

Clock = trio.testing.MockClock


class Process:
    """A process that can be stopped: then both clocks go on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._real_s = 0.0
        self.deadlines = ClientDeadlines(now=lambda: self._real_s)

    def stop(self, seconds: float) -> None:
        self._clock.jump(seconds)
        self._real_s += seconds


async def test_a_deadline_is_put_off_by_what_the_process_was_stopped(autojump_clock: Clock) -> None:
    process = Process(autojump_clock)
    with process.deadlines.watching(), process.deadlines.after(10) as scope:
        await trio.sleep(4)
        process.stop(100)
        await trio.sleep(5)
        assert not scope.cancelled_caught
        process.stop(50)
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(160)


async def test_what_has_happened_meanwhile_comes_first(autojump_clock: Clock) -> None:
    process = Process(autojump_clock)
    with process.deadlines.watching(), process.deadlines.after(10):
        process.stop(100)
        await trio.lowlevel.checkpoint()  # a deadline that had passed would be acted on here
        done = True
    assert done


async def test_waiting_is_no_absence(autojump_clock: Clock) -> None:
    process = Process(autojump_clock)
    with process.deadlines.watching():
        with process.deadlines.after(10) as scope:
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(10)
        process.stop(0.05)  # nor is what any busy machine takes
        with process.deadlines.after(10):
            await trio.sleep_forever()
        assert trio.current_time() == pytest.approx(20.05)
    with process.deadlines.after(10):  # nobody looks any more
        process.stop(100)
        await trio.sleep(1)
        raise AssertionError
    assert trio.current_time() == pytest.approx(120.05)
