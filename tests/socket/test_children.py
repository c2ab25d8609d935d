"""What lies in the working directory is data: the processes that we start do not import it."""

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab_tools.stamped import stamped_command
from wsbatch.model.processes import keep_working_directory_off_paths, module_command
from wsbatch_bench.load.server import server_process, wsbatch_command

ROOT = Path(__file__).parent.parent.parent
PLANTED = ("json", "torch", "socket", "wsbatch", "trio", "pickle")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that exists once one of the modules in the working directory has run, which none must."""
    mark = tmp_path / "ran"
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # an earlier test may have run a command in this process
    yield mark
    assert not mark.exists()


def test_a_module_of_ours_runs_without_it(planted: Path) -> None:
    unprotected = [argument for argument in module_command("wsbatch", "--version") if argument != "-P"]
    assert subprocess.run(unprotected).returncode == 9
    planted.unlink()
    assert subprocess.run(module_command("wsbatch", "--version"), capture_output=True).returncode == 0


@pytest.mark.parametrize("command", [wsbatch_command("serve", "--model", "simulated"), stamped_command(5)], ids=str)
def test_the_bench_starts_servers_without_it(command: list[str], planted: Path) -> None:
    with server_process(command) as server:
        assert server.url.startswith("ws://127.0.0.1:")


def test_neither_do_the_children_of_multiprocessing(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    keep_working_directory_off_paths()
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_no_child_is_started_in_another_way() -> None:
    """In this tree's own Python, and in what starts it from JavaScript."""
    files = [path for folder in ("wsbatch", "bench", "tests", "clients") for path in (ROOT / folder).rglob("*.[pm]*")]
    files = [path for path in files if path.suffix in (".py", ".mjs") and "node_modules" not in path.parts]
    assert len(files) > 200
    for path in files:
        text = path.read_text()
        for start in re.finditer(r'(?:sys\.executable,|PYTHON \?\? "python", \[)\s*("[^"]*"|[*\w]+)', text):
            assert start[1] in ('"-P"', '"recipe.py"'), f"{path}: {start[0]}"
