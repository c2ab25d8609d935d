"""What the soak's verdict is made of: trends over the load, and what is left over after it."""

import random

import pytest
import trio
from trio.testing import MockClock

from lab_tools.looks import Sample
from lab_tools.soak_load import SoakPlan, SoakRun, left_over, trends
from lab_tools.suspension import Suspension
from soak import report

PLAN = SoakPlan(duration_s=180, streams=16, vanishing=1000, cancelling=4, slow=4, idle=0)


def sample(at_s: float, **changes: float) -> Sample:
    values = {
        "wsbatch_connections": changes.get("connections", 0.0),
        "wsbatch_num_requests_running": 0.0,
        "wsbatch_num_requests_waiting": 0.0,
        "wsbatch_trio_tasks": changes.get("tasks", 20.0),
    }
    memory = int(changes.get("memory_mib", 40.0) * 2**20)
    ticks = {0.01: at_s * 190, float("inf"): at_s * 200}
    return Sample(at_s, memory, int(changes.get("descriptors", 9)), 2, values, ticks)


def run(**leaks: float) -> SoakRun:
    """Three minutes of noise around a steady state, in which these figures gain so much."""
    source = random.Random(1)

    def value(name: str, at_s: float, steady: float, noise: float) -> float:
        return steady + source.uniform(-noise, noise) + leaks.get(name, 0.0) * at_s / 180

    done = SoakRun(PLAN, before=sample(0.0), after=sample(200.0))
    for at_s in range(180):
        figures = {
            "memory_mib": value("memory_mib", at_s, 40, 1),
            "descriptors": value("descriptors", at_s, 40, 5),
            "tasks": value("tasks", at_s, 150, 20),
        }
        done.samples.append(sample(at_s, **figures))
        done.gaps += [(at_s, value("gap_s", at_s, 0.015, 0.003)) for _ in range(20)]
        done.firsts += [(at_s, value("first_s", at_s, 0.05, 0.02)) for _ in range(3)]
    return done


def test_noise_is_flat() -> None:
    assert all(trend.flat for trend in trends(run()))
    lines, good = report(run())
    assert good
    assert lines[-1] == "verdict: flat"
    assert any("lateness p99" in line and "inf" in line for line in lines)  # 5 % of the ticks are in the last bucket


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        ({"memory_mib": 12.0}, "memory"),
        ({"descriptors": 30.0}, "descriptors"),
        ({"tasks": 60.0}, "tasks"),
        ({"gap_s": 0.02}, "time between tokens, p99"),
        ({"first_s": 0.1}, "time to first token, p95"),
    ],
)
def test_what_grows_is_told(leak: dict[str, float], name: str) -> None:
    assert [trend.name for trend in trends(run(**leak)) if not trend.flat] == [name]
    assert not report(run(**leak))[1]


@pytest.mark.parametrize("what", ["connections", "descriptors", "tasks"])
def test_what_is_left_over_is_told(what: str) -> None:
    before, after = sample(0.0), sample(200.0, **{what: 30.0})
    assert [name for name, count in left_over(after, before).items() if count] == [what]
    done = run()
    done.after = after
    lines, good = report(done)
    assert not good
    assert f"'{what}'" in lines[-2]


async def test_a_suspended_soak_is_not_believed(autojump_clock: MockClock) -> None:
    suspension = Suspension()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(suspension.watch)
        await trio.sleep(10.2)
        assert report(run(), suspension)[1]
        autojump_clock.jump(300.0)
        await trio.sleep(10.0)
        nursery.cancel_scope.cancel()
    assert suspension.seconds == pytest.approx(300.0, abs=0.5)
    lines, good = report(run(), suspension)
    assert not good
    assert lines[-1] == "verdict: none, this process was suspended for 300 s meanwhile: run it again"
