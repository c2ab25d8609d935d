"""The fitted step costs: found again from steps that follow them, and not predicted from too few."""

import random

import pytest

from wsbatch.batching.costs import StepCost, StepCostFit


def cost(decode_rows: int, prefill_tokens: int, seconds: float) -> StepCost:
    return StepCost(decode_rows, prefill_tokens, prefill_tokens, decode_rows, decode_rows, seconds)


def predicted(fit: StepCostFit, *, decode_rows: int, prefill_tokens: int) -> float:
    costs = fit.fitted()
    assert costs is not None
    return costs.step_s(decode_rows=decode_rows, prefill_tokens=prefill_tokens)


def test_costs_are_found_through_noise() -> None:
    source, fit = random.Random(2), StepCostFit()
    for _ in range(300):
        rows, tokens = source.randrange(1, 33), source.choice([0, 0, 64, 256])
        seconds = 0.010 + 0.001 * rows + 0.0005 * tokens
        fit.record(cost(rows, tokens, seconds * source.uniform(0.95, 1.05)))
    assert predicted(fit, decode_rows=16, prefill_tokens=0) == pytest.approx(0.026, rel=0.05)
    assert predicted(fit, decode_rows=8, prefill_tokens=256) == pytest.approx(0.146, rel=0.05)


def test_it_says_nothing_before_it_has_seen_enough() -> None:
    fit = StepCostFit()
    for _ in range(7):
        fit.record(cost(1, 0, 0.01))
    assert fit.fitted() is None


def test_steps_that_look_alike_are_predicted_as_they_are() -> None:
    fit = StepCostFit()
    for _ in range(50):
        fit.record(cost(4, 0, 0.02))
    assert predicted(fit, decode_rows=4, prefill_tokens=0) == pytest.approx(0.02, rel=0.01)


def test_it_follows_a_machine_that_changes_speed() -> None:
    fit = StepCostFit()
    for seconds in [0.01] * 500 + [0.03] * 1000:
        fit.record(cost(2, 0, seconds))
    assert predicted(fit, decode_rows=2, prefill_tokens=0) == pytest.approx(0.03, rel=0.05)
