"""Overload, small enough for a test: the urgent are served, goodput stays, and all of it is the same every time."""

import csv
from functools import cache
from math import isnan
from pathlib import Path

import pytest

from lab_tools.impatient import Manners
from lab_tools.overload_run import Overload, Point, overload_rows, overload_table
from overload import main
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sweep.setting import parse_setting, same_for_both

from .harness import COSTS

OVERLOAD = Overload(
    costs=same_for_both(COSTS),
    setting=parse_setting("continuous:max_batch_size=4,max_queue_requests=8,queue_timeout_ms=500"),
    trace=draw_trace(
        500, prompts=parse_lengths("fixed:tokens=10"), outputs=parse_lengths("fixed:tokens=8"), seed=1
    ),
    manners=Manners(1.0, pause_s=0.2, classes=((0, 1.0), (9, 3.0))),
    warmup_s=1.0,
    measured_s=5.0,
)  # fmt: skip


@cache
def at(load: float, tries: int = 1) -> Point:
    return OVERLOAD.measure(load, capacity(), tries=tries)


@cache
def capacity() -> float:
    return OVERLOAD.capacity()


def test_under_the_capacity_everybody_is_answered() -> None:
    point = at(0.4)
    assert all(each.outcomes == {"answered": each.clients} for each in point.classes)
    assert point.goodput == pytest.approx(point.rate, rel=0.25)
    assert sum(each.clients for each in point.classes) == round(5 * point.rate)


def test_over_it_the_urgent_are_served_and_the_others_are_told() -> None:
    """At three times the capacity the urgent quarter takes three quarters of it."""
    urgent, other = at(3.0).classes
    assert urgent.outcomes == {"answered": urgent.clients}
    assert urgent.e2e_p95_s < other.e2e_p95_s
    assert other.outcomes["queue_full"] + other.outcomes["shed"] > other.outcomes["answered"]
    assert at(3.0).goodput > 0.9 * capacity()


def test_a_storm_keeps_the_goodput() -> None:
    storm = at(6.0, tries=4)
    assert storm.goodput > 0.9 * max(at(0.4).goodput, at(3.0).goodput)
    assert storm.attempts > 2 * storm.rate
    assert at(3.0).attempts == pytest.approx(at(3.0).rate, rel=0.25)


def test_clients_that_give_up_leave_the_server_to_the_others() -> None:
    """Without bounds of its own the server is as slow as its clients are patient; nobody it serves has left."""
    unbounded = parse_setting("continuous:max_batch_size=4,max_queue_requests=1024")
    impatient = Overload(**vars(OVERLOAD) | {"setting": unbounded})
    urgent, other = impatient.measure(3.0, capacity()).classes
    assert urgent.outcomes == {"answered": urgent.clients}
    assert other.share("gave_up") > 0.5
    assert set(other.outcomes) <= {"answered", "gave_up"}


def test_equal_runs_are_equal() -> None:
    assert OVERLOAD.measure(3.0, capacity()) == at(3.0)


def test_table_and_rows() -> None:
    storm = at(6.0, tries=4)
    table = overload_table([at(3.0)], storm)
    assert len(table) == 4
    assert table[3].startswith("| 6×, coming back |")
    assert "100% · " in table[2]
    rows = overload_rows([at(3.0)], storm)
    assert [(row["load"], row["priority"], row["comes_back"]) for row in rows] == [
        (3.0, 0, False), (3.0, 9, False), (6.0, 0, True), (6.0, 9, True)
    ]  # fmt: skip
    few = Overload(**vars(OVERLOAD) | {"measured_s": 0.05}).measure(0.2, capacity())
    assert isnan(few.classes[0].ttft_p95_s)
    assert "–" in overload_table([few], None)[2]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--setting continuous:max_batch_size=4,max_queue_requests=8,queue_timeout_ms=500 --costs "
    flags += "tau_ms=10,alpha_ms=1,beta_ms=0.1 --prompt-lengths fixed:tokens=10 --output-lengths fixed:tokens=8 "
    flags += f"--loads 0.5,2 --storm 4 --tries 3 --patience-s 1 --warmup-s 1 --seconds 3 --out {tmp_path}"
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 0
    assert "of the peak" in capsys.readouterr().out
    assert (tmp_path / "overload.png").stat().st_size > 10_000
    assert (tmp_path / "overload.svg").exists()
    rows = list(csv.DictReader((tmp_path / "overload.csv").read_text().splitlines()))
    assert [row["load"] for row in rows] == ["0.5"] * 3 + ["2.0"] * 3 + ["4.0"] * 3


@pytest.mark.parametrize(
    "flags", [["--classes", "0:1,0:2"], ["--classes", "12:1"], ["--loads", "1,0"], ["--setting", "continuous"]]
)
def test_bad_flags(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
