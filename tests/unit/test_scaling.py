"""When there should be more replicas, and when fewer: the policy alone."""

import pytest

from wsbatch.config import FleetConfig
from wsbatch.messages import Status
from wsbatch.pool.scaling import Memory, decide

CONFIG = FleetConfig(
    replicas=2, min_replicas=1, max_replicas=4, scale_up_queue_ms=500, scale_up_after_s=10, scale_down_after_s=60
)


def pool(*, queue_ms: float = 0.0, waiting: int = 0, running: int = 0, slots: int = 16) -> Status:
    return Status("ready", waiting, running, 0, 0, slots, queue_ms, 0.0)


LONG = pool(queue_ms=800, waiting=5, running=16)
BUSY = pool(running=14)
IDLE = pool(running=2)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        ([(0, LONG), (9, LONG)], [2, 2]),
        ([(0, LONG), (10, LONG)], [2, 3]),
        ([(0, LONG), (5, BUSY), (10, LONG), (19, LONG), (20, LONG)], [2, 2, 2, 2, 3]),  # a pause starts it anew
        ([(0, LONG), (10, LONG), (11, LONG), (20, LONG), (21, LONG)], [2, 3, 3, 3, 4]),  # each change is given time
        ([(0, LONG), (10, LONG), (11, LONG), (21, LONG), (22, LONG), (99, LONG)], [2, 3, 3, 4, 4, 4]),  # the most
        ([(0, IDLE), (59, IDLE)], [2, 2]),
        ([(0, IDLE), (60, IDLE), (200, IDLE), (300, IDLE)], [2, 1, 1, 1]),  # the least
        ([(0, IDLE), (30, BUSY), (60, IDLE), (119, IDLE), (120, IDLE)], [2, 2, 2, 2, 1]),
        ([(0, BUSY), (1000, BUSY)], [2, 2]),  # neither too much nor too little
    ],
)
def test_the_number_of_replicas(seen: list[tuple[float, Status]], wanted: list[int]) -> None:
    replicas, memory, counts = 2, Memory(), []
    for now_s, status in seen:
        replicas, memory = decide(CONFIG, memory, status, replicas=replicas, now_s=now_s)
        counts.append(replicas)
    assert counts == wanted


@pytest.mark.parametrize(("running", "fewer"), [(5, True), (6, False), (14, False)])
def test_a_replica_goes_only_where_the_others_have_slots_to_spare(running: int, fewer: bool) -> None:
    memory = Memory(idle_since_s=0.0)
    count, _ = decide(CONFIG, memory, pool(running=running), replicas=2, now_s=100)
    assert count == (1 if fewer else 2)


def test_no_flapping_at_a_steady_load() -> None:
    """The load that brought a replica does not send it away again."""
    replicas, memory, counts = 2, Memory(), set()
    for second in range(0, 3600, 5):
        slots = 8 * replicas
        running = min(slots, 17)
        queue_ms = 2000.0 if running == slots else 0.0
        status = pool(queue_ms=queue_ms, waiting=int(queue_ms > 0), running=running, slots=slots)
        replicas, memory = decide(CONFIG, memory, status, replicas=replicas, now_s=second)
        if second > 600:
            counts.add(replicas)
    assert counts == {3}


def test_the_bounds_hold_from_the_start() -> None:
    assert decide(CONFIG, Memory(), BUSY, replicas=9, now_s=0)[0] == 4
    with pytest.raises(ValueError, match=r"FleetConfig\.replicas is 5: must be from 1 to 4"):
        FleetConfig(replicas=5, min_replicas=1, max_replicas=4)
