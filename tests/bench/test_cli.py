"""The command line: what each command prints, keeps and exits with. One test starts a server on a real socket."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from wsbatch_bench.cli import main, make_parser
from wsbatch_bench.cli.flags import add_workload, read_trace
from wsbatch_bench.cli.load import add_command as add_load
from wsbatch_bench.load.generator import LoadPlan, LoadRun
from wsbatch_bench.load.server import server_process, wsbatch_command
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.grid import Sweep
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.stage import VirtualStage

COSTS = "tau_ms=10,alpha_ms=1,beta_ms=0.1"
SHORT = ["--prompt-lengths", "fixed:tokens=8", "--output-lengths", "fixed:tokens=4"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "cache"))


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert isinstance(exited.value.code, int)
    return exited.value.code


def sweep(out: Path, *more: str) -> int:
    return run(
        "sweep", "--out", str(out), "--costs", COSTS, "--capacity", "60", "--num-prompts", "250",
        "--setting", "dynamic:max_batch_size=4", "--setting", "continuous:max_batch_size=4", *SHORT, *more,
    )  # fmt: skip


COMMANDS = ["load", "compare", "calibrate", "sweep", "choose", "study", "static", "scaling", "plan"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_to_work_from(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert "example" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_flag_says_what_it_is(command: str) -> None:
    (commands,) = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help for action in commands.choices[command]._actions}
    bare = [name for name, said in helps.items() if not said or "default:" in said.split()[:2] or said[:3] == "of "]
    assert bare == []


def test_without_the_extra_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("wsbatch_bench.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)  # as in the base install
    assert run("sweep", "--help") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "wsbatch-bench: scipy is not installed: the bench needs `pip install 'wsbatch[bench]'`"


def test_a_dry_run_lists_cells_and_their_time_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "6 cells, 6 to measure: about" in printed
    assert printed.count("dynamic b4 w0") == 3
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_kept_resumed_and_chosen_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path, "--slo", "e2e_p95<=5s") == 0
    first = capsys.readouterr().out
    assert "chosen" in first
    kept = (tmp_path / "cells.jsonl").read_text()
    assert sweep(tmp_path) == 2
    assert "--resume keeps them" in capsys.readouterr().err
    assert sweep(tmp_path, "--dry-run") == 0
    assert "6 cells, 0 to measure" in capsys.readouterr().out
    assert (tmp_path / "cells.jsonl").read_text() == kept
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert len(document["cells"]) > 6  # those of the grid, and those that the choice took
    assert document["meta"]["trace_sha256"]
    assert sweep(tmp_path, "--resume") == 0
    assert "6 cells, 0 to measure" in capsys.readouterr().out

    assert run("choose", str(tmp_path), "--slo", "e2e_p95<=5s", "--refine", "1") == 0
    assert "serve it   wsbatch serve --model simulated --scheduler" in capsys.readouterr().out
    # 250 answers of 250 are at least 95 % for certain, but not 99 %.
    assert run("choose", str(tmp_path), "--slo", "success>=95%") == 0
    assert run("choose", str(tmp_path), "--slo", "success>=99%") == 5
    assert "success>=99% takes at least 299 measured requests to be shown; there are 250" in capsys.readouterr().out
    assert run("choose", str(tmp_path), "--slo", "e2e_p95<=1ms") == 4
    assert run("choose", str(tmp_path), "--slo", "nonsense") == 2
    assert run("choose", str(tmp_path / "nowhere"), "--slo", "e2e_p95<=1s") == 2


def test_the_commands_that_need_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "simulated", "--costs", COSTS]
    assert run("scaling", *model, "--sizes", "1,4", "--output-tokens", "6", "--out", str(tmp_path)) == 0
    assert "the same tokens in 4 of 4 rows" in capsys.readouterr().out
    assert run("static", *model, "--sizes", "2,4", "--requests", "8", "--out", str(tmp_path)) == 0
    assert "248 issued, 52 useful: 79.0% wasted" in capsys.readouterr().out
    for command in ("scaling", "static"):
        assert run(command, *model, "--out", str(tmp_path)) == 2
        assert "exists: give another --out, or --overwrite" in capsys.readouterr().err
    # What `scaling` fitted is what `sweep` takes.
    assert run("sweep", "--out", str(tmp_path / "s"), "--costs", str(tmp_path / "costs.json"), "--dry-run",
               "--capacity", "1", "--setting", "dynamic:max_batch_size=1") == 0  # fmt: skip


def test_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("study", "anchors", "--costs", COSTS, "--num-prompts", "20", "--capacity", "20", *SHORT, "--out",
               str(tmp_path)) == 0  # fmt: skip
    assert capsys.readouterr().out.count("| dynamic b8 w20 wait_anchor=idle |") == 3
    assert {path.suffix for path in tmp_path.glob("anchors.*")} == {".md", ".json", ".png", ".svg"}
    assert run("study", "anchors", "--costs", COSTS, "--num-prompts", "20", "--out", str(tmp_path)) == 2
    assert "anchors.md exists" in capsys.readouterr().err


def test_a_sweep_that_is_interrupted_keeps_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, cells = Sweep.measure, iter(range(2))

    def press(self: Sweep, cell: Cell) -> CellResult:
        if next(cells, None) is None:
            raise KeyboardInterrupt
        return measure(self, cell)

    monkeypatch.setattr(Sweep, "measure", press)
    assert sweep(tmp_path) == 130
    assert "ended early: 2 cells are kept" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "sweep.json").read_text())["cells"]) == 2
    monkeypatch.undo()
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "a process that was killed')
    assert sweep(tmp_path, "--resume") == 0
    assert "6 cells, 4 to measure" in capsys.readouterr().out
    assert sweep(tmp_path, "--resume") == 0
    assert "6 cells, 0 to measure" in capsys.readouterr().out
    (tmp_path / "cells.jsonl").write_text("nonsense\n")
    assert sweep(tmp_path, "--resume") == 2
    assert "cells.jsonl, line 1: not a result" in capsys.readouterr().err


def test_a_study_that_is_interrupted_shows_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, runs = VirtualStage.run, iter(range(2))

    def press(self: VirtualStage, setting: Setting, plan: LoadPlan) -> LoadRun:
        if next(runs, None) is None:
            raise KeyboardInterrupt
        return stage(self, setting, plan)

    monkeypatch.setattr(VirtualStage, "run", press)
    argv = ["study", "anchors", "--costs", COSTS, "--num-prompts", "20", "--capacity", "20", *SHORT]
    assert run(*argv, "--out", str(tmp_path)) == 130
    assert capsys.readouterr().out.count("| dynamic b8 w") == 2
    assert len(json.loads((tmp_path / "anchors.json").read_text())) == 2


def test_a_sweep_measures_the_capacity_of_the_batch_sizes_it_sweeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", "--out", str(tmp_path), "--costs", COSTS, *SHORT, "--dry-run", "--num-prompts", "20"]
    assert run(*argv, "--setting", "continuous:max_batch_size=4") == 0
    printed = capsys.readouterr().out
    assert printed.count("capacity of dynamic b") == 1
    assert "capacity of dynamic b4:" in printed


def test_a_long_sweep_says_what_would_shorten_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sweep", "--out", str(tmp_path / "new"), "--engine", "real", "--dry-run"]
    assert run(*argv, "--capacity", "3", "--slo", "success>=99.9%") == 0
    printed = capsys.readouterr().out
    assert "90 cells, 90 to measure: about 430 min" in printed
    assert "--engine virtual --costs FILE, of `scaling --out` (about " in printed
    assert "success>=99.9% takes at least 2,995 measured requests" in printed
    assert run(*argv, "--setting", "dynamic:max_batch_size=8") == 0
    assert "the reference rate is measured first: 100 requests in 1 runs" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_a_study_of_other_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["study", "waiting", "--costs", COSTS, "--num-prompts", "5", "--capacity", "20", *SHORT, "--arrivals"]
    assert run(*argv, "closed:clients=2") == 0
    table = capsys.readouterr().out
    assert table.count("dynamic b8 w20") == 1
    assert "| closed:clients=2 | dynamic b8 w0 |" in table


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--arrivals", "poisson"], "--trace with --arrivals: the trace says that already"),
        (["--seed", "0", "--prompt-lengths", "fixed:tokens=3"], "--trace with --seed, --prompt-lengths: the trace"),
        (["--output-lengths", "fixed:tokens=3"], "--trace with --output-lengths"),
        (["--burstiness", "0.5"], "--trace with --burstiness"),
        (["--request-rate", "2"], "all times are equal: it comes at once"),
    ],
)
def test_flags_that_contradict_a_trace_are_refused_by_name(
    tmp_path: Path, flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "equal.jsonl"
    path.write_text(3 * (json.dumps({"at_s": 0, "prompt_tokens": 5, "output_tokens": 7}) + "\n"))
    assert run("load", "ws://127.0.0.1:1", "--trace", str(path), *flags) == 2
    assert word in capsys.readouterr().err.splitlines()[-1]
    assert run("sweep", "--out", str(tmp_path / "sweep"), "--trace", str(path)) == 2
    assert "it comes at once" in capsys.readouterr().err


def test_prompts_differ_by_run_where_a_server_may_know_them_and_are_the_same_where_none_does() -> None:
    def trace(seed: int | None, *argv: str) -> Trace:
        parser = argparse.ArgumentParser()
        add_workload(parser, measured=20, seed=seed)
        return read_trace(parser.parse_args(argv))

    first, second = trace(None), trace(None)
    assert first.prompt_ids(0, 50) != second.prompt_ids(0, 50)
    assert trace(None, "--seed", str(first.seed)) == first  # as printed
    assert trace(0) == trace(0)
    (load,) = (action for action in _load_parser()._actions if action.dest == "seed")
    assert load.default is None


def _load_parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    add_load(commands)
    return commands.choices["load"]


@pytest.mark.parametrize(
    ("argv", "status", "word"),
    [
        (["load", "ftp://x"], 2, "url must be"),
        (["load", "http://127.0.0.1:1/v1/completions"], 2, "--model is required"),
        (["load", "ws://127.0.0.1:1", "--request-rate", "0"], 2, "of at least 1e-06"),
        (["load", "ws://127.0.0.1:1", "--goodput", "ttfb:3"], 2, "none of ttft"),
        (["load", "ws://127.0.0.1:1", "--output-lengths", "gauss:mean=3"], 2, "none of"),
        (["load", "ws://127.0.0.1:1", "--trace", "/nowhere.jsonl"], 2, "No such file"),
        (["load", "ws://127.0.0.1:1", "--request-rate", "1"], 1, "cannot connect"),
        (["load", "ws://127.0.0.1:1", "--request-rate", "2", "--arrivals", "closed:clients=2"], 2, "set the pace"),
        (["load", "ws://127.0.0.1:1", "--burstiness", "2", "--arrivals", "poisson"], 2, "--burstiness with --arrivals"),
        (["sweep", "--out", "x", "--setting", "dynamic"], 2, "max_batch_size is required"),
        (["sweep", "--out", "x", "--slo", "soon"], 2, "must be METRIC"),
        (["sweep", "--out", "x", "--arrivals", "closed:clients=8"], 2, "a rate needs an open loop"),
        (["sweep", "--out", "x", "--costs", "tau_ms=1"], 2, "alpha_ms is required"),
        (["study", "waiting", "--arrivals", "often"], 2, "none of"),
        (["scaling", "--model", "simulated", "--cpu-time"], 2, "its steps take no CPU"),
        (["scaling", "--sizes", "0"], 2, "at least 1"),
        (["static", "--rows", "7"], 2, "ROWSxTOKENS"),
        (["compare", "/nowhere.json"], 2, "FileNotFoundError"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    argv: list[str], status: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == status
    assert word in capsys.readouterr().err.splitlines()[-1]


def test_results_are_not_overwritten_and_have_a_place_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    nobody = ["load", "ws://127.0.0.1:1", "--save-result", "--result-dir", str(folder)]
    assert run(*nobody) == 1
    assert folder.is_dir()
    (folder / "mine.trace.jsonl").write_text("kept")
    assert run(*nobody, "--result-filename", "mine.json") == 2
    assert "mine.trace.jsonl exists: give another --result-filename, or --overwrite" in capsys.readouterr().err
    assert run(*nobody, "--result-filename", "mine.json", "--overwrite") == 1  # nothing to replace it with
    assert (folder / "mine.trace.jsonl").read_text() == "kept"
    assert run(*nobody, "--result-filename", "no/such/folder.json") == 2
    (tmp_path / "file").write_text("")
    assert run("load", "ws://127.0.0.1:1", "--save-result", "--result-dir", str(tmp_path / "file")) == 2


def test_beforehand_load_says_how_long_it_takes_and_what_it_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["load", "ws://127.0.0.1:1", "--arrivals", "constant", "--num-prompts", "101", "--num-warmups", "20"]
    slo = ["--slo", "ttft_p95<=500ms,success>=100%,success>=99%"]
    assert run(*argv, "--request-rate", "2", *slo) == 1
    said = capsys.readouterr().err
    assert "20 warm-up and 101 measured requests: about 60 s" in said
    assert "success>=100% is shown by no number of requests: success>=99.9% takes 2,995" in said
    assert "success>=99% takes at least 299 measured requests" in said
    assert "ttft_p95<=0.5s takes about 200, where they queue more, measured requests to be shown" in said
    assert run(*argv, "--request-rate", "0.02") == 1
    said = capsys.readouterr().err
    assert "about 100 min" in said
    assert "shorter: --num-prompts 10, or a higher rate" in said


def test_load_on_a_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one test over a socket: what comes out must add up; how long it took says nothing here."""
    with server_process(wsbatch_command("serve", "--model", "simulated:tau_ms=2,alpha_ms=0.1,beta_ms=0.01")) as server:
        url = server.url
        argv = ["load", url, "--request-rate", "40", "--num-prompts", "30", *SHORT, "--goodput", "e2el:60000",
                "--max-lag-ms", "60000", "--save-result", "--result-dir", str(tmp_path)]  # fmt: skip
        assert run(*argv) == 0
        # The interval of so few requests has no upper bound: it can fail, or be undecided.
        assert run(*argv, "--slo", "e2e_p95<=60s") == 5
        assert run(*argv, "--slo", "e2e_p95<=1ms,success>=50%") == 1
        assert run("load", url, "--num-prompts", "5", *SHORT, "--max-lag-ms", "0") == 3  # nobody is that punctual
    printed = capsys.readouterr().out
    assert "measured requests    30, answered 30" in printed
    assert "INVALID" in printed
    path = min(tmp_path.glob("wsbatch-*.json"))
    result = json.loads(path.read_text())
    assert result["completed"] == 30
    assert (
        result["wsbatch"]["client_tokens"] == result["wsbatch"]["server_tokens"] == 4 * result["wsbatch"]["sent_in_all"]
    )
    for key in (
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "p95_e2el_ms",
    ):
        assert result[key] > 0
    parts = result["wsbatch"]["ttft_parts_p95"]
    assert sum(parts.values()) == pytest.approx(result["p95_ttft_ms"] / 1000, abs=1e-6)
    assert run("compare", str(path)) == 0
    assert run("load", url, "--trace", str(path.with_suffix(".trace.jsonl")), "--request-rate", "5") == 1  # it is gone
