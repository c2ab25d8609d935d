"""Turns of clients: first come first served within one, interleaved between several. And who gives way to whom."""

from hypothesis import given
from hypothesis import strategies as st

from wsbatch.batching.fairness import Client, FairShare, sheddable
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.messages import SamplingParams


def test_a_lone_request_has_its_turn_when_it_arrives() -> None:
    share = FairShare()
    assert share.turn_s("a", 1.0, 0.1) == 1.0
    share.leave("a")
    assert share.turn_s("a", 1.0, 0.1) == 1.0  # nothing waits: nothing is remembered


def test_a_burst_is_spread_and_another_client_goes_between() -> None:
    share = FairShare()
    burst = [share.turn_s("a", 0.0, 0.1) for _ in range(100)]
    single = share.turn_s("b", 0.55, 0.1)
    assert sum(turn_s < single for turn_s in burst) == 6


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(0, 1)), max_size=50))
def test_a_client_never_overtakes_itself(moves: list[tuple[bool, float, float]]) -> None:
    share, now_s, waiting, last_s = FairShare(), 0.0, 0, 0.0
    for arrives, gap_s, interval_s in moves:
        now_s += gap_s
        if arrives:
            turn_s = share.turn_s("a", now_s, interval_s)
            assert turn_s >= max(now_s, last_s if waiting else 0.0)
            last_s, waiting = turn_s, waiting + 1
        elif waiting:
            share.leave("a")
            waiting -= 1


def waiting(peer: str, count: int, *, priority: int = 5, first: int = 0) -> list[tuple[Client, ScheduledRequest]]:
    return [
        (
            Client(peer, key),
            ScheduledRequest(
                key=key,
                token_ids=(1,),
                max_new_tokens=1,
                sampling=SamplingParams(),
                priority=priority,
                arrived_s=float(key),
            ),
        )
        for key in range(first, first + count)
    ]


def keys(requests: list[ScheduledRequest]) -> list[int]:
    return [request.key for request in requests]


def test_of_one_peer_every_less_urgent_request_may_give_way_the_last_first() -> None:
    queue = waiting("a", 3, priority=8) + waiting("a", 2, priority=5, first=3)
    assert keys(sheddable(queue, Client("a"), priority=4, max_requests=5)) == [2, 1, 0, 4, 3]
    assert keys(sheddable(queue, Client("a"), priority=5, max_requests=5)) == [2, 1, 0]


def test_another_peer_keeps_its_share_of_the_queue() -> None:
    queue = waiting("a", 8, priority=9)
    assert keys(sheddable(queue, Client("b"), priority=0, max_requests=8)) == [7, 6, 5, 4]


def test_a_peer_that_has_its_share_displaces_nobody_else() -> None:
    queue = waiting("a", 4, priority=9) + waiting("b", 4, priority=0, first=4)
    assert sheddable(queue, Client("b"), priority=0, max_requests=8) == []


def test_no_peer_is_driven_out_by_many_others() -> None:
    queue = [each for number in range(8) for each in waiting(f"peer {number}", 1, priority=9, first=number)]
    assert sheddable(queue, Client("newcomer"), priority=0, max_requests=8) == []


@given(
    held=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=12),
    peer=st.sampled_from("abcde"),
    priority=st.integers(0, 9),
)
def test_whoever_gives_way_no_peer_falls_below_its_share(held: list[tuple[str, int]], peer: str, priority: int) -> None:
    queue = [each for key, (name, urgency) in enumerate(held) for each in waiting(name, 1, priority=urgency, first=key)]
    of = {request.key: client.peer for client, request in queue}
    share = 12 // len({*of.values(), peer})
    gone = sheddable(queue, Client(peer), priority=priority, max_requests=12)
    assert all(request.priority > priority for request in gone)
    left = [of[request.key] for _, request in queue if request not in gone]
    for name in {of[request.key] for request in gone} - {peer}:
        assert left.count(name) >= share
