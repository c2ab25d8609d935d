"""The limit of open files against what `max_connections` needs."""

import logging
import resource

import pytest

from wsbatch.cli.descriptors import OTHER_DESCRIPTORS, allow_connections

INFINITE = resource.RLIM_INFINITY
NEEDED = 2000 + OTHER_DESCRIPTORS  # by a thousand connections


@pytest.mark.parametrize(
    ("soft", "hard", "then", "warned"),
    [
        (1024, 20_000, NEEDED, False),
        (1024, INFINITE, NEEDED, False),
        (1024, NEEDED, NEEDED, False),
        (1024, 2000, 2000, True),
        (1024, 1024, 1024, True),
        (NEEDED, 20_000, None, False),  # never lowered
        (INFINITE, INFINITE, None, False),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes(
    soft: int,
    hard: int,
    then: int | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append((which, limits)))
    with caplog.at_level(logging.WARNING):
        allow_connections(1000)
    assert made == ([] if then is None else [(resource.RLIMIT_NOFILE, (then, hard))])
    assert bool(caplog.records) == warned
    if warned:
        assert f"max_connections 1000 can need {NEEDED} open files and this process may have {then}" in caplog.text


def test_a_system_that_does_not_let_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, INFINITE))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    allow_connections(1000)
    assert "this process may have 256" in caplog.text
