"""What tokenizing costs decides where it is done."""

import threading

import pytest
import trio

from wsbatch.batching.fairness import NOBODY, Client
from wsbatch.engine.tokenization import PromptTokenizer, Run, in_thread
from wsbatch.errors import TooLarge
from wsbatch.messages import ChatMessage, GenerateRequest
from wsbatch.text import ByteText


def elsewhere(calls: list[str]) -> Run:
    async def run(function: object, own: trio.CapacityLimiter) -> list[int]:
        calls.append("elsewhere")
        return [1]

    return run


def conversation(count: int) -> GenerateRequest:
    return GenerateRequest(messages=(ChatMessage("user", ""),) * count)


@pytest.mark.parametrize(
    ("request_", "away"),
    [
        (GenerateRequest(prompt="x" * 2048), False),
        (GenerateRequest(prompt="x" * 2049), True),
        (GenerateRequest(prompt="é" * 1025), True),
        (conversation(16), False),
        (conversation(1024), True),
        (GenerateRequest(token_ids=(1,) * 100_000), False),
    ],
)
async def test_what_takes_long_is_done_off_the_event_loop(request_: GenerateRequest, away: bool) -> None:
    calls: list[str] = []
    await PromptTokenizer(ByteText(), 100_000, run=elsewhere(calls))(request_, NOBODY)
    assert calls == ["elsewhere"] * away


@pytest.mark.parametrize("letter", ["x", "é"])
async def test_a_text_that_cannot_fit_is_refused_by_its_size(letter: str) -> None:
    calls: list[str] = []
    with pytest.raises(TooLarge, match="100"):
        await PromptTokenizer(ByteText(), 100, run=elsewhere(calls))(GenerateRequest(prompt=letter * 99 + "xx"), NOBODY)
    assert calls == []


async def test_a_client_has_one_thread_until_it_is_done_and_keeps_nobody_else_waiting() -> None:
    """Real threads, which are told when to end: the second text of a client waits, also for one that was abandoned."""
    release, running, ended = threading.Event(), [], []
    token = trio.lowlevel.current_trio_token()
    changed = trio.Event()

    def hold(name: str) -> list[int]:
        def begin() -> None:
            running.append(name)
            changed.set()

        token.run_sync_soon(begin)
        release.wait()
        return [1]

    owns = {client: trio.CapacityLimiter(1) for client in "ab"}

    async def ask(name: str, scope: trio.CancelScope) -> None:
        with scope:
            await in_thread(lambda: hold(name), owns[name[0]])
        ended.append(name)

    async def until(count: int) -> None:
        nonlocal changed
        while len(running) < count:
            await changed.wait()
            changed = trio.Event()

    async with trio.open_nursery() as nursery:
        try:
            abandoned = trio.CancelScope()
            nursery.start_soon(ask, "a1", abandoned)
            await until(1)
            nursery.start_soon(ask, "a2", trio.CancelScope())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "b1", trio.CancelScope())
            await until(2)
            assert running == ["a1", "b1"]
            abandoned.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert ended == ["a1"]
            assert running == ["a1", "b1"]
        finally:
            release.set()
    assert running == ["a1", "b1", "a2"]


async def test_of_each_client_the_texts_share_one_limiter() -> None:
    seen: list[trio.CapacityLimiter] = []

    async def run(function: object, own: trio.CapacityLimiter) -> list[int]:
        seen.append(own)
        return [1]

    tokenize = PromptTokenizer(ByteText(), 100_000, run=run)
    long = GenerateRequest(prompt="x" * 3000)
    one, other = Client("peer", 1), Client("peer", 2)
    for client in (one, one, other):
        await tokenize(long, client)
    assert [limiter.total_tokens for limiter in seen] == [1, 1, 1]
    assert seen[0] is seen[1]
    assert seen[1] is not seen[2]
