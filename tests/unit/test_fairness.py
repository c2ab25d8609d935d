"""Turns of clients: first come first served within one, interleaved between several."""

from hypothesis import given
from hypothesis import strategies as st

from wsbatch.batching.fairness import FairShare


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
