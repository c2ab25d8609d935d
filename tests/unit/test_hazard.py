"""Adaptive wait: all or nothing for Poisson arrivals, the spread of the burst for bursts."""

import random

import pytest

from wsbatch.batching.hazard import ArrivalHazard


def feed(gaps_s: list[float], batch_s: float = 1.0) -> tuple[ArrivalHazard, float]:
    hazard, now_s = ArrivalHazard(), 0.0
    hazard.arrived(now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        hazard.arrived(now_s)
    hazard.batch_took(batch_s)
    return hazard, now_s


@pytest.mark.parametrize(("held", "waits"), [(1, True), (5, True), (60, False), (200, False)])
def test_poisson_waits_if_and_only_if_rate_times_loss_exceeds_the_held(held: int, waits: bool) -> None:
    # 20 arrivals a second, a missed batch costs a second: the rule says to hold up to 20.
    source = random.Random(1)
    hazard, last_s = feed([source.expovariate(20.0) for _ in range(300)])
    assert (hazard.pays_until_s(last_s, held) > last_s) is waits


def test_in_bursts_waiting_pays_until_the_burst_is_over() -> None:
    # Bursts of four, 3 ms apart inside, a second between them; a missed batch costs a second.
    hazard, last_s = feed([0.003, 0.003, 0.003, 1.0] * 20 + [0.003])
    assert last_s + 0.003 <= hazard.pays_until_s(last_s, held=2) <= last_s + 0.016
    assert hazard.pays_until_s(last_s + 0.1, held=2) == last_s + 0.1


def test_with_nothing_known_it_never_waits() -> None:
    hazard = ArrivalHazard()
    hazard.arrived(1.0)
    assert hazard.pays_until_s(1.0, held=1) == 1.0
