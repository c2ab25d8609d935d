"""The dynamic policy as a table: what it sees, what it says."""

import pytest

from wsbatch.batching.dynamic import Dispatch, DynamicSettings, View, decide
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Idle, WaitUntil
from wsbatch.messages import SamplingParams

WAIT_S = 0.050


def request(key: int, arrived_s: float, length: int = 4) -> ScheduledRequest:
    return ScheduledRequest(
        key=key,
        token_ids=(1,) * length,
        max_new_tokens=4,
        sampling=SamplingParams(),
        priority=5,
        arrived_s=arrived_s,
    )


def settings(**changes: object) -> DynamicSettings:
    return DynamicSettings(**({"max_batch_size": 3, "max_wait_s": WAIT_S} | changes))  # type: ignore[arg-type]


def view(now_s: float, *waiting: ScheduledRequest, **changes: float) -> View:
    last_s = max((item.arrived_s for item in waiting), default=0.0)
    return View(**({"now_s": now_s, "waiting": waiting, "idle_since_s": 0.0, "last_arrival_s": last_s} | changes))  # type: ignore[arg-type]


def keys(choice: object) -> list[int]:
    assert isinstance(choice, Dispatch)
    return [item.key for item in choice.requests]


def test_nothing_waiting_is_idle() -> None:
    assert decide(view(1.0), settings()) == Idle()


def test_full_goes_at_once_and_takes_no_more_than_fit() -> None:
    assert keys(decide(view(1.0, *(request(key, 1.0) for key in range(5))), settings())) == [0, 1, 2]


def test_not_full_waits_for_the_oldest() -> None:
    assert decide(view(1.01, request(1, 1.0), request(2, 1.005)), settings()) == WaitUntil(1.0 + WAIT_S)


def test_due_goes_with_whoever_is_there() -> None:
    assert keys(decide(view(1.05, request(1, 1.0), request(2, 1.049)), settings())) == [1, 2]


def test_no_wait_means_now() -> None:
    assert keys(decide(view(1.0, request(1, 1.0)), settings(max_wait_s=0.0))) == [1]


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [
        # The request came at 1.0 while the model was busy; the model fell idle at 2.0; now is 2.0.
        ("oldest", "dispatch"),
        ("idle", 2.0 + WAIT_S),
        ("last", 2.0 + 0.002),
    ],
)
def test_anchor_of_a_request_that_waited_behind_a_batch(anchor: str, expected: object) -> None:
    choice = decide(view(2.0, request(1, 1.0), idle_since_s=2.0), settings(anchor=anchor))
    if expected == "dispatch":
        assert keys(choice) == [1]
    else:
        assert choice == WaitUntil(expected)  # type: ignore[arg-type]


def test_last_waits_for_a_lull_but_never_past_the_oldest() -> None:
    waiting = [request(1, 1.0), request(2, 1.0495)]
    assert decide(view(1.0496, *waiting), settings(anchor="last")) == WaitUntil(1.0 + WAIT_S)


def test_buckets_do_not_mix() -> None:
    waiting = [request(1, 1.0, length=4), request(2, 1.0, length=40), request(3, 1.0, length=5)]
    assert keys(decide(view(1.05, *waiting), settings(buckets=(8, 64)))) == [1, 3]


def test_a_full_bucket_goes_before_an_older_one_is_due() -> None:
    waiting = [request(1, 1.0, length=4), *(request(key, 1.01, length=40) for key in (2, 3, 4))]
    assert keys(decide(view(1.02, *waiting), settings(buckets=(8,)))) == [2, 3, 4]


def test_of_two_due_buckets_the_first_in_the_queue_goes() -> None:
    waiting = [request(1, 1.0, length=40), request(2, 1.0, length=4)]
    assert keys(decide(view(2.0, *waiting), settings(buckets=(8,)))) == [1]


def test_a_bucket_boundary_belongs_to_the_lower_bucket() -> None:
    waiting = [request(1, 1.0, length=8), request(2, 1.0, length=9)]
    assert keys(decide(view(2.0, *waiting), settings(buckets=(8,)))) == [1]


def test_adaptive_bound_ends_the_wait_early() -> None:
    assert decide(view(1.0, request(1, 1.0), pays_until_s=1.004), settings()) == WaitUntil(1.004)
    assert keys(decide(view(1.0, request(1, 1.0), pays_until_s=1.0), settings())) == [1]
