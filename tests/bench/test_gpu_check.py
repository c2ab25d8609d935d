"""`bench/lab/gpu_check.py` on the CPU, and what it does about stages that fail, hang or crash."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab_tools.gpu.report import knee, summary, table
from lab_tools.gpu.supervise import Outcome, supervise

ROOT = Path(__file__).parents[2]


class NotHere(Exception):
    pass


def work(job: str, report: Any) -> None:
    report({"rows": 1})
    if job == "hang":
        time.sleep(60)
    elif job == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif job == "skip":
        raise NotHere("no such thing here")
    elif job == "fail":
        raise ValueError("rows is 3: must be 4")
    report({"rows": 2})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child touches nothing of other threads
@pytest.mark.parametrize(
    ("job", "status", "reason", "rows"),
    [
        ("work", "ok", "", 2),
        ("fail", "failed", "ValueError: rows is 3: must be 4", 1),
        ("skip", "skipped", "no such thing here", 1),
        ("crash", "failed", "its process ended with exit code -9", 1),
        ("hang", "timed out", "not done within 2 s", 1),
    ],
)
def test_a_stage_ends_and_its_rows_remain(job: str, status: str, reason: str, rows: int) -> None:
    seen: list[Any] = []
    limit_s = 2.0 if job == "hang" else 60.0
    outcome = supervise(work, job, limit_s=limit_s, start_method="fork", skipped=NotHere, on_row=seen.append)
    assert outcome.status == status
    assert outcome.reason.startswith(reason)
    assert outcome.rows == seen == [{"rows": count + 1} for count in range(rows)]


def point(rows: int, step_ms: float, memory_ms: float, compute_ms: float) -> dict[str, Any]:
    return {"rows": rows, "step_ms": step_ms, "memory_limit_ms": memory_ms, "compute_limit_ms": compute_ms}


def test_where_decode_stops_being_memory_bound() -> None:
    points = [point(1, 1.0, 0.5, 0.1), point(64, 1.9, 1.0, 0.9), point(128, 2.1, 1.5, 1.8), point(256, 4, 2.5, 3.6)]
    assert knee([{"runner": "modules"}, *points]) == {"compute_bound_from": 128, "knee": 64}
    assert "every row's own KV" in knee(points[:2])["compute_bound_from"]
    assert knee([{"rows": 512, "missing": "its KV does not fit"}]) == {}


def test_tables_and_the_summary() -> None:
    assert table([{"runner": "modules"}, {"rows": 1, "ms": 2.0}, {"rows": 22, "ms": 0.123456}]) == [
        "runner: modules",
        "          rows              ms",
        "             1               2",
        "            22          0.1235",
    ]
    lines = summary({"decode": Outcome("ok", 1.25), "graphs": Outcome("failed", 2.0, reason="RuntimeError: no\n")})
    assert lines[1:3] == ["decode     ok              1.2", "graphs     failed          2.0"]
    assert lines[-1] == "graphs (failed): RuntimeError: no"


def test_the_whole_script_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-P", "bench/lab/gpu_check.py", "--device", "cpu", "--quick", "--random-llama", "tiny"]
    # -P keeps the script's folder off the path as well.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "bench/lab")}
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    stages = json.loads(out.read_text())["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(
        ["device", "model", "tests", "checks", "decode", "graphs", "prefill", "offline"], "ok"
    )
    compared = [row for row in stages["checks"]["rows"] if row["dtype"] == "float32" and "equal" in row]
    assert [row["equal"] for row in compared] == [3] * 4
    assert [row["rows"] for row in stages["decode"]["rows"] if "step_ms" in row] == [1, 2, 4]
    assert "knee" in stages["decode"]["rows"][-1]
    assert "skipped" in stages["tests"]["rows"][0]["result"]
    assert stages["offline"]["rows"][0]["output_tokens"] == 16
    assert "tokens_per_s" in done.stdout
