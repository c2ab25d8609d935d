"""SIGTERM under full load: every accepted request gets its tokens, or an honest `shutdown`; and the process ends."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio

from wsbatch.client import connect
from wsbatch.errors import Draining

LIVE, QUEUED, CONNECTIONS = 64, 32, 8
FLAGS = ("--scheduler", "continuous", "--max-batch-size", str(LIVE), "--max-live-requests", "64")


async def drain_under_load(server: Any, max_tokens: int) -> Counter[str]:
    """Send SIGTERM when all slots are taken and the queue is filled; what became of the requests."""
    ends = Counter[str]()
    accepted = 0
    all_accepted, terminated = trio.Event(), trio.Event()

    async def ask(client: Any, tokens: int) -> None:
        nonlocal accepted
        got = 0
        async with client.generate("Hello", max_tokens=tokens) as stream:
            await anext(stream)
            accepted += 1
            if accepted == LIVE + QUEUED:
                all_accepted.set()
            async for event in stream:
                got += len(getattr(event, "token_ids", None) or ())
        assert event.usage.completion_tokens == got
        assert got == tokens or event.finish_reason == "shutdown"
        ends[event.finish_reason] += 1

    async def connection(requests: int) -> None:
        async with connect(server.url) as client, trio.open_nursery() as asking:
            for index in range(requests):
                asking.start_soon(ask, client, max_tokens + index)
            await all_accepted.wait()
            if not terminated.is_set():  # a second signal would end it at once
                terminated.set()
                server.terminate()
            with trio.fail_after(30):
                while client.draining is None:  # noqa: ASYNC110
                    await trio.sleep(0.005)
            with pytest.raises(Draining):
                await client.complete("too late", max_tokens=1)
            ends["refused"] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(CONNECTIONS):
            nursery.start_soon(connection, (LIVE + QUEUED) // CONNECTIONS)
    return ends


async def test_what_is_live_and_what_waits_gets_all_its_tokens(serve_process: Callable[..., Any]) -> None:
    server = serve_process(*FLAGS, "--drain-s", "60", model="simulated:tau_ms=10,alpha_ms=0,beta_ms=0")
    ends = await drain_under_load(server, 100)
    assert ends == {"length": LIVE + QUEUED, "refused": CONNECTIONS}
    assert server.end()[0] == 0


async def test_what_does_not_end_within_the_grace_is_told_so(serve_process: Callable[..., Any]) -> None:
    server = serve_process(*FLAGS, "--drain-s", "1.5", model="simulated:tau_ms=20,alpha_ms=0,beta_ms=0")
    ends = await drain_under_load(server, 2000)
    assert ends == {"shutdown": LIVE + QUEUED, "refused": CONNECTIONS}
    assert server.end()[0] == 0
