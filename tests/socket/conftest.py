"""Servers in processes of their own; none outlives its test."""

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

# For whatever must happen: never waited out in a run that passes.
PATIENCE_S = 60

_PATCHED = """
import sys, time, wsbatch.cli, wsbatch.engine.open
from wsbatch.model.simulated import SimulatedModel
from wsbatch.text import ByteText

class Faulty(SimulatedModel):
    def run(self, plan):
        if any(1 in row.token_ids for row in getattr(plan, "rows", ())):
            {fault}
        return super().run(plan)

wsbatch.engine.open._load = lambda config, progress: (Faulty(), ByteText())
sys.exit(wsbatch.cli.main(sys.argv[1:]))
"""


class ServerProcess:
    """A `wsbatch serve` that listens."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on (ws://127\.0\.0\.1:(\d+))\n", line)
        assert found is not None, f"{line!r} {self.end()}"
        self.url = found[1]
        self.port = int(found[2])

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit status and what it logged."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err

    def probe(self, path: str = "/readyz") -> int:
        """The status of a probe; 0 where nobody listens any more."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0


ServeProcess = Callable[..., ServerProcess]


@pytest.fixture
def serve_process() -> Iterator[ServeProcess]:
    """Starts servers of the simulated model, on a free port unless told otherwise: ServerProcess.

    With `fault`, a statement, they run it in each step that is given token 1, which no text holds but "\\x01".
    """
    processes: list[subprocess.Popen[str]] = []

    def serve(*flags: str, model: str = "simulated:tau_ms=1", port: int = 0, fault: str | None = None) -> ServerProcess:
        program = ["-m", "wsbatch"] if fault is None else ["-c", _PATCHED.format(fault=fault)]
        command = [sys.executable, "-P", *program, "serve", "--model", model, "--port", str(port), *flags]
        processes.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return ServerProcess(processes[-1])

    yield serve
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()
