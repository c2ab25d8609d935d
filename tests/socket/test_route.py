"""`wsbatch route` over servers in processes of their own, one of which is killed under load."""

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import trio

from wsbatch.client import Client, Completion, connect
from wsbatch.errors import QueueFull

PATIENCE_S = 60


@pytest.fixture
def route() -> Iterator[Callable[..., str]]:
    """Starts routers over these addresses; their own."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "wsbatch", "route", "--port", "0", *arguments]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        found = re.fullmatch(r"listening on (ws://127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert found is not None, process.communicate(timeout=PATIENCE_S)
        return found[1]

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert "Traceback" not in err


async def metrics(url: str) -> str:
    def get() -> bytes:
        with urllib.request.urlopen(url.replace("ws", "http", 1) + "/metrics", timeout=PATIENCE_S) as answer:
            body: bytes = answer.read()
            return body

    return (await trio.to_thread.run_sync(get)).decode()


async def ask_all(client: Client, count: int) -> list[Completion]:
    answers: list[Any] = [None] * count

    async def ask(index: int) -> None:
        answers[index] = await client.complete(
            f"request {index}", max_tokens=60, temperature=index % 2, seed=index, stream=index % 3 > 0
        )

    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(ask, index)
    return answers


async def test_a_replica_killed_under_load_loses_and_changes_nothing(
    serve_process: Callable[..., Any], route: Callable[..., str]
) -> None:
    servers = [
        serve_process("--scheduler", "continuous", "--max-batch-size", "8", model="simulated:tau_ms=10")
        for _ in range(3)
    ]
    url = route(*(server.url for server in servers))
    async with connect(url) as client:
        assert (client.hello.model, client.hello.revision) == ("simulated", "simulated-1")
        undisturbed = await ask_all(client, 60)

        async def kill() -> None:
            async with client.generate("the first", max_tokens=30) as stream:
                async for _ in stream:  # by then all the others are on their way
                    pass
            servers[0].process.kill()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            disturbed = await ask_all(client, 60)
        assert servers[0].process.poll() is not None or servers[0].end()
        assert [(answer.text, answer.token_ids, answer.finished.finish_reason) for answer in disturbed] == [
            (answer.text, answer.token_ids, answer.finished.finish_reason) for answer in undisturbed
        ]
        resumed = re.search(r"^wsbatch_requests_resumed_total (\S+)$", await metrics(url), re.MULTILINE)
        assert resumed is not None
        assert float(resumed[1]) > 0
        for server in servers[1:]:
            server.process.kill()
            server.end()
        while "\nwsbatch_replicas_ready 0.0\n" not in await metrics(url):  # noqa: ASYNC110
            await trio.sleep(0.01)
        with pytest.raises(QueueFull, match="no replica is there"):
            await client.complete("too late", max_tokens=1)


def test_a_router_without_replicas_says_so() -> None:
    command = [sys.executable, "-P", "-m", "wsbatch", "route", "--first-replica-s", "0.5", "ws://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "wsbatch route: none of ws://127.0.0.1:9 was ready within 0.5 s"
