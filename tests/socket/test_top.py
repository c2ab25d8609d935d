"""`wsbatch top` as a process against a server, and what it draws on a terminal."""

import io
import subprocess
import sys

import pytest
import trio
from rich.console import Console
from rich.live import Live

from wsbatch.cli.top import _Screen
from wsbatch.config import ServerConfig
from wsbatch.errors import ConnectionLost
from wsbatch.messages import BatchSnapshot, BatchStep
from wsbatch.testing import serving


async def top(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "wsbatch", "top", *arguments]
    with trio.fail_after(60):
        return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)


async def test_in_a_pipe_it_writes_lines_of_numbers() -> None:
    async with serving(ServerConfig(port=0, allow_watch=True, auth_token="s3cret")) as served:
        done = await top(served.server.url, "--count", "1", "--token", "s3cret")
    assert (done.returncode, done.stderr) == (0, b"")
    line = done.stdout.decode()
    assert line.startswith("t=")
    assert line.endswith("scheduler=continuous running=0/8 waiting=0 tokens/s=0.0 utilisation=- waste=-\n")


async def test_why_it_cannot_is_one_line() -> None:
    async with serving(ServerConfig(port=0)) as served:
        done = await top("--url", served.server.url)
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"--allow-watch" in done.stderr
    done = await top(served.server.url)
    assert done.returncode == 1
    assert b"cannot connect" in done.stderr
    assert (await top("http://127.0.0.1")).returncode == 2


@pytest.mark.parametrize("height", [24, 8])
def test_a_terminal_gets_a_lane_for_each_slot(height: int) -> None:
    console = Console(width=40, height=height, file=io.StringIO(), force_terminal=False, highlight=False)
    screen = _Screen(console, Live(console=console, auto_refresh=False))
    steps = (
        BatchStep(0.0, 200.0, ((0, 5, "prefill"), (1, 6, "prefill"))),
        BatchStep(200.0, 300.0, ((0, 5, "decode"), (1, 6, "kept"), (2, 7, "held"))),
    )
    screen.take(BatchSnapshot(600.0, "dynamic", 4, 2, 1, 33.3, steps, slot_utilization=0.5, waste_fraction=0.25))
    console.print(screen._drawn())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in text.splitlines()]
    assert "running 1/4" in text
    assert "tokens/s 33.3" in text
    assert any(line.endswith("▓▓███") and line.lstrip().startswith("1 ") for line in lines)
    assert any("▓▓░░░" in line for line in lines)
    if height == 8:
        assert "2 more slots" in text
    else:
        assert any("···" in line for line in lines)
    screen.lost(ConnectionLost("the connection broke"))
    console.print(screen._drawn())
    assert "the connection broke; trying again" in console.file.getvalue()  # type: ignore[attr-defined]
