"""How a server ends, in virtual time: drained, shut down, cancelled, with a dead or a hanging engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
from wsproto.events import AcceptConnection, Request

from wsbatch.config import ServerConfig
from wsbatch.errors import EngineDead
from wsbatch.messages import Accepted, DrainingNotice, Failed, Finished, GenerateRequest, Hello, SamplingParams, Tokens
from wsbatch.server.serve import Server
from wsbatch.testing import BareClient, Closed, MemoryListener, Rejected, ScriptedEngine


class Fixture:
    """A server on an in-memory listener, whose engine makes a token a second."""

    def __init__(self, engine: ScriptedEngine, **settings: Any) -> None:
        self.engine = engine
        self.listener = MemoryListener(capacity_bytes=4096)
        self.server = Server(engine, ServerConfig(**settings), addresses=[("127.0.0.1", 1)])
        self.ended_at: float | None = None
        self.error: BaseException | None = None

    async def run(self, *, task_status: trio.TaskStatus[Server]) -> None:
        try:
            await self.server.run([self.listener], task_status=task_status)
        except EngineDead as error:
            self.error = error
        finally:
            self.ended_at = trio.current_time()

    async def connect(self) -> BareClient:
        client = BareClient(await self.listener.connect())
        await client.open()
        assert isinstance(await client.receive(), Hello)
        return client

    async def generate(self, client: BareClient, id: int = 1, max_tokens: int = 5) -> None:
        await client.send(GenerateRequest(id=id, prompt="x", sampling=SamplingParams(max_tokens=max_tokens)))
        while not isinstance(await client.receive(), Accepted):
            pass

    async def http(self, path: str) -> tuple[int, bytes]:
        stream = await self.listener.connect()
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        answer = b""
        while data := await stream.receive_some():
            answer += data
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Fixture]:
    fixture = Fixture(ScriptedEngine(), **settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(fixture.run)
        nursery.start_soon(lambda: fixture.engine.play(interval_s=1.0))
        yield fixture
        nursery.cancel_scope.cancel()


async def rest(client: BareClient) -> list[Any]:
    """All frames to the end of the connection, and at last how it closed."""
    frames: list[Any] = []
    try:
        while True:
            frames.append(await client.receive())
    except Closed as closed:
        frames.append(closed)
    # A client's manners: answer the close frame, which the server waits for.
    with suppress(Exception):
        await client.close(1000)
    return frames


async def test_live_requests_finish_and_everybody_is_closed_with_1001(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving(drain_s=30.0) as fixture:
        busy, idle = await fixture.connect(), await fixture.connect()
        await fixture.generate(busy, max_tokens=5)
        started_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fixture.server.drain)
            frames = await rest(busy)
            idle_frames = await rest(idle)
        kinds = [type(frame) for frame in frames]
        assert kinds.count(DrainingNotice) == 1
        assert frames[-1].code == 1001
        assert frames[-2].finish_reason == "length"
        assert sum(len(frame.token_ids) for frame in frames if isinstance(frame, Tokens)) == 5
        assert [type(frame) for frame in idle_frames] == [DrainingNotice, Closed]
        assert idle_frames[-1].code == 1001
        assert trio.current_time() - started_at < 7
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.ended_at is not None


async def test_what_is_live_at_the_deadline_ends_with_shutdown(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(drain_s=10.0) as fixture:
        clients = [await fixture.connect() for _ in range(20)]
        for client in clients:
            await fixture.generate(client, max_tokens=1000)
        results: list[list[Any]] = []

        async def collect(client: BareClient) -> None:
            results.append(await rest(client))

        started_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(collect, client)
            await fixture.server.drain()
        assert fixture.ended_at is not None
        # Of ten seconds three and a half are left for the goodbyes, which these clients answer at once.
        assert fixture.ended_at - started_at == pytest.approx(6.5, abs=0.1)
        assert len(results) == 20
        for frames in results:
            assert frames[-2].finish_reason == "shutdown"
            assert frames[-1].code == 1001
            (notice,) = [frame for frame in frames if isinstance(frame, DrainingNotice)]
            assert notice.deadline_ms == 6500


@pytest.mark.parametrize("drain_s", [0.0, 0.5, 2.0, 10.0, 60.0])
async def test_the_drain_is_over_within_its_grace(autojump_clock: trio.testing.MockClock, drain_s: float) -> None:
    """Whatever the clients do: one reads nothing, one never answers the close frame, one does all as it should."""
    patient = {"send_timeout_s": 600.0, "ping_interval_s": 600.0}
    async with serving(drain_s=drain_s, close_timeout_s=3.0, **patient) as fixture:
        deaf, mute, polite = [await fixture.connect() for _ in range(3)]
        await fixture.generate(deaf, max_tokens=100_000)
        for _ in range(200):  # fills the pipe
            fixture.engine.push(fixture.engine.live[0], "x" * 100)
            await trio.sleep(0.01)
        await fixture.generate(mute, max_tokens=100_000)
        await fixture.generate(polite, max_tokens=100_000)
        frames: list[Any] = []

        async def collect() -> None:
            frames.extend(await rest(polite))

        started_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            await fixture.server.drain()
            assert trio.current_time() - started_at <= max(drain_s, 0.5)
        assert fixture.ended_at is not None
        assert frames[-2].finish_reason == "shutdown"
        assert frames[-1].code == 1001


async def test_new_work_is_refused_while_draining(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(drain_s=30.0) as fixture:
        client = await fixture.connect()
        await fixture.generate(client, max_tokens=10)
        assert await fixture.http("/readyz") == (200, b"ready\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fixture.server.drain)
            await trio.sleep(2)
            status, body = await fixture.http("/readyz")
            assert status == 503
            assert b'"draining"' in body
            assert (await fixture.http("/livez"))[0] == 200
            with pytest.raises(Rejected) as rejected:
                await BareClient(await fixture.listener.connect()).open()
            assert rejected.value.status == 503
            assert rejected.value.headers["retry-after"] == "1"
            assert b'"draining"' in rejected.value.body
            await client.send(GenerateRequest(id=2, prompt="x"))
            frames = await rest(client)
            assert [(frame.id, frame.code) for frame in frames if isinstance(frame, Failed)] == [(2, "draining")]
            assert [frame.id for frame in frames if isinstance(frame, Finished)] == [1]


async def test_a_request_that_crosses_the_notice_is_refused_and_not_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving() as fixture:
        client = await fixture.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fixture.server.drain)
            await trio.sleep(0.2)
            await client.send(GenerateRequest(id=1, prompt="x"))
            kinds = [type(frame) for frame in await rest(client)]
            assert kinds == [DrainingNotice, Failed, Closed]
        assert trio.current_time() <= 0.6


async def test_a_second_drain_is_the_same_drain(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(drain_s=10.0) as fixture:
        await fixture.generate(await fixture.connect(), max_tokens=1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fixture.server.drain)
            await trio.sleep(5)
            with trio.move_on_after(1):  # nor does a waiter that is cancelled stop it
                await fixture.server.drain(100.0)
            await fixture.server.drain()
        assert fixture.ended_at is not None
        assert fixture.ended_at <= 10


async def test_shutdown_ends_at_once_and_says_so(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as fixture:
        client = await fixture.connect()
        await fixture.generate(client, max_tokens=1000)
        stopped_at = trio.current_time()
        fixture.server.shutdown()
        frames = await rest(client)
        assert [type(frame) for frame in frames[-2:]] == [Finished, Closed]
        assert (frames[-2].finish_reason, frames[-1].code) == ("cancelled", 1001)
        await trio.sleep(1)
        assert fixture.ended_at is not None
        assert fixture.ended_at - stopped_at <= 0.5


async def test_shutdown_cuts_a_drain_short(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(drain_s=600.0) as fixture:
        await fixture.generate(await fixture.connect(), max_tokens=100_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fixture.server.drain)
            await trio.sleep(5)
            fixture.server.shutdown()
        assert fixture.ended_at is not None
        assert fixture.ended_at <= 7


async def test_a_cancelled_server_says_1001_and_is_gone_within_half_a_second(
    autojump_clock: trio.testing.MockClock,
) -> None:
    fixture = Fixture(ScriptedEngine())
    async with trio.open_nursery() as nursery:
        await nursery.start(fixture.run)
        reading, silent = await fixture.connect(), await fixture.connect()
        await fixture.generate(reading)
        await fixture.generate(silent)
        cancelled_at = trio.current_time()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            frames = await rest(reading)
    assert frames[-1].code == 1001
    assert fixture.ended_at is not None
    assert fixture.ended_at - cancelled_at == pytest.approx(0.5)
    assert fixture.engine.live == []


async def test_a_dead_engine_ends_the_server_honestly(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as fixture:
        client = await fixture.connect()
        await fixture.generate(client)
        fixture.engine.die("step 12 made no progress")
        frames = await rest(client)
        assert [(frame.id, frame.code) for frame in frames if isinstance(frame, Failed)] == [(1, "engine_dead")]
        assert frames[-1].code == 1011
        await trio.sleep(4)
        assert isinstance(fixture.error, EngineDead)
        assert "step 12" in str(fixture.error)


async def test_probes_tell_of_a_dead_engine(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as fixture:
        await fixture.connect()  # does not answer the close frame: the server waits for it a while
        fixture.engine.die()
        assert (await fixture.http("/livez"))[0] == 503
        status, body = await fixture.http("/readyz")
        assert status == 503
        assert b"engine_dead" in body


@pytest.mark.parametrize("held_s", [0.1, 1.0])
async def test_a_slow_loop_takes_nobodys_last_word(autojump_clock: trio.testing.MockClock, held_s: float) -> None:
    """Each turn of the loop takes long because of other things: the drain takes longer, and loses nothing."""
    async with serving(drain_s=4.0, ping_interval_s=600.0) as fixture:  # these clients answer no pings
        clients = [await fixture.connect() for _ in range(5)]
        for client in clients:
            for id in range(20):
                await fixture.generate(client, id=id, max_tokens=100_000)
        results: list[list[Any]] = []

        async def collect(client: BareClient) -> None:
            results.append(await rest(client))

        async def hold() -> None:
            while True:
                autojump_clock.jump(held_s)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            async with trio.open_nursery() as reading:
                for client in clients:
                    reading.start_soon(collect, client)
                await fixture.server.drain()
            nursery.cancel_scope.cancel()
        assert len(results) == 5
        for frames in results:
            ended = {frame.id for frame in frames if isinstance(frame, Finished)}
            assert ended == set(range(20))
            assert frames[-1].code == 1001


class HangingEngine(ScriptedEngine):
    """Its drain never returns, as with a step that hangs and a stall limit far away."""

    async def drain(self, grace_s: float) -> None:
        self.state = "draining"
        await trio.sleep_forever()


async def test_a_hanging_engine_does_not_hold_the_drain(autojump_clock: trio.testing.MockClock) -> None:
    fixture = Fixture(HangingEngine(), drain_s=10.0, close_timeout_s=3.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(fixture.run)
        client = await fixture.connect()
        await fixture.generate(client)
        started_at = trio.current_time()
        await fixture.server.drain()
        assert trio.current_time() - started_at <= 10.0
    frames = await rest(client)
    assert frames[-1].code == 1001
    assert frames[-2].finish_reason == "cancelled"


async def test_a_connection_that_opens_while_the_server_stops_is_told(autojump_clock: trio.testing.MockClock) -> None:
    fixture = Fixture(ScriptedEngine(), drain_s=10.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(fixture.run)
        other = await fixture.connect()
        await fixture.generate(other)
        # Its pipe is so narrow that the answer to its handshake is held up in the middle.
        client = BareClient(await fixture.listener.connect(capacity_bytes=64))
        await client.send_event(Request(host="test", target="/"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(fixture.server.drain)
        await trio.sleep(1)
        assert isinstance(await client.next_event(), AcceptConnection)
        assert isinstance(await client.receive(), Hello)
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert closed.value.code == 1001
        assert trio.current_time() < 2
        fixture.server.shutdown()
