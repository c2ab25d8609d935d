"""From cells to a verdict: pass, fail or undecided; and to a setting."""

from math import inf, nan

import pytest

from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.choose import Choice, choice_lines, choose, refine, settle
from wsbatch_bench.sweep.slo import parse_slo

from .harness import cell

SLO = parse_slo("e2e_p95<=5s,ttft_p95<=1000ms,success>=99%")


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "pass"),
        ({"e2e_p95_high_s": 5.0}, "pass"),
        ({"e2e_p95_high_s": 5.01}, "undecided"),
        ({"e2e_p95_s": 6.0, "e2e_p95_high_s": 7.0}, "undecided"),  # the low bound still allows it
        ({"e2e_p95_low_s": 5.01, "e2e_p95_s": 6.0, "e2e_p95_high_s": 7.0}, "fail"),
        ({"ttft_p95_high_s": inf}, "undecided"),
        ({"success_low": 0.985}, "undecided"),
        ({"success": 0.9, "success_low": 0.85, "success_high": 0.95}, "fail"),
        ({"verdict": "unstable"}, "fail"),
        ({"verdict": "undecided"}, "undecided"),
        ({"invalid": "this client was late"}, "undecided"),
    ],
)
def test_a_cell_passes_fails_or_is_undecided(fields: dict[str, object], verdict: str) -> None:
    assert SLO.judge(cell(**fields)) == verdict


def test_the_highest_rate_wins() -> None:
    cells = [cell(8, rate=1.0), cell(8, rate=2.0, verdict="unstable"), cell(16, rate=1.0), cell(16, rate=2.0)]
    choice = choose(cells, SLO)
    assert choice.chosen is not None
    assert (choice.chosen.setting.max_batch_size, choice.chosen.passed) == (16, 2.0)
    assert choice.runner_up is not None
    assert (choice.runner_up.setting.max_batch_size, choice.runner_up.open_until) == (8, 2.0)
    assert (
        choice.why() == "dynamic b8 carries 1 requests/s within the SLO (at 2 it is fail)"
        or "carries 1" in choice.why()
    )


def test_ties_go_to_the_smaller_batch_and_then_to_the_shorter_wait() -> None:
    cells = [cell(16, 0.0), cell(8, 20.0), cell(8, 5.0)]
    choice = choose(cells, SLO)
    assert [(each.setting.max_batch_size, each.setting.max_wait_ms) for each in choice.capacities] == [
        (8, 5.0),
        (8, 20.0),
        (16, 0.0),
    ]
    assert "shorter wait" in choice.why()


def test_a_pass_above_a_failure_does_not_count() -> None:
    """A rate at which it fails, below one at which it happened to pass: the higher one cannot be relied on."""
    choice = choose([cell(rate=1.0), cell(rate=2.0, e2e_p95_low_s=6.0, e2e_p95_high_s=8.0), cell(rate=3.0)], SLO)
    assert choice.chosen is not None
    assert choice.chosen.passed == 1.0


def test_nothing_passes_and_nothing_is_pretended() -> None:
    choice = choose([cell(verdict="unstable")], SLO)
    assert choice.chosen is None
    assert choice.undecided == []
    assert any("none" in line for line in choice_lines(choice, {"model": "demo"}))


def test_what_is_undecided_above_the_choice_is_named() -> None:
    choice = choose([cell(8, rate=1.0), cell(16, rate=2.0, e2e_p95_high_s=9.0)], SLO)
    assert choice.chosen is not None
    assert [each.label for each in choice.undecided] == ["dynamic b16 w0"]


def test_the_lines_name_the_command() -> None:
    lines = choice_lines(choose([cell(8, 20.0)], SLO), {"model": "demo"})
    assert "serve it   wsbatch serve --model demo --scheduler dynamic --max-batch-size 8 --max-wait-ms 20" in lines
    assert any("e2e_p95 3 s (2.5 … 3.5) against at most 5 s: pass" in line for line in lines)


def test_refinement_halves_the_gap_of_whoever_could_carry_most() -> None:
    """A setting that truly carries 2.7: five halvings between 2 and 4 find it."""
    measured: list[float] = []

    def measure(what: Cell) -> CellResult:
        measured.append(what.rate)
        size = what.setting.max_batch_size
        truth = {8: 2.7, 4: 1.2}[size]
        return cell(size, rate=what.rate) if what.rate <= truth else cell(size, rate=what.rate, verdict="unstable")

    cells = [
        cell(8, rate=2.0),
        cell(8, rate=4.0, verdict="unstable"),
        cell(4, rate=1.0),
        cell(4, rate=2.0, verdict="unstable"),
    ]
    choice = choose(refine(cells, SLO, measure, rounds=4), SLO)
    assert measured == [3.0, 2.5, 2.75, 2.625]
    assert choice.chosen is not None
    assert (choice.chosen.passed, choice.chosen.open_until) == (2.625, 2.75)


def test_refinement_goes_beyond_the_rates_of_the_sweep() -> None:
    """Everything passed: the rate is doubled until something does not."""
    measured: list[float] = []

    def measure(what: Cell) -> CellResult:
        measured.append(what.rate)
        verdict = "stable" if what.rate <= 5.5 else "unstable"
        return cell(what.setting.max_batch_size, rate=what.rate, verdict=verdict)

    choice = choose(refine([cell(8, rate=1.0), cell(4, rate=1.0)], SLO, measure, rounds=5), SLO)
    assert measured == [2.0, 4.0, 8.0, 6.0, 5.0]
    assert choice.chosen is not None
    assert (choice.chosen.passed, choice.chosen.open_until) == (5.0, 6.0)


def test_a_setting_is_not_measured_beyond_its_capacity() -> None:
    cells = [cell(8, rate=2.0, capacity=2.6, capacity_low=2.5, capacity_high=2.7)]
    measured: list[float] = []

    def measure(what: Cell) -> CellResult:
        measured.append(what.rate)
        return cell(8, rate=what.rate, capacity=2.6, capacity_low=2.5, capacity_high=2.7)

    refine(cells, SLO, measure, rounds=9)
    assert measured[:2] == [2.25, 2.375]
    assert max(measured) < 2.5


def settled(limits: dict[int, tuple[float, float]]) -> Choice:
    """By batch size, what it carries on one trace and on another."""

    def measure(what: Cell, seed: int = 0) -> CellResult:
        size = what.setting.max_batch_size
        holds = what.rate <= limits[size][seed]
        return cell(size, rate=what.rate, seed=seed, e2e_p95_high_s=3.5 if holds else 9.0)

    first = [measure(Cell(cell(size).setting, 0.5, 1.0)) for size in limits]
    cells = settle(first, SLO, measure, lambda what: measure(what, 1), rounds=12)
    return choose(cells, SLO)


def test_the_winner_is_confirmed_on_another_trace() -> None:
    choice = settled({8: (2.7, 3.0), 4: (1.2, 1.2)})
    assert choice.chosen is not None
    assert choice.chosen.confirmed
    assert choice.chosen.passed == pytest.approx(2.7, rel=0.02)
    assert any("two traces" in line for line in choice_lines(choice, {"model": "demo"}))


def test_a_winner_that_was_lucky_gives_way() -> None:
    """On another trace it carries less than the second best, or less than it seemed."""
    choice = settled({8: (2.7, 0.9), 4: (2.5, 2.6)})
    assert choice.chosen is not None
    assert choice.chosen.confirmed
    assert choice.chosen.setting.max_batch_size == 4
    alone = settled({8: (2.7, 2.2)}).chosen
    assert alone is not None
    assert alone.confirmed
    assert alone.passed <= 2.2


@pytest.mark.parametrize("text", ["e2e_p95<5s", "e2e_p95<=5", "p95<=5s", "success>=99", "e2e_p95<=5s;ttft_p95<=1s"])
def test_a_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be METRIC"):
        parse_slo(text)


def test_undefined_numbers_do_not_pass() -> None:
    assert SLO.judge(cell(ttft_p95_high_s=nan, ttft_p95_low_s=nan)) == "undecided"
