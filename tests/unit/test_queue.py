"""Order, ageing and token sums of the waiting set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsbatch.batching.queue import AGEING_S, ScheduledRequest, WaitingQueue
from wsbatch.messages import SamplingParams


def request(key: int, *, priority: int = 5, arrived_s: float = 0.0, length: int = 1) -> ScheduledRequest:
    return ScheduledRequest(
        key=key,
        token_ids=(0,) * length,
        max_new_tokens=1,
        sampling=SamplingParams(),
        priority=priority,
        arrived_s=arrived_s,
    )


def test_urgent_first_then_by_arrival() -> None:
    queue = WaitingQueue()
    for item in (request(1, priority=5), request(2, priority=0, arrived_s=1.0), request(3, priority=5, arrived_s=0.5)):
        queue.add(item)
    assert [item.key for item in queue] == [2, 1, 3]


def test_ageing_bounds_how_long_urgent_arrivals_may_pass() -> None:
    queue = WaitingQueue()
    queue.add(request(1, priority=9))
    queue.add(request(2, priority=0, arrived_s=9 * AGEING_S - 0.1))
    queue.add(request(3, priority=0, arrived_s=9 * AGEING_S + 0.1))
    assert [item.key for item in queue] == [2, 1, 3]


def test_a_key_waits_once() -> None:
    queue = WaitingQueue()
    queue.add(request(1))
    with pytest.raises(ValueError, match="key 1 is already waiting"):
        queue.add(request(1))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 9), st.integers(1, 9)), max_size=60))
def test_sums_and_order_hold_whatever_comes_and_goes(moves: list[tuple[bool, int, int, int]]) -> None:
    queue, model = WaitingQueue(), {}
    for time, (add, key, priority, length) in enumerate(moves):
        if add and key not in model:
            model[key] = request(key, priority=priority, arrived_s=float(time), length=length)
            queue.add(model[key])
        elif not add:
            assert queue.remove(key) == model.pop(key, None)
        assert queue.tokens == sum(len(item.token_ids) for item in model.values())
        assert list(queue) == sorted(model.values(), key=lambda item: item.order)
