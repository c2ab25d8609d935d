"""The transport against slow, silent, dead and hostile clients, in virtual time and in memory."""

import errno
import gc
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
import wsproto.connection
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage

from schedule import seed_schedule
from wsbatch.config import ServerConfig
from wsbatch.errors import QueueFull, RequestError
from wsbatch.messages import GenerateRequest, Hello, Watch
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Connection, Disconnected, Received
from wsbatch.server.http import Answer
from wsbatch.server.memory import FreedMemory
from wsbatch.server.metrics import ServerMetrics
from wsbatch.server.serve import Server
from wsbatch.server.session import Session
from wsbatch.server.transport import Transport
from wsbatch.server.websocket import WebSocket
from wsbatch.testing import BareClient, Closed, MemoryListener, MemoryStream, Rejected, ScriptedEngine
from wsbatch.wire import MsgpackCodec

Clock = trio.testing.MockClock
Serve = Callable[[Connection], Awaitable[None]]

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


async def echo(connection: Connection) -> None:
    with suppress(Disconnected):
        while True:
            await connection.send((await connection.receive()).data)


class Fixture:
    """A transport over an in-memory listener. `tasks` counts connections not yet over."""

    def __init__(self, session: Serve, settings: dict[str, Any], capacity_bytes: int) -> None:
        self.metrics = ServerMetrics()
        self.refusal: RequestError | None = None
        self.deadlines = ClientDeadlines()
        self.listener = MemoryListener(capacity_bytes)
        self.probes = MemoryListener(capacity_bytes)
        self.transport = Transport(
            ServerConfig(**settings),
            session=session,
            plain=lambda head: Answer(200, b"plain " + head.path.encode()),
            probe=lambda head: Answer(200, b"probe " + head.path.encode()),
            refusal=lambda: self.refusal or self.transport.full(),
            metrics=self.metrics,
            memory=FreedMemory(),
            deadlines=self.deadlines,
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self.transport.handle, [self.transport.accepting(self.listener)])
            nursery.start_soon(trio.serve_listeners, self.transport.handle_probe, [self.probes])

    async def open(self) -> BareClient:
        client = BareClient(await self.listener.connect())
        await client.open()
        return client

    @property
    def open_connections(self) -> int:
        return int(repr(self.transport).split()[1])

    @property
    def websockets(self) -> int:
        return int(repr(self.transport).split()[3])

    @property
    def held_bytes(self) -> int:
        return self.transport.budget.used_bytes

    def refused(self, code: str) -> float:
        return self.metrics.registry.get_sample_value("wsbatch_requests_refused_total", {"code": code}) or 0.0


@asynccontextmanager
async def transport(session: Serve = echo, capacity_bytes: int = 65_536, **settings: Any) -> AsyncIterator[Fixture]:
    fixture = Fixture(session, settings, capacity_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fixture.run)
        yield fixture
        nursery.cancel_scope.cancel()


def suspend(clock: Clock, deadlines: ClientDeadlines, seconds: float) -> None:
    """What a server sees that was stopped and goes on, before it acts on any deadline."""
    clock.jump(seconds)
    deadlines.put_off(seconds)


async def read_all(stream: MemoryStream) -> bytes:
    data = b""
    with suppress(trio.BrokenResourceError):
        while part := await stream.receive_some():
            data += part
    return data


async def until_closed(client: BareClient) -> None:
    while True:
        await client.receive()


async def ask(fixture: Fixture, request: bytes) -> bytes:
    stream = await fixture.listener.connect()
    await stream.send_all(request)
    return await read_all(stream)


async def test_a_websocket_echoes(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        client = await fixture.open()
        await client.send_event(BytesMessage(data=b"hello"))
        event = await client.next_event()
        assert event.data == b"hello"


async def test_a_message_in_pieces_is_one_message(autojump_clock: Clock) -> None:
    async def session(connection: Connection) -> None:
        for piece in ("a", "ä", "b"):
            await connection.send(piece, last=False)
        await connection.receive()  # a ping is answered in between
        await connection.send("", last=True)
        await connection.send(b"next")

    async with transport(session) as fixture:
        client = await fixture.open()
        await client.send_event(Ping(payload=b"x"))
        await client.send_event(BytesMessage(data=b"go on"))
        events = [await client.next_event() for _ in range(6)]
        texts = [event for event in events if isinstance(event, TextMessage)]
        assert "".join(event.data for event in texts) == "aäb"
        assert [event.message_finished for event in texts] == [False, False, False, True]
        assert {type(event) for event in events} == {TextMessage, Pong, BytesMessage}
        assert type(events[-1]) is BytesMessage


async def test_plain_http_is_answered_and_leaves_no_task(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        stream = await fixture.listener.connect()
        await stream.send_all(b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n")
        assert (await read_all(stream)).endswith(b"\r\n\r\nplain /livez")
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 0
        assert trio.current_time() == 0


async def test_a_refused_client_that_stays_is_dropped(autojump_clock: Clock) -> None:
    async with transport(close_timeout_s=3.0) as fixture:
        stream = await fixture.listener.connect()
        await stream.send_all(b"nonsense\r\n\r\n")
        assert (await read_all(stream)).startswith(b"HTTP/1.1 400 ")
        await trio.sleep(3.1)
        assert fixture.open_connections == 0


@pytest.mark.parametrize("part", [b"", b"GET / HT", UPGRADE[:-2]], ids=["silent", "request line", "all but the end"])
async def test_a_head_must_be_complete_in_time(autojump_clock: Clock, part: bytes) -> None:
    async with transport(head_timeout_s=10.0) as fixture:
        stream = await fixture.listener.connect()
        await stream.send_all(part)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 408 ")
        assert trio.current_time() == pytest.approx(10.0)


async def test_a_head_that_trickles_gets_no_more_time(autojump_clock: Clock) -> None:
    async with transport(head_timeout_s=10.0) as fixture:
        stream = await fixture.listener.connect()

        async def trickle() -> None:
            with suppress(trio.BrokenResourceError):
                for byte in UPGRADE:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            assert (await read_all(stream)).startswith(b"HTTP/1.1 408 ")
            assert trio.current_time() == pytest.approx(10.0)
            nursery.cancel_scope.cancel()


async def test_a_head_is_bounded_in_size(autojump_clock: Clock) -> None:
    async with transport(max_head_bytes=1024) as fixture:
        padding = b"X-Padding: " + b"x" * 1024
        for request in (
            UPGRADE[:-2] + padding + b"\r\n\r\n",
            UPGRADE[:-2] + padding,
            b"GET /" + b"x" * 5000,
            b"x" * 500_000,
        ):
            answer = await ask(fixture, request)
            assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), request[:20]
        assert answer.startswith(b"HTTP/1.1 ")
        assert trio.current_time() == 0


async def test_a_head_may_come_a_byte_at_a_time(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        stream = await fixture.listener.connect()
        for byte in UPGRADE:
            await stream.send_all(bytes([byte]))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 ")


async def test_frames_sent_along_with_the_head_are_not_lost(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        stream = await fixture.listener.connect()
        await stream.send_all(UPGRADE + b"\x82\x83\0\0\0\0abc")
        answer = b""
        while not answer.endswith(b"\x82\x03abc"):
            answer += await stream.receive_some()


async def test_a_session_that_raises_ends_its_connection_only(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def session(connection: Connection) -> None:
        if (await connection.receive()).data == b"poison":
            raise RuntimeError("a bug")
        await echo(connection)

    async with transport(session) as fixture:
        neighbour, client = await fixture.open(), await fixture.open()
        await client.send(b"poison")
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert closed.value.code == 1011
        assert fixture.refused("internal_error") == 1
        assert "a bug" in caplog.text
        assert [record.name for record in caplog.records] == ["wsbatch.transport"]
        await neighbour.send(b"")
        await neighbour.send_event(BytesMessage(data=b"alive"))
        assert (await neighbour.next_event()).data == b"alive"


async def test_an_error_in_the_library_ends_its_connection_only(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = wsproto.connection.Connection.events
    broken: list[bool] = [True]

    def events(self: Any) -> Any:
        if self.client or not broken:
            return original(self)
        broken.pop()
        raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "as a frame might")

    monkeypatch.setattr(wsproto.connection.Connection, "events", events)
    async with transport() as fixture:
        client = await fixture.open()
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert closed.value.code == 1011
        assert "UnicodeDecodeError" in caplog.text
        assert fixture.refused("internal_error") == 1
        client = await fixture.open()
        await client.send_event(BytesMessage(data=b"alive"))
        assert (await client.next_event()).data == b"alive"


HOSTILE_HEADERS = [
    (b"Host: test", b"Host: t\xe9st"),
    (b"Host: test", b"Host: xn--a"),
    (b"Connection: Upgrade", b"Connection: Upgrade, \xff"),
    (b"\r\n\r\n", b"\r\nSec-WebSocket-Protocol: caf\xe9\r\n\r\n"),
    (b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: \x80\r\n\r\n"),
    (b"AAAAAAAAAAAAAAAAAAAAAA==", b"AAAAAAAAAAAAAAAAAAAAA\xe9=="),
    (b"Version: 13", b"Version: 1\xb3"),
    (b"Upgrade: websocket", b"Upgrade: websocket\xff"),
]


@pytest.mark.parametrize(("good", "bad"), HOSTILE_HEADERS, ids=lambda part: part[:40])
async def test_headers_that_would_crash_the_library_are_refused(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture, good: bytes, bad: bytes
) -> None:
    async with transport() as fixture:
        neighbour = await fixture.open()
        assert good in UPGRADE
        answer = await ask(fixture, UPGRADE.replace(good, bad))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert caplog.records == []
        await neighbour.send_event(BytesMessage(data=b"alive"))
        assert (await neighbour.next_event()).data == b"alive"


async def test_what_else_a_head_has_goes_nowhere(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        extra = b'\r\nX-Odd: \xff\xfe\r\nSec-WebSocket-Extensions: permessage-deflate; x="a,b"\r\nCookie: a=1\r\n\r\n'
        stream = await fixture.listener.connect()
        await stream.send_all(UPGRADE.replace(b"GET /", b"GET /any?token=secret").replace(b"\r\n\r\n", extra))
        assert await stream.receive_some() == (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: ICX+Yqv66kxgM0FcWaLWlFLwTAI=\r\n\r\n"
        )


@pytest.mark.parametrize(
    ("good", "bad", "status"),
    [
        (b"GET", b"POST", 405),
        (b"HTTP/1.1", b"HTTP/1.0", 400),
        (b"Host: test\r\n", b"", 400),
        (b"Host: test", b"Host: test\r\nHost: other", 400),
        (b"Connection: Upgrade", b"Connection: close", 400),
        (b"Version: 13", b"Version: 8", 426),
        (b"Upgrade: websocket", b"Upgrade: websocket, h2c", 400),
        (b"AAAAAAAAAAAAAAAAAAAAAA==", b"short", 400),
        (b"AAAAAAAAAAAAAAAAAAAAAA==", b"AAAA", 400),
        (b"\r\n\r\n", b"\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", 400),
        (b"\r\n\r\n", b"\r\nSec-WebSocket-Protocol: chat, superchat\r\n\r\n", 400),
        (b"GET /", b"GET /\xe9", 400),
    ],
    ids=lambda part: str(part)[:40],
)
async def test_handshakes_that_are_none(autojump_clock: Clock, good: bytes, bad: bytes, status: int) -> None:
    async with transport() as fixture:
        answer = await ask(fixture, UPGRADE.replace(good, bad))
        assert answer.startswith(b"HTTP/1.1 %d " % status)


async def test_offers_of_other_protocols_are_ignored(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        answer = await ask(fixture, b"GET /x HTTP/1.1\r\nHost: t\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n")
        assert answer.endswith(b"plain /x")


@pytest.mark.parametrize(
    ("offer", "answer"),
    [
        (b"wsbatch.v1.json", b"wsbatch.v1.json"),
        (b"chat, wsbatch.v1.msgpack", b"wsbatch.v1.msgpack"),
        (b"wsbatch.v1.json, wsbatch.v1.msgpack", b"wsbatch.v1.json"),
        (b"chat\r\nSec-WebSocket-Protocol: wsbatch.v1.json", b"wsbatch.v1.json"),
    ],
)
async def test_a_subprotocol_is_agreed(autojump_clock: Clock, offer: bytes, answer: bytes) -> None:
    agreed: list[str | None] = []

    async def session(connection: Connection) -> None:
        agreed.append(connection.subprotocol)
        await connection.close(1000, "")

    async with transport(session) as fixture:
        head = UPGRADE[:-2] + b"Sec-WebSocket-Protocol: " + offer + b"\r\n\r\n"
        reply = await ask(fixture, head)
        assert b"\r\nsec-websocket-protocol: " + answer in reply.lower()
        assert agreed == [answer.decode()]


@pytest.mark.parametrize(
    ("headers", "target"),
    [
        ({}, "/"),
        ({"Authorization": "Bearer wrong"}, "/"),
        ({"Authorization": "Basic s3cret"}, "/"),
        ({"Authorization": "Bearer s3cret2"}, "/"),
        ({"Authorization": "Bearer s\xe9cret"}, "/"),
        ({}, "/?token="),
        ({}, "/?token=s3cre"),
        ({}, "/?other=s3cret"),
    ],
)
async def test_the_token_is_asked_for(autojump_clock: Clock, headers: dict[str, str], target: str) -> None:
    async with transport(auth_token="s3cret") as fixture:
        with pytest.raises(Rejected) as rejected:
            await BareClient(await fixture.listener.connect()).open(target, headers=headers)
        assert rejected.value.status == 401
        assert b'"unauthorized"' in rejected.value.body
        assert fixture.refused("unauthorized") == 1


def test_an_empty_token_is_refused_as_a_setting() -> None:
    with pytest.raises(ValueError, match="auth_token"):
        ServerConfig(auth_token="")


async def test_the_token_opens_in_header_or_query(autojump_clock: Clock) -> None:
    async with transport(auth_token="s3cret é") as fixture:
        await BareClient(await fixture.listener.connect()).open("/?a=b&token=s3cret%20%C3%A9")
    async with transport(auth_token="s3cret") as fixture:
        await BareClient(await fixture.listener.connect()).open(headers={"Authorization": "bearer s3cret"})


async def test_origins(autojump_clock: Clock) -> None:
    async with transport(allow_origins=("https://app.example", "http://localhost:3000")) as fixture:
        for origin in (None, "https://app.example", "HTTPS://APP.example", "http://localhost:3000"):
            headers = {} if origin is None else {"Origin": origin}
            await BareClient(await fixture.listener.connect()).open(headers=headers)
        for origin in ("https://evil.example", "null", "https://app.example.evil", "\xe9"):
            with pytest.raises(Rejected) as rejected:
                await BareClient(await fixture.listener.connect()).open(headers={"Origin": origin})
            assert rejected.value.status == 403
    async with transport() as fixture:
        await BareClient(await fixture.listener.connect()).open(headers={"Origin": "https://any.example"})


async def test_connections_are_bounded_exactly(autojump_clock: Clock) -> None:
    async with transport(max_connections=3) as fixture:
        refusals: list[Rejected] = []
        clients: list[BareClient] = []

        async def attempt() -> None:
            client = BareClient(await fixture.listener.connect())
            try:
                await client.open()
            except Rejected as rejected:
                refusals.append(rejected)
            else:
                clients.append(client)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(attempt)
        assert len(clients) == 3
        assert [refusal.status for refusal in refusals] == [503, 503, 503]
        assert refusals[0].headers["retry-after"] == "1"
        assert b'"queue_full"' in refusals[0].body
        await clients[0].stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        await fixture.open()


async def test_connections_that_say_nothing_keep_nobody_out(autojump_clock: Clock) -> None:
    async with transport(max_connections=100) as fixture:
        silent = [await fixture.listener.connect() for _ in range(250)]
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 100
        assert await read_all(silent[0]) == b""  # the oldest made room
        assert await read_all(silent[149]) == b""
        assert (await ask(fixture, b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n")).endswith(b"plain /livez")
        client = await fixture.open()
        await client.send_event(BytesMessage(data=b"alive"))
        assert (await client.next_event()).data == b"alive"
        assert trio.current_time() == 0
        assert fixture.refused("queue_full") == 151
        await silent[-1].send_all(b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n")  # it has stayed
        assert (await read_all(silent[-1])).endswith(b"plain /livez")


async def test_probes_have_room_of_their_own(autojump_clock: Clock) -> None:
    async with transport(auth_token="secret") as fixture:
        silent = [await fixture.probes.connect() for _ in range(70)]
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 64
        assert await read_all(silent[5]) == b""
        stream = await fixture.probes.connect()
        await stream.send_all(b"GET /readyz HTTP/1.1\r\nHost: test\r\n\r\n")
        assert (await read_all(stream)).endswith(b"probe /readyz")
        stream = await fixture.probes.connect()
        await stream.send_all(UPGRADE)  # nothing can be upgraded here, and nobody got in without the token
        assert b" 101 " not in await read_all(stream)


async def test_a_full_server_refuses_before_the_upgrade(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        fixture.refusal = QueueFull("256 requests wait, the most allowed", retry_after_ms=2500)
        with pytest.raises(Rejected) as rejected:
            await fixture.open()
        assert rejected.value.status == 503
        assert rejected.value.headers["retry-after"] == "3"
        assert b'"queue_full"' in rejected.value.body
        assert b'"retry_after_ms": 2500' in rejected.value.body
        assert fixture.refused("queue_full") == 1


async def test_a_dead_peer_is_dropped(autojump_clock: Clock) -> None:
    async with transport(ping_interval_s=20.0, ping_timeout_s=15.0) as fixture:
        client = await fixture.open()  # neither reads nor writes from now on
        await trio.sleep(34.9)
        assert fixture.open_connections == 1
        await trio.sleep(0.2)
        assert fixture.open_connections == 0
        with pytest.raises(Closed):
            await client.receive()
        assert client.pings == 1


async def test_a_dead_peer_is_dropped_with_a_full_pipe(autojump_clock: Clock) -> None:
    async def talk(connection: Connection) -> None:
        await connection.send(b"x" * 100_000)

    async with transport(talk, ping_interval_s=20.0, ping_timeout_s=15.0, send_timeout_s=3600.0) as fixture:
        await fixture.open()
        await trio.sleep(35.1)
        assert fixture.open_connections == 0


async def test_a_suspended_server_does_not_take_its_own_absence_for_silence(autojump_clock: Clock) -> None:
    async with transport(ping_interval_s=20.0, ping_timeout_s=15.0) as fixture:
        client = await fixture.open()
        ping = await client.next_event()
        assert isinstance(ping, Ping)
        suspend(autojump_clock, fixture.deadlines, 100.0)
        await trio.sleep(14.0)
        assert fixture.open_connections == 1
        await client.send_event(Pong(payload=ping.payload))
        await trio.sleep(20.0)
        assert fixture.open_connections == 1
        await trio.sleep(20.0)  # but then it is given up as ever
        assert fixture.open_connections == 0


async def test_a_head_has_its_time_also_where_the_server_was_suspended(autojump_clock: Clock) -> None:
    async with transport(head_timeout_s=10.0) as fixture:
        stream = await fixture.listener.connect()
        await stream.send_all(UPGRADE[:20])
        await trio.sleep(1)
        suspend(autojump_clock, fixture.deadlines, 100.0)
        await trio.sleep(8)
        await stream.send_all(UPGRADE[20:])
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 ")


async def test_pongs_are_life(autojump_clock: Clock) -> None:
    async with transport(ping_interval_s=20.0, ping_timeout_s=15.0) as fixture:
        client = await fixture.open()
        with trio.move_on_after(1000):
            while True:
                event = await client.next_event()
                assert isinstance(event, Ping)
                await client.send_event(Pong(payload=event.payload))
        assert fixture.open_connections == 1


async def test_any_traffic_is_life_also_without_pongs(autojump_clock: Clock) -> None:
    async with transport(ping_interval_s=20.0, ping_timeout_s=15.0) as fixture:
        client = await fixture.open()
        for _ in range(50):
            await trio.sleep(30)  # longer than the interval: it is pinged, and never answers
            await client.send(b"x")
        assert fixture.open_connections == 1
        await client.stream.send_all(b"\x82\xfe")  # half a frame is life too
        await trio.sleep(30)
        assert fixture.open_connections == 1


async def test_a_busy_client_is_not_pinged(autojump_clock: Clock) -> None:
    async with transport(ping_interval_s=20.0) as fixture:
        client = await fixture.open()
        for _ in range(20):
            await client.send_event(BytesMessage(data=b"x"))
            assert isinstance(await client.next_event(), BytesMessage)
            await trio.sleep(10)


async def test_a_silent_client_does_not_hold_the_close(autojump_clock: Clock) -> None:
    async def session(connection: Connection) -> None:
        await connection.close(1001, "bye")

    async with transport(session, close_timeout_s=3.0) as fixture:
        client = await fixture.open()
        await trio.sleep(2.9)
        assert fixture.open_connections == 1  # the closing handshake is given its time
        await trio.sleep(0.2)
        assert fixture.open_connections == 0
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert closed.value.code == 1001


async def test_a_blocked_writer_does_not_hold_the_close(autojump_clock: Clock) -> None:
    async def session(connection: Connection) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send, b"x" * 100_000)
            await trio.sleep(1)
            await connection.close(1001, "bye")
            nursery.cancel_scope.cancel()

    async with transport(session, close_timeout_s=3.0) as fixture:
        await fixture.open()
        await trio.sleep(4.1)
        assert fixture.open_connections == 0


async def test_nothing_is_written_after_a_write_that_was_cut_short(autojump_clock: Clock) -> None:
    async def session(connection: Connection) -> None:
        with trio.move_on_after(1):
            await connection.send(b"a" * 1000)
        with suppress(Disconnected):
            await connection.send(b"b" * 10)
        await connection.close(1001, "bye")

    async with transport(session, capacity_bytes=400) as fixture:
        stream = await fixture.listener.connect()
        await stream.send_all(UPGRADE)
        await trio.sleep(2)
        received = await read_all(stream)  # reads on: there is room for whatever might be said
        frame = received.partition(b"\r\n\r\n")[2]
        assert frame[:4] == b"\x82\x7e\x03\xe8"
        assert frame[4:] == b"a" * len(frame[4:])


async def talk_and_listen(connection: Connection) -> None:
    """A session that ends as soon as either its sender or its receiver does, and sends all the time."""
    async with trio.open_nursery() as nursery:

        async def until_disconnected(turn: Callable[[], Awaitable[Any]]) -> None:
            with suppress(Disconnected):
                while True:
                    await turn()
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_disconnected, connection.receive)
        nursery.start_soon(until_disconnected, lambda: connection.send(b"x" * 100))


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        (lambda client: client.close(1000), 1000),
        (lambda client: client.send(b"x" * 1100), 1009),
        (lambda client: client.stream.send_all(b"\xff\x80\0\0\0\0"), 1002),
    ],
    ids=["the client closes", "the client sends too much", "the client breaks the protocol"],
)
async def test_a_busy_sender_does_not_cut_the_close_frame_short(
    leave: Callable[[BareClient], Awaitable[None]], code: int, autojump_clock: Clock
) -> None:
    async with transport(talk_and_listen, capacity_bytes=400, max_message_bytes=1024) as fixture:
        client = await fixture.open()
        await trio.testing.wait_all_tasks_blocked()  # the sender holds the connection: the client does not read
        await leave(client)
        await trio.testing.wait_all_tasks_blocked()
        event = await client.next_event()
        while isinstance(event, BytesMessage):
            event = await client.next_event()
        assert (type(event), event.code) == (CloseConnection, code)
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 0


@pytest.mark.parametrize("frames_before", [0, 30, 31, 32], ids=lambda frames: f"{frames} frames before")
async def test_a_close_from_both_sides_is_not_cut_short(frames_before: int, autojump_clock: Clock) -> None:
    """Wherever the receiver is when the server wants to close, too: it gives others their turn among frames."""

    async def session(connection: Connection) -> None:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                with suppress(Disconnected):
                    while True:
                        await connection.receive()

            nursery.start_soon(listen)
            await both_close.wait()
            await connection.close(1001, "bye")
            nursery.cancel_scope.cancel()

    async with transport(session) as fixture:
        for schedule in range(20):
            both_close = trio.Event()
            client = await fixture.open()
            await trio.testing.wait_all_tasks_blocked()
            pongs = [client._protocol.send(Pong())] * frames_before
            seed_schedule(schedule)
            await client.stream.send_all(b"".join([*pongs, client._protocol.send(CloseConnection(code=1000))]))
            both_close.set()
            with pytest.raises(Closed) as closed:
                await client.receive()
            assert closed.value.code in (1000, 1001)
            await trio.testing.wait_all_tasks_blocked()
            assert fixture.open_connections == 0


async def test_a_message_over_the_limit_is_told_1009(autojump_clock: Clock) -> None:
    async with transport(max_message_bytes=1024, capacity_bytes=512) as fixture:
        client = await fixture.open()
        await client.send(b"x" * 50_000)  # all of it can be written: it is read away
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert closed.value.code == 1009
        assert "1024" in (closed.value.reason or "")
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 0
        assert fixture.refused("too_large") == 1


EMPTY = b"\x00\x80\0\0\0\0"
FLOODS = {
    "empty fragments": (b"\x02\x80\0\0\0\0", EMPTY, 16_384, "fragments"),
    "messages that end": (b"", b"\x02\x80\0\0\0\0" + EMPTY * 10 + b"\x80\x80\0\0\0\0", 16_384, "fragments"),
    "pongs": (b"", b"\x8a\x80\0\0\0\0", 256, "pings and pongs"),
    "pings": (b"", b"\x89\x81\0\0\0\0x", 256, "pings and pongs"),
}


async def swallow(connection: Connection) -> None:
    with suppress(Disconnected):
        while True:
            await connection.receive()


@pytest.mark.parametrize(("first", "piece", "most", "kind"), FLOODS.values(), ids=FLOODS.keys())
async def test_frames_that_carry_nothing_are_bounded_in_time(
    autojump_clock: Clock, first: bytes, piece: bytes, most: int, kind: str
) -> None:
    async with transport(swallow) as fixture:
        client = await fixture.open()
        await client.stream.send_all(first)
        for _ in range(3):  # as many as are allowed, window after window
            await trio.sleep(11)
            await client.stream.send_all(piece * (most // (11 if len(piece) > 50 else 1) - 1))
        await trio.sleep(1)
        assert fixture.open_connections == 1
        with trio.move_on_after(5), suppress(trio.BrokenResourceError):  # it is closed, and read away for a while
            await client.stream.send_all(piece * 2 * most)
        with pytest.raises(Closed) as closed:
            await until_closed(client)
        assert (closed.value.code, kind in str(closed.value.reason)) == (1008, True)
        await trio.sleep(5)
        assert fixture.open_connections == 0
        assert fixture.refused("internal_error") == 0


@pytest.mark.parametrize(
    ("frames", "most"),
    [(b"\x02\x80\0\0\0\0" + EMPTY * 4999, 32), (b"\x82\x81\0\0\0\0x" * 5000, 4)],
    ids=["fragments", "messages"],
)
async def test_others_have_their_turn_among_many_frames(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, frames: bytes, most: int
) -> None:
    turn = 0
    handled: Counter[int] = Counter()
    original = WebSocket._handle

    async def handle(self: WebSocket, event: Any) -> Any:
        handled[turn] += 1
        return await original(self, event)

    async def take_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(WebSocket, "_handle", handle)
    async with transport(swallow) as fixture, trio.open_nursery() as nursery:
        client = await fixture.open()
        nursery.start_soon(take_turns)
        await client.stream.send_all(frames)
        while handled.total() < 5000:
            await trio.lowlevel.checkpoint()
        # The last of one turn, the first of the next, and the one before which others have their turn.
        assert max(handled.values()) <= 2 * most + 1
        nursery.cancel_scope.cancel()


async def test_pings_do_not_wait_for_what_is_sent(autojump_clock: Clock) -> None:
    got: list[Received] = []

    async def session(connection: Connection) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send, b"x" * 100_000)  # its client does not read
            got.extend([await connection.receive() for _ in range(2)])
            nursery.cancel_scope.cancel()

    async with transport(session) as fixture:
        client = await fixture.open()
        for _ in range(100):
            await client.send_event(Ping(payload=b"x"))
        await client.send_event(BytesMessage(data=b"one"))
        await client.send_event(BytesMessage(data=b"two"))
        await trio.testing.wait_all_tasks_blocked()
        assert [received.data for received in got] == [b"one", b"two"]


async def test_pongs_come_in_order_and_before_the_answer_to_what_followed(autojump_clock: Clock) -> None:
    async def echo(connection: Connection) -> None:
        with suppress(Disconnected):
            while True:
                await connection.send((await connection.receive()).data)

    async with transport(echo) as fixture:
        client = await fixture.open()
        pings = b"".join([b"\x89\x81\0\0\0\0" + bytes([48 + number]) for number in range(10)])
        await client.stream.send_all(pings + b"\x82\x81\0\0\0\0x")
        expected = b"".join([b"\x8a\x01" + bytes([48 + number]) for number in range(10)]) + b"\x82\x01x"
        got = b""
        while len(got) < len(expected):
            got += await client.stream.receive_some()
        assert got == expected


def begun(size: int, *, whole: int | None = None) -> bytes:
    """So many bytes of a message, which has more."""
    return b"\x82\xff" + (whole or size + 1).to_bytes(8, "big") + bytes(4 + size)


LARGE: dict[str, Any] = {"max_message_bytes": 200_000, "max_input_bytes": 400_000, "capacity_bytes": 2_000_000}


async def test_unfinished_messages_share_one_budget(autojump_clock: Clock) -> None:
    async with transport(swallow, **LARGE) as fixture:
        clients = [await fixture.open() for _ in range(50)]
        for client in clients:
            await client.stream.send_all(begun(199_999))
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.held_bytes <= 600_000
        small = await fixture.open()
        with trio.fail_after(1):  # what is not large does not wait
            await small.stream.send_all(begun(10_000)[:-1] + b"xx")
            await trio.testing.wait_all_tasks_blocked()
        for client in clients:
            await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.held_bytes == 0


async def test_a_large_message_waits_for_room_and_comes_whole(autojump_clock: Clock) -> None:
    got: list[int] = []

    async def session(connection: Connection) -> None:
        with suppress(Disconnected):
            while True:
                received = await connection.receive()
                await trio.sleep(2)  # to become a request
                got.append(len(received.data))
                received.release()

    async with transport(session, **LARGE) as fixture:
        clients = [await fixture.open() for _ in range(20)]
        for client in clients:
            await client.stream.send_all(begun(150_000, whole=150_000))
        await trio.sleep(100)
        assert got == [150_000] * 20
        assert fixture.held_bytes == 0


async def test_a_large_message_is_not_copied(autojump_clock: Clock) -> None:
    """Of 8 MiB that would hold the event loop for ten milliseconds. What is allocated tells."""
    peaks: list[int] = []

    async def session(connection: Connection) -> None:
        with suppress(Disconnected):
            await connection.receive()
            peaks.append(tracemalloc.get_traced_memory()[1])

    async with transport(session, capacity_bytes=65_536) as fixture:
        client = await fixture.open()
        message = begun(4_000_000, whole=4_000_000)
        tracemalloc.start()
        try:
            for at in range(0, len(message), 65_536):
                await client.stream.send_all(message[at : at + 65_536])
            await trio.testing.wait_all_tasks_blocked()
        finally:
            tracemalloc.stop()
    [peak] = peaks
    assert 4_000_000 <= peak <= 6_000_000


async def test_who_sends_slowly_gives_way_to_who_waits(autojump_clock: Clock) -> None:
    async with transport(swallow, **LARGE | {"max_input_bytes": 700_000}) as fixture:
        silent = [await fixture.open() for _ in range(4)]
        for client in silent:
            await client.stream.send_all(begun(100_000, whole=150_000))
        await trio.sleep(30)  # nobody waits
        assert fixture.open_connections == 4
        honest = await fixture.open()
        await honest.stream.send_all(begun(150_000, whole=150_000))
        await trio.sleep(1)
        with pytest.raises(Closed) as closed:
            await silent[0].receive()
        assert closed.value.code == 1013
        await trio.sleep(4)
        assert fixture.websockets == 4  # no more than one was in the way
        assert fixture.refused("queue_full") == 1


async def test_a_large_message_must_be_complete_in_time(autojump_clock: Clock) -> None:
    async with transport(swallow, **LARGE, message_timeout_s=60.0, ping_interval_s=3600.0) as fixture:
        client = await fixture.open()
        await client.stream.send_all(begun(20_000, whole=150_000))
        for _ in range(59):
            await trio.sleep(1)
            await client.stream.send_all(b"x")
        assert fixture.open_connections == 1
        await trio.sleep(2)
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert (closed.value.code, "60 s" in str(closed.value.reason)) == (1008, True)


@pytest.mark.parametrize("refuse", [False, True])
async def test_a_large_prompt_is_held_until_it_is_a_request(autojump_clock: Clock, refuse: bool) -> None:
    engine = ScriptedEngine(submit_s=5.0)
    server = Server(engine, ServerConfig(), addresses=[("127.0.0.1", 1)])
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, [listener])
        client = BareClient(await listener.connect())
        await client.open()
        await client.send(GenerateRequest(id=1, prompt="😀" + "x" * 99_999))
        await trio.sleep(1)
        assert server.held_input_bytes > 400_000  # as text, not as it came
        engine.refuse = QueueFull("full") if refuse else None
        await trio.sleep(5)
        assert server.held_input_bytes == 0
        engine.refuse = None
        await client.send(GenerateRequest(id=2, prompt="x" * 100_000))
        await trio.sleep(1)
        assert server.held_input_bytes > 0
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert server.held_input_bytes == 0
        nursery.cancel_scope.cancel()


REQUEST = MsgpackCodec().encode_client(GenerateRequest(id=1, prompt="x" * 20))
assert isinstance(REQUEST, bytes)
FRAME = b"\x82" + bytes([0x80 | len(REQUEST)]) + b"\0\0\0\0" + REQUEST


@pytest.mark.parametrize(
    "last",
    [begun(100_000), EMPTY * 20_000, b"\x88\x80\0\0\0\0", b"\xff\xff", FRAME, FRAME + begun(100)],
    ids=["unfinished", "a flood", "a close", "forbidden", "a request", "both"],
)
async def test_a_connection_that_ends_leaves_no_garbage(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    kept: list[weakref.ref[Any]] = []
    made = [WebSocket.__init__, Session.__init__]

    def make_websocket(self: Any, *args: Any, **kwargs: Any) -> None:
        made[0](self, *args, **kwargs)
        kept.extend([weakref.ref(self), weakref.ref(self._protocol._proto._frame_decoder)])

    def make_session(self: Any, *args: Any, **kwargs: Any) -> None:
        made[1](self, *args, **kwargs)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(WebSocket, "__init__", make_websocket)
    monkeypatch.setattr(Session, "__init__", make_session)
    engine = ScriptedEngine()
    server = Server(engine, ServerConfig(allow_watch=True), addresses=[("127.0.0.1", 1)])
    listener = MemoryListener(2_000_000)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, [listener])
        gc.collect()
        gc.disable()
        try:
            client = BareClient(await listener.connect())
            await client.open()
            await client.send(Watch())
            await client.stream.send_all(last)
            await trio.sleep(1)
            await client.stream.aclose()
            await trio.sleep(10)
            engine.clients.clear()
            assert len(kept) == 3
            assert [ref() for ref in kept if ref() is not None] == []
        finally:
            gc.enable()
        nursery.cancel_scope.cancel()


async def test_a_client_that_never_stops_sending_is_dropped(autojump_clock: Clock) -> None:
    async with transport(max_message_bytes=1024, close_timeout_s=3.0) as fixture:
        client = await fixture.open()
        with suppress(trio.BrokenResourceError):
            for _ in range(1000):
                await client.send(b"x" * 2000)
                await trio.sleep(0.1)
        assert trio.current_time() == pytest.approx(3.0, abs=0.2)
        assert fixture.open_connections == 0


async def test_running_out_of_descriptors_makes_room_and_is_logged_once_a_second(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with transport() as fixture:
        neighbour = await fixture.open()
        silent = [await fixture.listener.connect() for _ in range(40)]
        await trio.testing.wait_all_tasks_blocked()
        fixture.listener.faults = [OSError(errno.EMFILE, "too many open files")] * 35
        await fixture.open()  # accepting had begun
        client = await fixture.open()
        assert trio.current_time() == pytest.approx(3.5)
        await client.send_event(BytesMessage(data=b"alive"))
        assert (await client.next_event()).data == b"alive"
        assert await read_all(silent[33]) == b""
        assert len(caplog.records) == 4
        assert "too many open files" in caplog.text
        await neighbour.send_event(BytesMessage(data=b"alive"))
        assert (await neighbour.next_event()).data == b"alive"


async def test_half_closing_is_leaving(autojump_clock: Clock) -> None:
    ended: list[float] = []

    async def session(connection: Connection) -> None:
        await echo(connection)
        ended.append(trio.current_time())

    async with transport(session) as fixture:
        client = await fixture.open()
        await trio.sleep(5)
        await client.stream.send_eof()
        await trio.sleep(1)
        assert ended == [5.0]
        assert fixture.open_connections == 0


async def test_vanishing_at_any_byte_leaves_nothing_behind(autojump_clock: Clock) -> None:
    engine = ScriptedEngine()
    server = Server(engine, ServerConfig(), addresses=[("127.0.0.1", 1)])
    listener = MemoryListener()
    request = MsgpackCodec().encode_client(GenerateRequest(id=1, prompt="x" * 20))
    assert isinstance(request, bytes)
    frame = b"\x82" + bytes([0x80 | len(request)]) + b"\0\0\0\0" + request
    script = UPGRADE + frame
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, [listener])
        baseline = len(trio.lowlevel.current_root_task().child_nurseries)
        for count in range(len(script) + 1):
            stream = await listener.connect()
            await stream.send_all(script[:count])
            if count % 3:
                await trio.testing.wait_all_tasks_blocked()
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == 0
        assert repr(server).endswith("0 open, 0 of them WebSockets>>")
        assert (engine.live, engine.submitting) == ([], 0)
        assert server.metrics.registry.get_sample_value("wsbatch_connections") == 0
        assert len(trio.lowlevel.current_root_task().child_nurseries) == baseline
        client = BareClient(await listener.connect())
        await client.open()
        assert isinstance(await client.receive(), Hello)
        nursery.cancel_scope.cancel()
