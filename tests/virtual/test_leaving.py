"""When the command leaves without a model step that does not end, in virtual time."""

import math

import pytest
import trio
from trio.testing import MockClock

from wsbatch.cli import hosting


@pytest.mark.parametrize(
    ("by_s", "left_s"),
    [
        (2.0, 2.0),  # what is left of the grace
        (60.0, 5.0),
        (math.inf, 5.0),  # no signal: the engine has died
        (-1.0, 0.5),  # the grace was too short for the goodbyes already
    ],
)
async def test_a_step_has_what_is_left_of_the_grace(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, by_s: float, left_s: float
) -> None:
    left: list[tuple[int, float]] = []
    monkeypatch.setattr(hosting, "_leave", lambda status: left.append((status, trio.current_time())))
    await hosting._leave_after_last_step(by_s)
    assert left == [(hosting.ENGINE_DIED, left_s)]
