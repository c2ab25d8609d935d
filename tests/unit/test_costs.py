"""The fitted step costs: found again from steps that follow them, and not predicted from too few."""

import random
from collections.abc import Callable

import pytest

from wsbatch.batching.costs import StepCost, StepCostFit
from wsbatch.batching.prefill import PrefillBound


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


def grown(seconds: Callable[[int], float], *, steps: int, limit_s: float = 12.0) -> list[tuple[int, float]]:
    """Steps that carry as many prompt tokens as the bound allows, 2,048 at most: (tokens, seconds) of each."""
    fit = StepCostFit()
    bound = PrefillBound(limit_s, fit)
    taken = []
    for _ in range(steps):
        tokens = min(2048, bound.tokens(decode_rows=0))
        taken.append((tokens, seconds(tokens)))
        step = cost(0, *taken[-1])
        fit.record(step)
        bound.record(step)
    return taken


@pytest.mark.parametrize("token_s", [0.001, 0.006, 0.060, 0.2])
def test_prefill_steps_keep_to_a_limit_on_any_machine(token_s: float) -> None:
    taken = grown(lambda tokens: 0.05 + token_s * tokens, steps=20)
    assert max(seconds for _, seconds in taken) <= 60.0
    assert max(seconds for _, seconds in taken[2:]) <= 12.0 * 1.01
    assert taken[-1][0] >= 0.9 * min(2048, (12.0 - 0.05) / token_s)


def test_prefill_steps_shrink_at_once_when_tokens_become_dearer() -> None:
    """Sixty steps of a quick machine, then every token costs fifty times as much; and the other way round again."""
    costs_s = iter([0.001] * 60 + [0.050] * 10 + [0.001] * 400)
    taken = grown(lambda tokens: 0.01 + next(costs_s) * tokens, steps=470)
    slow = [seconds for _, seconds in taken[60:70]]
    assert slow[0] > 100
    assert max(slow[1:]) <= 12.1
    assert taken[-1][0] == 2048


def test_one_slow_first_step_does_not_hold_prefills_down() -> None:
    times_s = iter([40.0])
    taken = grown(lambda tokens: next(times_s, 0.05 + 0.001 * tokens), steps=12)
    assert taken[1][0] < 200
    assert taken[-1][0] == 2048
