"""Every command over closed, full and unread standard streams: no traceback, and the exit status that is right."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 60
# What a shell adds to the command. `gone` is a pipe that nobody reads.
REDIRECTIONS = ["<&-", ">&-", "2>&-", ">/dev/full", "2>/dev/full", ">gone"]
UNWRITABLE = {">&-": "Bad file descriptor", ">/dev/full": "No space left on device"}

COMMANDS = {
    "generate": ["wsbatch", "generate", "--url", "URL", "--max-tokens", "5", "--json", "Hello"],
    "generate from stdin": ["wsbatch", "generate", "--url", "URL", "--max-tokens", "5", "-"],
    "chat": ["wsbatch", "chat", "--url", "URL", "--max-tokens", "5"],
    "top": ["wsbatch", "top", "URL", "--count", "1"],
    "demo": ["wsbatch", "demo", "--model", "simulated:tau_ms=0", "--once", "--max-tokens", "5"],
    "help": ["wsbatch", "serve", "--help"],
    "bench": ["wsbatch_bench", "sweep", "--dry-run", "--out", "OUT", "--costs", "tau_ms=10,alpha_ms=1,beta_ms=0.1",
              "--capacity", "60", "--setting", "dynamic:max_batch_size=4"],
}  # fmt: skip
SERVERS = {
    "serve": ["wsbatch", "serve", "--model", "simulated", "--port", "0"],
    "route": ["wsbatch", "route", "--port", "0", "URL"],
}
READS_STDIN = {"generate from stdin", "chat"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server of the simulated model."""
    command = [sys.executable, "-P", "-m", "wsbatch", "serve", "--model", "simulated:tau_ms=0", "--port", "0"]
    with subprocess.Popen(
        [*command, "--allow-watch", "--log-level", "error"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.kill()


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a command with its streams redirected; none outlives its test."""
    processes: list[subprocess.Popen[str]] = []

    def start(arguments: list[str], redirection: str) -> "subprocess.Popen[str]":
        (tmp_path / "stdin").write_text("Hello\n")
        named = {"URL": url, "OUT": str(tmp_path)}
        module, *rest = (named.get(argument, argument) for argument in arguments)
        pipe: Any = subprocess.PIPE
        unread = None
        if redirection == ">gone":
            reading, unread = os.pipe()
            os.close(reading)
        with (tmp_path / "stdin").open() as stdin:
            script = f'exec "$@" {redirection if unread is None else ""}'
            command = ["sh", "-c", script, "sh", sys.executable, "-P", "-m", module, *rest]
            process = subprocess.Popen(
                command, text=True, stdin=stdin, stdout=pipe if unread is None else unread, stderr=pipe
            )
        if unread is not None:
            os.close(unread)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def rest_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out or "", err


@pytest.mark.parametrize("redirection", REDIRECTIONS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, redirection: str, start: Callable[..., "subprocess.Popen[str]"]) -> None:
    status, out, err = rest_of(start(COMMANDS[command], redirection))
    if redirection == "<&-" and command in READS_STDIN:
        assert (status, out) == (1, "")
        assert err == f"wsbatch {command.split()[0]}: cannot read stdin: Bad file descriptor\n"
    elif redirection in UNWRITABLE:
        assert status == 1
        assert err.endswith(f"cannot write to stdout: {UNWRITABLE[redirection]}\n")
        assert err.count("\n") == 1
    elif redirection == ">gone":
        assert (status, err) == (141, "")
    else:
        assert status == 0
        assert out
        assert "Traceback" not in err


@pytest.mark.parametrize("redirection", REDIRECTIONS[:-1])
@pytest.mark.parametrize("command", SERVERS)
def test_a_server_serves_on(command: str, redirection: str, start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start(SERVERS[command], redirection)
    if redirection.startswith(">"):  # it says where it listens in the log then
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("cannot write to stdout" in line and "ws://127.0.0.1:" in line for line in lines)
    else:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on ws://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    status, _, err = rest_of(process)
    assert status == 0
    assert "Traceback" not in err


def test_an_idle_top_ends_with_its_reader(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start(COMMANDS["top"][:-2], "")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("t=")
    process.stdout.close()
    process.stdout = None
    assert process.wait(PATIENCE_S) == 141


def test_help_is_written_in_any_encoding() -> None:
    command = [sys.executable, "-P", "-m", "wsbatch", "serve", "--help"]
    for encoding in ("ascii", "latin-1"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, env=environment, timeout=PATIENCE_S)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"--max-batch-size" in done.stdout
