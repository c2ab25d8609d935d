"""The batch as rows of characters."""

from wsbatch.cli.timeline import IDLE, Timeline, numbers
from wsbatch.messages import BatchSnapshot, BatchStep, RowPhase


def snapshot(t_ms: float, *steps: BatchStep, slots: int = 2) -> BatchSnapshot:
    return BatchSnapshot(t_ms, "dynamic", slots, 3, 1, 12.25, steps, slot_utilization=0.5)


def step(t_ms: float, ms: float, *phases: RowPhase) -> BatchStep:
    return BatchStep(t_ms, ms, tuple((slot, 7 + slot, phase) for slot, phase in enumerate(phases)))


def test_a_cell_shows_what_took_most_of_it() -> None:
    timeline = Timeline(cell_ms=100, cells=10)
    timeline.take(snapshot(400.0, step(0, 130, "prefill", "prefill"), step(130, 120, "decode", "kept")))
    assert timeline.rows(4) == [["prefill", "decode", "decode", IDLE], ["prefill", "kept", "kept", IDLE]]
    assert timeline.rows(2) == [["decode", IDLE], ["kept", IDLE]]
    assert timeline.rows(6)[0][:2] == [IDLE, IDLE]


def test_time_goes_on_where_nothing_runs_and_old_cells_are_dropped() -> None:
    timeline = Timeline(cell_ms=100, cells=5)
    timeline.take(snapshot(100.0, step(0, 100, "decode")))
    timeline.take(snapshot(350.0))
    assert timeline.rows(3) == [["decode", IDLE, IDLE], [IDLE] * 3]
    timeline.take(snapshot(1_000_000.0))
    assert timeline.rows(3) == [[IDLE] * 3] * 2
    timeline.take(snapshot(1_000_100.0, step(0, 10, "decode")))  # from before the oldest cell: passes
    assert timeline.rows(3) == [[IDLE] * 3] * 2


def test_a_long_step_reaches_over_cells_and_beyond_the_oldest() -> None:
    timeline = Timeline(cell_ms=100, cells=4)
    timeline.take(snapshot(2000.0, step(0, 1990, "prefill", "prefill")))
    assert timeline.rows(3) == [["prefill"] * 3] * 2


def test_a_server_that_talks_nonsense_costs_little() -> None:
    timeline = Timeline(cell_ms=100, cells=4)
    timeline.take(snapshot(2e15, step(0, 1e15, "decode"), slots=2**52))
    assert len(timeline.rows(3)) == 256


def test_another_number_of_slots_begins_anew() -> None:
    timeline = Timeline(cell_ms=100, cells=4)
    timeline.take(snapshot(300.0, step(0, 200, "decode", "decode")))
    timeline.take(snapshot(400.0, slots=3))
    assert timeline.rows(2) == [[IDLE] * 2] * 3


def test_the_numbers() -> None:
    assert dict(numbers(snapshot(0.0))) == {
        "scheduler": "dynamic",
        "running": "1/2",
        "waiting": "3",
        "tokens/s": "12.2",
        "utilisation": "50%",
        "waste": "-",
    }
