"""`wsbatch serve --ray local` as a process, from its listening line to its end, through clients."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from wsbatch.client import connect

from .harness import PATIENCE_S, until

pytest.importorskip("ray", reason="needs the extra `ray`")

_MARK = "WSBATCH_TEST_MARK"
# `wsbatch`, but threads that idle end at once and not after ten seconds: no process of Ray may depend on one of them.
_PROGRAM = """
import sys, trio._core._thread_cache
trio._core._thread_cache.IDLE_TIMEOUT = 0.01
from wsbatch.cli import main
sys.exit(main(sys.argv[1:]))
"""
_PROMPTS = [f"Request {number}:" for number in range(12)]


class Serving:
    """A `wsbatch serve --ray local` that listens. Its processes are known by a mark in their environment."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.mark = uuid.uuid4().hex
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, "serve", "--ray", "local", "--port", "0", *flags],
                text=True,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {_MARK: self.mark},
            )

    async def listen(self) -> str:
        """Wait until it listens; where."""
        assert self.process.stdout is not None
        line = await trio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        found = re.fullmatch(r"listening on (ws://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, line + self.logged()
        return found[1]

    def logged(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        """All that have come from it, itself included, wherever they hang in the tree."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    served: list[Serving] = []

    def start(*flags: str) -> Serving:
        served.append(Serving(tmp_path / f"log-{len(served)}", *flags))
        return served[-1]

    yield start
    for serving in served:
        serving.end()


async def ready(url: str) -> int:
    """Replicas that take requests, as the router tells."""

    def get() -> str:
        with urllib.request.urlopen(url.replace("ws", "http", 1) + "/metrics", timeout=PATIENCE_S) as answer:
            body: str = answer.read().decode()
            return body

    found = re.search(r"^wsbatch_replicas_ready (\S+)$", await trio.to_thread.run_sync(get), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


async def until_ready(url: str, count: int) -> None:
    while await ready(url) != count:  # noqa: ASYNC110
        await trio.sleep(0.05)


async def test_from_start_to_end(serve: Callable[..., Serving]) -> None:
    serving = serve("--model", "simulated:tau_ms=5", "--replicas", "3", "--replica-cpus", "0.25", "--drain-s", "5")
    answers: dict[str, set[str]] = {prompt: set() for prompt in _PROMPTS}
    finished = []
    enough = False

    async def ask(prompt: str) -> None:
        async with connect(url) as client:
            while not enough:
                answer = await client.complete(prompt, max_tokens=40, temperature=1.0, seed=5)
                answers[prompt].add(answer.text)
                finished.append(answer.finished.finish_reason)

    with trio.fail_after(PATIENCE_S):
        url = await serving.listen()
        await until_ready(url, 3)
        async with trio.open_nursery() as nursery:
            for prompt in _PROMPTS:
                nursery.start_soon(ask, prompt)
            serving.process.send_signal(signal.SIGHUP)
            await until(lambda: "there are 3 replicas" in serving.logged())
            for number, name in enumerate(["replica-1", "replica-2", "replica-3"], 4):
                assert f"{name} is replaced by replica-{number}" in serving.logged()
            serving.process.send_signal(signal.SIGTTIN)
            await until_ready(url, 4)
            served = len(finished)
            await until(lambda: len(finished) > served + 20)
            serving.process.send_signal(signal.SIGTTOU)
            await until_ready(url, 3)
            enough = True
        serving.process.send_signal(signal.SIGTERM)
        await until(lambda: serving.process.poll() is not None)
        assert serving.process.returncode == 0
        await until(lambda: serving.processes() == [])
    assert set(finished) == {"length"}
    assert {len(texts) for texts in answers.values()} == {1}
    assert len(set.union(*answers.values())) == len(_PROMPTS)
    assert "Traceback" not in serving.logged()


async def test_what_lies_in_the_working_directory_does_not_run(
    serve: Callable[..., Serving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "planted"
    folder.mkdir()
    for name in ("json", "trio", "msgpack", "wsbatch", "prometheus_client"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    serving = serve("--model", "simulated", "--replicas", "1", "--replica-cpus", "0.25", "--drain-s", "1")
    with trio.fail_after(PATIENCE_S):
        async with connect(await serving.listen()) as client:
            assert (await client.complete("x", max_tokens=2)).finished.finish_reason == "length"
        serving.process.send_signal(signal.SIGTERM)
        await until(lambda: serving.process.poll() is not None)
    assert not mark.exists()
