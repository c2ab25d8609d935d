"""Scripts of the laboratory that need no server and no device: their help, what they print and keep."""

import importlib
import json
from pathlib import Path

import pytest

MODEL = ["--model", "simulated", "--costs", "tau_ms=10,alpha_ms=1,beta_ms=0.1"]
LAB = Path(__file__).parents[2] / "bench/lab"
SCRIPTS = [path.stem for path in LAB.glob("*.py") if "_parser(" in path.read_text()]


def run(script: str, *argv: str) -> object:
    with pytest.raises(SystemExit) as exited:
        importlib.import_module(script).main(argv)
    return exited.value.code


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_every_script_has_help_to_work_from(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(script, "--help") == 0
    assert f"python bench/lab/{script}.py" in capsys.readouterr().out


def test_every_file_is_in_the_readme() -> None:
    assert {"convoy", "gpu_check", "offline", "overload", "replicas", "router", "soak", "stall"} < set(SCRIPTS)
    readme = (LAB / "README.md").read_text()
    assert [path.name for path in LAB.glob("*.*") if f"`{path.name}`" not in readme] == ["README.md"]


def test_offline_measures_and_keeps_its_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-lengths", "fixed:tokens=8", "--output-lengths", "fixed:tokens=4"]
    workload = tmp_path / "workload.json"
    assert run("offline", *MODEL, "--num-prompts", "8", *lengths, "--workload-out", str(workload)) == 0
    assert "32 output tokens" in capsys.readouterr().out.replace("\n", " ")
    assert [each["max_tokens"] for each in json.loads(workload.read_text())] == [4] * 8


@pytest.mark.parametrize("count", [5, 34])
def test_offline_fills_every_dynamic_batch_and_its_parts_are_of_their_own_time(tmp_path: Path, count: int) -> None:
    """Batches of 2, 8, 8, 8, 6 took a sixth longer; parts of one time were divided by another's."""
    out = tmp_path / "figures.json"
    argv = [*MODEL, "--scheduler", "dynamic", "--max-batch-size", "8", "--num-prompts", str(count), "--out", str(out)]
    assert run("offline", *argv) == 0
    figures = json.loads(out.read_text())
    hold_s = 0.010 + 0.001 * count
    assert list(figures["columns"]) == ["greedy", "temperature 0.7, top_p 0.9"]
    for column in figures["columns"].values():
        assert column["steps"]["with_prefill"] == -(-count // 8)
        assert column["engine_s"] == pytest.approx(column["bare_loop_s"])
        assert column["engine_s"] > 10 * hold_s
        for whole in ("bare_loop", "engine"):
            assert sum(column[f"{whole}_parts_s"].values()) == pytest.approx(column[f"{whole}_s"])
            assert min(column[f"{whole}_parts_s"].values()) >= 0


def test_stall_prints_a_line_for_each_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stall", *MODEL, "--chunks", "256,4096") == 0
    printed = capsys.readouterr().out
    assert printed.count(" ms ") == 8
    assert printed.count("greedy") == printed.count("temperature 0.7, top_p 0.9") == 2
