"""The batch as rows of characters."""

from wsbatch.cli.lanes import IDLE, Strips, numbers
from wsbatch.messages import BatchSnapshot, BatchStep, RowPhase


def snapshot(t_ms: float, *steps: BatchStep, slots: int = 2) -> BatchSnapshot:
    return BatchSnapshot(t_ms, "dynamic", slots, 3, 1, 12.25, steps, slot_utilization=0.5)


def step(t_ms: float, ms: float, *phases: RowPhase) -> BatchStep:
    return BatchStep(t_ms, ms, tuple((slot, 7 + slot, phase) for slot, phase in enumerate(phases)))


def test_a_cell_shows_what_took_most_of_it() -> None:
    strips = Strips(cell_ms=100, cells=10)
    strips.take(snapshot(400.0, step(0, 130, "prefill", "prefill"), step(130, 120, "decode", "kept")))
    assert strips.rows(4) == [["prefill", "decode", "decode", IDLE], ["prefill", "kept", "kept", IDLE]]
    assert strips.rows(2) == [["decode", IDLE], ["kept", IDLE]]
    assert strips.rows(6)[0][:2] == [IDLE, IDLE]


def test_time_goes_on_where_nothing_runs_and_old_cells_are_dropped() -> None:
    strips = Strips(cell_ms=100, cells=5)
    strips.take(snapshot(100.0, step(0, 100, "decode")))
    strips.take(snapshot(350.0))
    assert strips.rows(3) == [["decode", IDLE, IDLE], [IDLE] * 3]
    strips.take(snapshot(1_000_000.0))
    assert strips.rows(3) == [[IDLE] * 3] * 2
    strips.take(snapshot(1_000_100.0, step(0, 10, "decode")))  # from before the oldest cell: passes
    assert strips.rows(3) == [[IDLE] * 3] * 2


def test_a_long_step_reaches_over_cells_and_beyond_the_oldest() -> None:
    strips = Strips(cell_ms=100, cells=4)
    strips.take(snapshot(2000.0, step(0, 1990, "prefill", "prefill")))
    assert strips.rows(3) == [["prefill"] * 3] * 2


def test_a_server_that_talks_nonsense_costs_little() -> None:
    strips = Strips(cell_ms=100, cells=4)
    strips.take(snapshot(2e15, step(0, 1e15, "decode"), slots=2**52))
    assert len(strips.rows(3)) == 256


def test_another_number_of_slots_begins_anew() -> None:
    strips = Strips(cell_ms=100, cells=4)
    strips.take(snapshot(300.0, step(0, 200, "decode", "decode")))
    strips.take(snapshot(400.0, slots=3))
    assert strips.rows(2) == [[IDLE] * 2] * 3


def test_the_numbers() -> None:
    assert dict(numbers(snapshot(0.0))) == {
        "scheduler": "dynamic",
        "running": "1/2",
        "waiting": "3",
        "tokens/s": "12.2",
        "utilisation": "50%",
        "waste": "-",
    }
