"""The sweep in virtual time: a few cells, resumed, drawn; settings and the command that serves them."""

import json
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.batching.costs import CostModel
from wsbatch_bench.load.generator import LoadPlan
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.sweep.cell import Cell, CellResult, from_json, to_json
from wsbatch_bench.sweep.choose import choose
from wsbatch_bench.sweep.files import SweepDocument, pareto, read_sweep
from wsbatch_bench.sweep.grid import Results, Sweep, grid, run_cells
from wsbatch_bench.sweep.setting import Setting, default_grid, parse_costs, parse_setting, same_for_both
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import VirtualStage, serve_command

from .harness import cell, short_trace

COSTS = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0001)


def sweep(measured: int = 60) -> Sweep:
    return Sweep(VirtualStage(same_for_both(COSTS)), short_trace(120, output=10), warmup=10, measured=measured)


def test_the_default_grid() -> None:
    settings = default_grid()
    assert len(settings) == len(set(settings)) == 30
    assert len(grid(settings, 2.0)) == 90
    assert {each.max_wait_ms for each in settings if each.scheduler == "continuous"} == {0.0}


def test_cells_are_measured_once_and_resumed(tmp_path: Path) -> None:
    cells = grid([Setting("dynamic", 4, 5.0), Setting("continuous", 4)], 40.0, (0.3, 0.7))
    first = [result for _, result in run_cells(sweep(), cells, Results(tmp_path / "cells.jsonl"))]
    assert [(each.label, each.rate) for each in first] == [
        ("dynamic b4 w5", 12.0),
        ("dynamic b4 w5", 28.0),
        ("continuous b4", 12.0),
        ("continuous b4", 28.0),
    ]
    assert all(each.completed == 60 and not each.invalid for each in first)
    resumed = sweep()
    object.__setattr__(resumed, "measure", None)  # it must not measure again
    again = [result for _, result in run_cells(resumed, cells, Results(tmp_path / "cells.jsonl"))]
    assert list(map(str, again)) == list(map(str, first))


def test_a_cell_is_the_same_every_time_and_another_seed_is_another_result() -> None:
    what = Cell(Setting("dynamic", 4, 5.0), 0.5, 20.0)
    assert sweep().measure(what) == sweep().measure(what)
    assert sweep().key(what) != sweep(measured=61).key(what)


def test_capacity_is_what_a_full_batch_always_waiting_gives() -> None:
    """Batches of 4 rows of 20 prompt and 10 output tokens: 0.018 + 9 * 0.014 = 0.144 s for 4 requests."""
    assert sweep().capacity(Setting("dynamic", 4)) == pytest.approx(4 / 0.144, rel=0.05)


WORKLOADS = ("fixed:tokens=10", "lognormal:median=8,sigma=0.9,max=60")


@settings(max_examples=25, deadline=None)
@given(
    setting=st.builds(Setting, st.sampled_from(["dynamic", "continuous"]), st.sampled_from([1, 4, 32])),
    outputs=st.sampled_from(WORKLOADS),
    measured=st.sampled_from([60, 300]),
    overload=st.floats(1.001, 2.0),
    seed=st.integers(0, 1000),
)
def test_overload_never_passes(setting: Setting, outputs: str, measured: int, overload: float, seed: int) -> None:
    """However short the run, and however lax the SLO: the rate is above what the setting was seen to serve at most."""
    trace = draw_trace(600, prompts=parse_lengths("fixed:tokens=20"), outputs=parse_lengths(outputs), seed=seed)
    measuring = Sweep(PoolStage(same_for_both(COSTS)), trace, warmup=10, measured=measured)
    rate = overload * measuring.saturation(setting).rate.high
    result = measuring.measure(Cell(setting, overload, rate))
    assert result.verdict == "unstable"
    assert parse_slo("e2e_p95<=1000s").judge(result) != "pass"
    assert result.capacity_low <= result.capacity <= result.capacity_high <= rate


def test_a_cell_in_virtual_time_is_as_long_as_its_utilisation_asks() -> None:
    trace = short_trace(200, output=3)
    measuring = Sweep(PoolStage(same_for_both(COSTS)), trace, warmup=20, measured=100, most=2000)
    setting = Setting("continuous", 2)
    capacity = measuring.saturation(setting).rate
    low, busy, full = (measuring.measure(Cell(setting, x, x * capacity.low)) for x in (0.2, 0.6, 0.99))
    assert low.sent == 100
    assert 500 < busy.sent <= 2000
    assert (full.sent, full.e2e_p95_high_s) == (100, inf)  # no run that is allowed would tell


def test_the_wait_does_not_change_what_full_batches_do() -> None:
    measuring = sweep()
    first = measuring.saturation(Setting("dynamic", 4, 5.0))
    assert measuring.saturation(Setting("dynamic", 4, 50.0, (("adaptive_wait", True),))) is first
    assert measuring.saturation(Setting("dynamic", 8, 5.0)) is not first


def test_capacities_are_kept_for_a_resumed_sweep(tmp_path: Path) -> None:
    setting = Setting("continuous", 2)
    list(run_cells(sweep(), grid([setting], 40.0, (0.3,)), Results(tmp_path / "cells.jsonl")))
    resumed = sweep()
    object.__setattr__(resumed, "saturation", lambda setting: resumed.saturations[setting])  # it measures none again
    assert [
        each.label for _, each in run_cells(resumed, grid([setting], 40.0, (0.4,)), Results(tmp_path / "cells.jsonl"))
    ]
    assert resumed.saturations == {setting: sweep().saturation(setting)}


def test_another_trace_is_of_the_same_law() -> None:
    again = sweep().again()
    assert again is not None
    assert (again.trace.seed, len(again.trace.entries)) == (2, 120)
    assert again.trace.outputs == sweep().trace.outputs
    assert replace(sweep(), trace=replace(sweep().trace, arrivals="replay")).again() is None


def test_a_prediction_counts_what_serving_adds_to_a_step() -> None:
    """A server whose steps take 2 ms longer than the costs that it is predicted from."""
    served, bare = replace(COSTS, tau_s=0.012), PoolStage(same_for_both(COSTS))
    measuring = replace(sweep(), stage=PoolStage(same_for_both(served)), predictor=bare)
    result = measuring.measure(Cell(Setting("continuous", 4), 0.5, 20.0))
    assert result.served_gap_s == pytest.approx(0.002, rel=0.05)
    assert abs(result.e2e_p95_error) < 0.02
    unaware = bare.run(Setting("continuous", 4), LoadPlan(trace=measuring.trace, rate=20.0, warmup=10, measured=60))
    assert summarise(unaware).e2e.p95.value < 0.92 * result.e2e_p95_s


def test_overload_is_unstable_and_stopped() -> None:
    result = Sweep(VirtualStage(same_for_both(COSTS)), short_trace(400, output=10), warmup=10, measured=300).measure(
        Cell(Setting("dynamic", 1), 2.0, 20.0)
    )
    assert result.verdict == "unstable"
    assert result.stopped_early
    assert result.e2e_p95_s == inf


def test_continuous_wastes_no_slots_and_dynamic_does() -> None:
    dynamic, continuous = (sweep().measure(Cell(Setting(name, 8), 0.5, 30.0)) for name in ("dynamic", "continuous"))
    assert continuous.slot_utilization == 1.0
    assert dynamic.waste_fraction >= 0.0
    assert continuous.e2e_p95_s < dynamic.e2e_p95_s


def test_results_survive_json() -> None:
    result = cell(
        e2e_p95_high_s=inf, waste_fraction=nan, options='[["adaptive_wait", true], ["length_buckets", [64, 256]]]'
    )
    again = from_json(json.loads(json.dumps(to_json(result), allow_nan=False)))
    assert again.e2e_p95_high_s == inf
    assert isnan(again.waste_fraction)
    assert again.setting.options == (("adaptive_wait", True), ("length_buckets", (64, 256)))


def test_what_no_answer_has_is_undefined_in_a_resumed_cell_and_what_failed_infinite() -> None:
    ones = Sweep(VirtualStage(same_for_both(COSTS)), short_trace(120, output=1), warmup=10, measured=60)
    measured = ones.measure(Cell(Setting("dynamic", 4), 0.5, 20.0))
    for each in (measured, from_json(json.loads(json.dumps(to_json(measured), allow_nan=False)))):
        assert each.tpot_undefined == each.completed == 60
        assert isnan(each.tpot_p50_s)
        assert isnan(each.itl_longest_s)
        assert each.tpot_p95_high_s == inf  # nothing bounds it: no SLO on it is met
        assert parse_slo("tpot_p95<=1s").judge(each) == "undecided"
    failed = from_json(json.loads(json.dumps(to_json(cell(tpot_p95_s=inf)), allow_nan=False)))
    assert failed.tpot_p95_s == inf


def test_a_cell_shows_what_was_offered_beside_the_stated_rate() -> None:
    few = sweep(measured=16)
    result = few.measure(Cell(Setting("dynamic", 4), 0.5, 5.0))
    assert result.rate == 5.0
    assert result.offered == few.trace.offered(5.0, 10, 16).requests_per_s != pytest.approx(5.0, rel=0.05)
    assert result.offered_output_tokens == pytest.approx(10 * result.offered)
    assert from_json(json.loads(json.dumps(to_json(cell(offered=inf)), allow_nan=False))).offered == inf


def test_a_cell_shows_the_gaps_between_tokens() -> None:
    result = sweep().measure(Cell(Setting("dynamic", 4), 0.5, 5.0))
    assert 0.010 < result.itl_p50_s <= result.itl_p99_s <= result.itl_longest_s < 0.1


def test_the_frontier_is_of_stable_cells_that_nobody_beats() -> None:
    def at(throughput: float, p95_s: float, **more: object) -> CellResult:
        return cell(output_throughput=throughput, e2e_p95_s=p95_s, **more)

    cells = [at(10, 1), at(20, 2), at(15, 3), at(20, 4), at(30, 5, verdict="unstable"), at(25, 9)]
    assert [(each.output_throughput, each.e2e_p95_s) for each in pareto(cells)] == [(10, 1), (20, 2), (25, 9)]


def test_the_files_of_a_sweep(tmp_path: Path) -> None:
    cells = [
        cell(8, rate=1.0),
        cell(8, rate=2.0, verdict="unstable", e2e_p95_s=inf),
        cell(16, rate=1.0, verdict="undecided"),
    ]
    document = SweepDocument({"title": "a <title>", "model": "demo"}, cells)
    names = document.write(tmp_path, choose(cells, parse_slo("e2e_p95<=5s")))
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "report.html").read_text()
    assert "a &lt;title&gt;" in report
    assert "chosen: dynamic b8" in report  # in the chart, which is inline
    assert "http://" not in report.replace("http://www.w3.org", "").replace("http://creativecommons", "").replace(
        "http://purl", ""
    )
    assert "src=" not in report
    page = (tmp_path / "sweep.md").read_text()
    assert "chosen     dynamic b8 w0: carries 1 requests/s" in page
    assert page.count("| dynamic b8 w0 |") == 2
    assert read_sweep(tmp_path).cells[1].e2e_p95_s == inf
    assert (tmp_path / "sweep.csv").read_text().count("\n") == 4


def test_a_sweep_in_which_nothing_keeps_up_is_drawn_all_the_same(tmp_path: Path) -> None:
    document = SweepDocument({"title": "overload", "model": "demo"}, [cell(verdict="unstable", e2e_p95_s=inf)])
    document.write(tmp_path, choose(document.cells, parse_slo("e2e_p95<=5s")))
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("spec", "label", "command"),
    [
        ("dynamic:max_batch_size=8,max_wait_ms=20", "dynamic b8 w20", "--max-batch-size 8 --max-wait-ms 20"),
        (
            "continuous:max_batch_size=4,prefill_chunk_tokens=64",
            "continuous b4 prefill_chunk_tokens=64",
            "--scheduler continuous --max-batch-size 4 --prefill-chunk-tokens 64",
        ),
        (
            "dynamic:max_batch_size=4,length_buckets=64+256,adaptive_wait=true",
            "dynamic b4 w0 adaptive_wait=on length_buckets=64+256",
            "--adaptive-wait --length-buckets 64,256",
        ),
    ],
)
def test_settings_from_specs_and_as_commands(spec: str, label: str, command: str) -> None:
    setting = parse_setting(spec)
    assert setting.label == label
    assert command in serve_command("demo", setting)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("dynamic", "max_batch_size is required"),
        ("dynamic:max_batch_size=0", "at least 1"),
        ("dynamic:max_batch_size=2,colour=3", "colour"),
        ("static:max_batch_size=2", "static"),
    ],
)
def test_bad_settings_are_named(spec: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_setting(spec)


def test_costs_from_flags_and_files(tmp_path: Path) -> None:
    assert parse_costs("tau_ms=12,alpha_ms=0.9,beta_ms=0.7")["dynamic"] == CostModel(
        tau_s=0.012, alpha_s=0.0009, beta_s=0.0007
    )
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"continuous": {"tau_s": 0.01, "alpha_s": 0.001, "beta_s": 0.0005, "r2": 0.99}}))
    assert parse_costs(str(path)) == {"continuous": CostModel(tau_s=0.01, alpha_s=0.001, beta_s=0.0005)}
    path.write_text('{"dynamic": {"tau_s": 0.01, "alpha_s": NaN, "beta_s": 0}}')
    with pytest.raises(ValueError, match=r"dynamic\.alpha_s is nan: must be a number of at least 0"):
        parse_costs(str(path))
    for text, word in (("tau_ms=-1,alpha_ms=1,beta_ms=1", "tau_ms"), ("tau_ms=0,alpha_ms=0,beta_ms=1", "must take")):
        with pytest.raises(ValueError, match=word):
            parse_costs(text)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not a file of step costs"):
        parse_costs(str(path))
