"""The end of a session, without a session."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsbatch.server.ending import GOING_AWAY, Close, Ending, Phase

PHASES = list(Phase)


def test_it_is_open_until_somebody_ends_it() -> None:
    ending = Ending()
    assert (ending.phase, ending.close, ending.close_s, ending.abort_s) == (Phase.OPEN, None, inf, inf)
    assert not ending.deaf


def test_one_that_drains_listens_and_closes_no_sooner_than_it_said() -> None:
    ending = Ending()
    ending.drain(5.0)
    ending.drain(1.0)  # once is enough
    assert (ending.close, ending.close_s, ending.abort_s) == ((GOING_AWAY, "drained"), 5.0, inf)
    assert not ending.deaf


def test_an_end_is_at_once_and_does_not_drain_any_more() -> None:
    ending = Ending()
    ending.end(1008, "flood", 7.0)
    ending.drain(9.0)
    assert (ending.close, ending.close_s, ending.abort_s, ending.deaf) == ((1008, "flood"), -inf, 7.0, True)


@pytest.mark.parametrize(
    ("codes", "told"),
    [((1008, 1011), 1008), ((1001, 1011), 1011), ((1001, 1001), 1001), ((1008, 1001), 1008)],
)
def test_the_first_reason_is_told_unless_it_was_only_that_the_server_goes(codes: tuple[int, int], told: int) -> None:
    ending = Ending()
    for number, code in enumerate(codes):
        ending.end(code, f"{number}", 1.0)
    assert ending.close == Close(told, f"{codes.index(told)}")


def test_what_ends_it_while_it_drains_is_told() -> None:
    ending = Ending()
    ending.drain(5.0)
    ending.end(1011, "the engine died", 1.0)
    assert (ending.close, ending.close_s) == ((1011, "the engine died"), -inf)


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("drain"), st.floats(0, 10)),
        st.tuples(st.just("end"), st.sampled_from([1001, 1008, 1011]), st.just("why"), st.floats(0, 10)),
        st.tuples(st.just("begin_closing")),
    )
)


@given(CALLS)
def test_it_only_ever_goes_on_and_never_gives_more_time(calls: list[tuple[object, ...]]) -> None:
    ending = Ending()
    for name, *arguments in calls:
        if name == "begin_closing" and ending.close is None:
            continue
        before = PHASES.index(ending.phase), -ending.abort_s, ending.close is not None
        getattr(ending, str(name))(*arguments)
        after = PHASES.index(ending.phase), -ending.abort_s, ending.close is not None
        assert all(old <= new for old, new in zip(before, after, strict=True))
        assert (ending.close is None) == (ending.phase is Phase.OPEN) == (ending.close_s == inf)
