"""`choose --rate`: the cheapest setting for a stated rate, found in virtual time and confirmed on a server."""

from dataclasses import replace
from pathlib import Path

import pytest

from wsbatch.batching.costs import CostModel
from wsbatch.errors import ConnectionLost
from wsbatch_bench.cli import main
from wsbatch_bench.load.generator import LoadRun
from wsbatch_bench.load.specs import parse_arrivals, parse_lengths
from wsbatch_bench.plan.planner import Planner, Workload
from wsbatch_bench.sweep.cell import CellResult
from wsbatch_bench.sweep.cheapest import Search, Trial
from wsbatch_bench.sweep.setting import Setting, same_for_both
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import RealStage

from .harness import cell

COSTS = "tau_ms=10,alpha_ms=1,beta_ms=0.1"
SHORT = ["--prompt-lengths", "fixed:tokens=8", "--output-lengths", "fixed:tokens=10"]
SEARCH = Search(
    same_for_both(CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0001)),
    parse_slo("e2e_p95<=1s"),
    Workload(parse_arrivals("poisson"), parse_lengths("fixed:tokens=8"), parse_lengths("fixed:tokens=10")),
    rate=20.0,
    measured=1000,
)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(["choose", "--slo", "e2e_p95<=1s", "--costs", COSTS, *SHORT, *argv])
    assert isinstance(exited.value.code, int)
    return exited.value.code


def test_the_smallest_batch_that_carries_the_rate_wins() -> None:
    """One row takes 0.1 s: 20 requests/s are twice what it can; four rows in the same steps can do them."""
    trials = list(SEARCH.run([Setting("continuous", size) for size in (8, 1, 4)]))
    assert [(trial.setting.max_batch_size, trial.verdict, trial.again) for trial in trials] == [
        (1, "fail", False),
        (4, "pass", False),
        (4, "pass", True),
    ]
    first, again = trials[1:]
    assert first.cell.e2e_p95_s != again.cell.e2e_p95_s  # another trace


def verdicts(monkeypatch: pytest.MonkeyPatch, said: dict[tuple[int, int, bool], str]) -> list[Trial]:
    """A search over batches of 4 and 8 whose cells come out as said, by (batch, requests, another trace)."""

    def measure(self: Planner, replicas: int, rate: float, *, another: bool = False) -> CellResult:
        assert (replicas, rate) == (1, 20.0)
        size = self.setting.max_batch_size
        verdict = said[size, self.measured, another]
        bounds = {"pass": (0.5, 0.9), "fail": (1.1, 2.0), "undecided": (0.5, 2.0)}[verdict]
        return cell(size, rate=rate, e2e_p95_low_s=bounds[0], e2e_p95_high_s=bounds[1])

    monkeypatch.setattr(Planner, "measure", measure)
    return list(SEARCH.run([Setting("continuous", 4), Setting("continuous", 8)]))


def test_what_is_undecided_is_measured_longer_before_a_larger_batch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {(4, 1000, False): "undecided", (4, 4000, False): "pass", (4, 4000, True): "pass"}
    trials = verdicts(monkeypatch, said)
    assert [trial.verdict for trial in trials] == ["undecided", "pass", "pass"]


def test_a_pass_that_another_trace_does_not_confirm_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was picked for passing: that it fails on the next trace is not unlikely."""
    said = {
        (4, n, another): "pass" if not another else "fail" for n in (1000, 4000, 16_000) for another in (False, True)
    }
    said |= {(8, 1000, another): "pass" for another in (False, True)}
    trials = verdicts(monkeypatch, said)
    assert [(trial.setting.max_batch_size, trial.verdict) for trial in trials] == [
        *[(4, "pass"), (4, "fail")] * 3,
        (8, "pass"),
        (8, "pass"),
    ]


def test_of_equal_batches_the_shorter_wait_and_then_the_lower_p95(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [Setting("dynamic", 4, 20.0), Setting("dynamic", 4), Setting("continuous", 4)]
    *_, chosen = replace(SEARCH, rate=5.0).run(settings)
    assert (chosen.setting, chosen.verdict, chosen.again) == (Setting("continuous", 4), "pass", True)


def test_one_command_from_rate_and_slo_to_the_servers_command(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--setting", "continuous:max_batch_size=1", "--setting", "continuous:max_batch_size=4"]
    assert run("--rate", "20", *grid) == 0
    printed = capsys.readouterr().out
    assert "chosen     continuous b4: no smaller batch certainly meets the SLO at 20 requests/s" in printed
    assert "serve it   wsbatch serve --model demo --scheduler continuous --max-batch-size 4\n" in printed
    assert 'check it   wsbatch-bench load ws://HOST:PORT --request-rate 20 --slo "e2e_p95<=1s"' in printed
    assert "time       about" in printed

    assert run("--rate", "200", *grid) == 4
    printed = capsys.readouterr().out
    assert "chosen     none" in printed
    assert "continuous b4, the one that could do most, certainly meets it at most" in printed


def test_the_choice_is_confirmed_on_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The one test of this file with a server on a socket: it is there, and it is judged."""
    argv = ["--rate", "20", "--setting", "continuous:max_batch_size=4", "--model", f"simulated:{COSTS}"]
    assert run(*argv, "--confirm", "30") in (0, 4, 5)
    printed = capsys.readouterr().out
    assert "e2e_p95<=1s takes about 200, where they queue more, measured requests to be shown" in printed
    assert "confirmed  " in printed


@pytest.mark.parametrize(
    "error", [OSError("it did not start"), ConnectionLost("it was lost"), RuntimeError("it failed")]
)
def test_a_server_that_cannot_confirm_ends_it_with_1_in_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> LoadRun:
        raise error

    monkeypatch.setattr(RealStage, "run", fail)
    assert run("--rate", "20", "--setting", "continuous:max_batch_size=4", "--confirm", "30") == 1
    assert capsys.readouterr().err == f"wsbatch-bench choose: {error}\n"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "either DIR, of a sweep, or --rate is required"),
        (["--rate", "3", "sweep"], "either DIR"),
        (["--rate", "3", "--refine", "2"], "--refine goes with DIR"),
        (["nowhere", "--costs", "x"], "--costs goes with --rate"),
        (["--rate", "3", "--arrivals", "closed:clients=3"], "open loop"),
        (["--rate", "3", "--costs", "only.json"], "no costs of the continuous scheduler"),
    ],
)
def test_what_cannot_be_chosen_from_is_said_in_one_line(
    argv: list[str], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only.json").write_text('{"dynamic": {"tau_s": 0.01, "alpha_s": 0.001, "beta_s": 0.0001}}')
    with pytest.raises(SystemExit) as exited:
        main(["choose", "--slo", "e2e_p95<=1s", *argv])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line
