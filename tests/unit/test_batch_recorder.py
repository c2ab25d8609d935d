"""The recorder behind `watch`: slots, bounds, windows, several watchers."""

from hypothesis import given
from hypothesis import strategies as st

from wsbatch.batching.costs import StepCost
from wsbatch.engine.watch import MAX_ROWS, WINDOW_S, BatchRecorder
from wsbatch.messages import RowPhase


class Recording:
    """A recorder and its clock."""

    def __init__(self, slots: int = 4) -> None:
        self.now_s = 100.0
        self.changes = 0
        self.recorder = BatchRecorder("dynamic", slots, now_s=self.now_s)
        self.recorder.changed(queue_depth=3, running=2)

    def note(self) -> None:
        self.changes += 1

    def step(self, *phases: tuple[int, RowPhase], ms: float = 10.0, useful: int | None = None) -> None:
        started_s = self.now_s
        self.now_s += ms / 1000
        useful = len(phases) if useful is None else useful
        cost = StepCost(len(phases), 0, 0, len(phases), useful, ms / 1000)
        self.recorder.record(phases, cost, tokens=useful, started_s=started_s, ended_s=self.now_s)


def test_a_snapshot_has_the_steps_since_the_one_before() -> None:
    recording = Recording()
    watcher = recording.recorder.watch(recording.note)
    recording.step((7, "prefill"), (8, "prefill"))
    recording.step((7, "decode"), (8, "kept"), useful=1)
    snapshot = watcher.take(recording.now_s)
    assert (snapshot.scheduler, snapshot.slots, snapshot.queue_depth, snapshot.running) == ("dynamic", 4, 3, 2)
    assert [(step.t_ms, step.ms) for step in snapshot.steps] == [(0.0, 10.0), (10.0, 10.0)]
    assert [step.rows for step in snapshot.steps] == [
        ((0, 7, "prefill"), (1, 8, "prefill")),
        ((0, 7, "decode"), (1, 8, "kept")),
    ]
    assert snapshot.t_ms == 20.0
    assert (snapshot.tokens_per_s, snapshot.slot_utilization, snapshot.waste_fraction) == (3.0, 0.75, 0.25)
    assert watcher.take(recording.now_s).steps == ()
    recording.step((7, "decode"))
    assert [step.rows for step in watcher.take(recording.now_s).steps] == [((0, 7, "decode"),)]
    assert recording.changes == 3


def test_nothing_is_recorded_while_nobody_watches_or_from_before() -> None:
    recording = Recording()
    recording.step((1, "decode"))
    watcher = recording.recorder.watch(recording.note)
    assert (watcher.take(recording.now_s).steps, watcher.take(recording.now_s).slot_utilization) == ((), None)
    recording.step((1, "decode"))
    watcher.close()
    assert not recording.recorder.watched
    recording.step((1, "decode"))
    assert recording.changes == 1
    snapshot = recording.recorder.watch(recording.note).take(recording.now_s)
    assert (snapshot.steps, snapshot.steps_dropped, snapshot.tokens_per_s) == ((), 0, 0.0)


def test_watchers_have_each_their_own_place() -> None:
    recording = Recording()
    first = recording.recorder.watch(recording.note)
    recording.step((1, "decode"))
    second = recording.recorder.watch(recording.note)
    recording.step((1, "decode"))
    assert (len(first.take(recording.now_s).steps), len(second.take(recording.now_s).steps)) == (2, 1)
    first.close()
    recording.step((1, "decode"))
    assert len(second.take(recording.now_s).steps) == 1


def test_rates_are_of_the_last_second() -> None:
    recording = Recording()
    watcher = recording.recorder.watch(recording.note)
    recording.step((1, "decode"), (2, "kept"), useful=1)
    recording.now_s += WINDOW_S - 0.001
    assert watcher.take(recording.now_s).slot_utilization == 0.5
    recording.now_s += 0.002
    quiet = watcher.take(recording.now_s)
    assert (quiet.tokens_per_s, quiet.slot_utilization, quiet.waste_fraction) == (0.0, None, None)


def test_what_nobody_takes_is_bounded_and_the_loss_is_told() -> None:
    recording = Recording()
    watcher = recording.recorder.watch(recording.note)
    phases: list[tuple[int, RowPhase]] = [(key, "decode") for key in range(1000)]
    for _ in range(10):
        recording.step(*phases)
    snapshot = watcher.take(recording.now_s)
    assert sum(len(step.rows) for step in snapshot.steps) <= MAX_ROWS
    assert (len(snapshot.steps), snapshot.steps_dropped) == (4, 6)
    assert snapshot.steps[-1].t_ms == 90.0


def test_a_slot_is_kept_to_the_end_and_the_lowest_free_one_is_given() -> None:
    recording = Recording()
    watcher = recording.recorder.watch(recording.note)
    recording.step((1, "decode"), (2, "decode"), (3, "decode"))
    recording.step((1, "decode"), (3, "decode"))
    recording.step((4, "prefill"), (3, "decode"), (5, "prefill"))
    slots = [{key: slot for slot, key, _ in step.rows} for step in watcher.take(recording.now_s).steps]
    assert slots == [{1: 0, 2: 1, 3: 2}, {1: 0, 3: 2}, {4: 0, 3: 2, 5: 1}]


@given(st.lists(st.sets(st.integers(0, 11), max_size=8), max_size=30))
def test_no_two_rows_share_a_slot_and_none_is_beyond_the_slots(steps: list[set[int]]) -> None:
    recording = Recording(slots=8)
    watcher = recording.recorder.watch(recording.note)
    before: dict[int, int] = {}
    for keys in steps:
        recording.step(*[(key, "decode") for key in sorted(keys)])
        (step,) = watcher.take(recording.now_s).steps
        slots = {key: slot for slot, key, _ in step.rows}
        assert set(slots) == keys
        assert len(set(slots.values())) == len(keys)
        assert all(0 <= slot < 8 for slot in slots.values())
        assert all(slots[key] == before[key] for key in keys & set(before))
        before = slots
