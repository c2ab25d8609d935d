"""clients/asyncio_client.py, the program as a user runs it, and its class in an event loop of its own."""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgpack
import pytest
import trio
from websockets.asyncio.server import ServerConnection, serve

from wsbatch.config import ServerConfig
from wsbatch.engine.stream import Stream
from wsbatch.errors import QueueFull
from wsbatch.messages import GenerateRequest
from wsbatch.testing import ScriptedEngine, serving

T = TypeVar("T")
PROGRAM = Path(__file__).parents[2] / "clients" / "asyncio_client.py"


async def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    with trio.fail_after(60):
        return await trio.run_process(
            [sys.executable, "-P", str(PROGRAM), *arguments], capture_stdout=True, capture_stderr=True, check=False
        )


@pytest.fixture
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("asyncio_client", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def in_asyncio(act: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await act()

    return await trio.to_thread.run_sync(asyncio.run, bounded())


async def test_one_prompt_streams_and_several_come_each_whole() -> None:
    async with serving(ServerConfig(port=0, auth_token="s3cret")) as served:
        url = served.server.url
        one = await run(url, "hi", "--max-tokens", "4", "--token", "s3cret")
        assert (one.returncode, one.stdout, one.stderr) == (0, b"abcd\n", b"")
        two = await run(url, "first", "second", "--chat", "--max-tokens", "3", "--token", "s3cret")
        assert (two.returncode, two.stderr) == (0, b"")
        assert sorted(two.stdout.decode().split("--- ")[1:]) == ["first\nabc\n", "second\nabc\n"]


async def test_what_goes_wrong_is_one_line() -> None:
    async with serving(ServerConfig(port=0, auth_token="s3cret")) as served:
        refused = await run(served.server.url, "hi")
        assert (refused.returncode, refused.stdout) == (1, b"")
        assert b"cannot connect" in refused.stderr
        assert b"401" in refused.stderr
        bad = await run(served.server.url, "hi", "--temperature", "-1", "--token", "s3cret")
        assert bad.returncode == 1
        assert bad.stderr.startswith(b"asyncio_client.py: bad_request: temperature")
    gone = await run(served.server.url, "hi")
    assert gone.returncode == 1
    assert b"cannot connect" in gone.stderr


class BusyEngine(ScriptedEngine):
    """Refuses the first requests, and says when to try again."""

    refusals = 2

    async def submit(self, request: GenerateRequest, **options: Any) -> Stream:
        if self.refusals:
            self.refusals -= 1
            raise QueueFull("full", retry_after_ms=1)
        return await super().submit(request, **options)


async def test_a_full_queue_is_waited_for() -> None:
    async with serving(ServerConfig(port=0), engine=BusyEngine()) as served:
        done = await run(served.server.url, "hi", "--max-tokens", "2")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"ab\n", b"")


async def test_leaving_a_generation_cancels_it(program: ModuleType) -> None:
    async with serving(ServerConfig(port=0), interval_s=0.001) as served:

        async def act() -> list[str]:
            async with program.Client(served.server.url) as client:
                async with aclosing(client.generate(prompt="hi", max_tokens=100_000)) as events:
                    async for event in events:
                        if event["type"] == "tokens":
                            break
                return [event["type"] async for event in client.generate(prompt="x", max_tokens=1)]

        kinds = await in_asyncio(act)
        assert (kinds[0], kinds[-1]) == ("accepted", "finished")
        assert served.engine.live == []


async def test_the_end_of_the_connection_ends_what_is_live(program: ModuleType) -> None:
    async with serving(ServerConfig(port=0), interval_s=0.001) as served:
        token = trio.lowlevel.current_trio_token()

        async def act() -> list[str]:
            ends: list[str] = []
            async with program.Client(served.server.url) as client:
                for _ in range(2):
                    try:
                        async for event in client.generate(prompt="hi", max_tokens=100_000):
                            if event["type"] == "tokens":
                                token.run_sync_soon(served.server.shutdown, idempotent=True)
                        ends.append(event["finish_reason"])
                    except program.ServerError as error:
                        ends.append(error.code)
            return ends

        first, second = await in_asyncio(act)
        assert first in ("cancelled", "connection_lost")  # the server may still say so before it goes
        assert second == "connection_lost"


HELLO = msgpack.packb({"type": "hello", "version": 1})
UNREADABLE = [
    b"\xc1",  # not msgpack
    b"\x82\xa4type\xa6tokens",  # cut short
    json.dumps({"type": "accepted", "id": 1}),  # text where binary is spoken
    *map(
        msgpack.packb,
        (
            [],
            {},
            {"type": 5},
            {"type": ["tokens"], "id": 1},
            {"type": "tokens", "id": [1], "index": 0, "token_ids": [], "text": ""},
            {"type": "tokens", "id": 1, "index": 0, "token_ids": []},
            {"type": "finished", "id": 1, "text": ""},
            {"type": "error", "id": 1, "code": "queue_full"},
        ),
    ),
]


async def against(messages: list[bytes | str], act: Callable[[str], Awaitable[T]]) -> T:
    """Act on the address of a server that sends the first message at once, the others when it is asked something."""

    async def answer(socket: ServerConnection) -> None:
        await socket.send(messages[0])
        async for _ in socket:
            for message in messages[1:]:
                await socket.send(message)

    async with serve(answer, "127.0.0.1", 0, subprotocols=["wsbatch.v1.msgpack"]) as server:
        host, port = next(iter(server.sockets)).getsockname()
        return await act(f"ws://{host}:{port}")


@pytest.mark.parametrize("bad", UNREADABLE, ids=range(len(UNREADABLE)))
async def test_an_unreadable_frame_ends_every_request(program: ModuleType, bad: bytes | str) -> None:
    async def ask(client: Any) -> str:
        try:
            async for _ in client.generate(prompt="hi"):
                pass
        except program.ServerError as error:
            code: str = error.code
            return code
        return "finished"

    async def act(url: str) -> list[str]:
        async with program.Client(url) as client:
            both = await asyncio.gather(ask(client), ask(client))
            return [*both, await ask(client)]

    assert await in_asyncio(lambda: against([HELLO, bad], act)) == ["protocol_error"] * 3

    async def greet(url: str) -> str:
        with pytest.raises(program.ServerError) as caught:
            async with program.Client(url):
                pass
        code: str = caught.value.code
        return code

    assert await in_asyncio(lambda: against([bad], greet)) == "protocol_error"


async def test_a_refusal_instead_of_the_hello_is_told(program: ModuleType) -> None:
    refusal = msgpack.packb({"type": "error", "code": "queue_full", "message": "full", "retry_after_ms": 5})

    async def act(url: str) -> int | None:
        with pytest.raises(program.ServerError, match="queue_full: full") as caught:
            async with program.Client(url):
                pass
        retry_after_ms: int | None = caught.value.retry_after_ms
        return retry_after_ms

    assert await in_asyncio(lambda: against([refusal], act)) == 5


@pytest.mark.parametrize("reason", ["stop", "length", "shutdown", "timeout", "cancelled"])
async def test_an_answer_that_the_server_cuts_short_is_a_failure(
    program: ModuleType, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = msgpack.packb({"type": "finished", "id": 1, "finish_reason": reason, "text": "all"})
    options = argparse.Namespace(chat=False, max_tokens=9, temperature=0.0)

    async def act(url: str) -> str:
        async with program.Client(url) as client:
            try:
                await program.ask(client, "hi", options, stream=True)
            except program.ServerError as error:
                code: str = error.code
                return code
        return "done"

    assert await in_asyncio(lambda: against([HELLO, finished], act)) == (
        "done" if reason in ("stop", "length") else reason
    )
    assert capsys.readouterr().out.startswith("all")
