"""The transport against slow, silent, dead and hostile clients, in virtual time and in memory.

The numbers in comments are the findings about the WebSocket library in docs/operations.md.
"""

import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
import trio_websocket
from wsproto.events import BytesMessage, Ping, Pong

from wsbatch.config import ServerConfig
from wsbatch.errors import QueueFull, RequestError
from wsbatch.http import Answer
from wsbatch.messages import GenerateRequest, Hello
from wsbatch.metrics import EngineMetrics
from wsbatch.server import Server
from wsbatch.session import Connection, Disconnected
from wsbatch.testing.clients import BareClient, Closed, Rejected
from wsbatch.testing.engines import ScriptedEngine
from wsbatch.testing.streams import MemoryListener, MemoryStream
from wsbatch.transport import Transport
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
            await connection.send(await connection.receive())


class Fixture:
    """A transport over an in-memory listener. `tasks` counts connections not yet over."""

    def __init__(self, session: Serve, settings: dict[str, Any], capacity_bytes: int) -> None:
        self.metrics = EngineMetrics()
        self.refusal: RequestError | None = None
        self.listener = MemoryListener(capacity_bytes)
        self.transport = Transport(
            ServerConfig(**settings),
            session=session,
            plain=lambda head: Answer(200, b"plain " + head.path.encode()),
            refusal=lambda: self.refusal or self.transport.full(),
            metrics=self.metrics,
        )

    async def run(self) -> None:
        await trio.serve_listeners(self.transport.handle, [self.listener])

    async def open(self) -> BareClient:
        client = BareClient(await self.listener.connect())
        await client.open()
        return client

    @property
    def open_connections(self) -> int:
        return int(repr(self.transport).split()[1])

    def refused(self, code: str) -> float:
        return self.metrics.registry.get_sample_value("wsbatch_requests_refused_total", {"code": code}) or 0.0


@asynccontextmanager
async def transport(session: Serve = echo, capacity_bytes: int = 65_536, **settings: Any) -> AsyncIterator[Fixture]:
    fixture = Fixture(session, settings, capacity_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fixture.run)
        yield fixture
        nursery.cancel_scope.cancel()


async def read_all(stream: MemoryStream) -> bytes:
    data = b""
    with suppress(trio.BrokenResourceError):
        while part := await stream.receive_some():
            data += part
    return data


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


async def test_plain_http_is_answered_and_leaves_no_task(autojump_clock: Clock) -> None:  # (3)
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
) -> None:  # (1)
    async def session(connection: Connection) -> None:
        if await connection.receive() == b"poison":
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
) -> None:  # (1) and (2), behind the guard
    original = trio_websocket.WebSocketConnection._reader_task
    broken: list[bool] = [True]

    async def reader_task(self: Any) -> None:
        if broken and broken.pop():
            raise UnicodeDecodeError("ascii", b"\xff", 0, 1, "as a header would")
        await original(self)

    monkeypatch.setattr(trio_websocket.WebSocketConnection, "_reader_task", reader_task)
    async with transport() as fixture:
        with pytest.raises(Closed):
            await fixture.open()
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
) -> None:  # (2)
    async with transport() as fixture:
        neighbour = await fixture.open()
        assert good in UPGRADE
        answer = await ask(fixture, UPGRADE.replace(good, bad))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert caplog.records == []
        await neighbour.send_event(BytesMessage(data=b"alive"))
        assert (await neighbour.next_event()).data == b"alive"


async def test_the_library_never_sees_the_clients_head(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # (2)
    seen: list[Any] = []
    original = trio_websocket.WebSocketConnection._handle_request_event

    async def handle(self: Any, event: Any) -> None:
        seen.append(event)
        await original(self, event)

    monkeypatch.setattr(trio_websocket.WebSocketConnection, "_handle_request_event", handle)
    async with transport() as fixture:
        extra = b'\r\nX-Odd: \xff\xfe\r\nSec-WebSocket-Extensions: permessage-deflate; x="a,b"\r\nCookie: a=1\r\n\r\n'
        stream = await fixture.listener.connect()
        await stream.send_all(UPGRADE.replace(b"GET /", b"GET /any?token=secret").replace(b"\r\n\r\n", extra))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101 ")
        (event,) = seen
        assert (event.host, event.target, event.extensions, event.subprotocols) == ("localhost", "/", [], [])
        assert {name for name, _ in event.extra_headers} == {
            b"upgrade",
            b"connection",
            b"sec-websocket-key",
            b"sec-websocket-version",
        }


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


async def test_connections_that_say_nothing_are_bounded(autojump_clock: Clock) -> None:
    async with transport(max_connections=5) as fixture:
        streams = [await fixture.listener.connect() for _ in range(20)]
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 10
        assert await read_all(streams[-1]) == b""


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


async def test_a_dead_peer_is_dropped(autojump_clock: Clock) -> None:  # (7)
    async with transport(ping_interval_s=20.0, ping_timeout_s=15.0) as fixture:
        client = await fixture.open()  # neither reads nor writes from now on
        await trio.sleep(34.9)
        assert fixture.open_connections == 1
        await trio.sleep(0.2)
        assert fixture.open_connections == 0
        with pytest.raises(Closed):
            await client.receive()
        assert client.pings == 1


async def test_a_dead_peer_is_dropped_with_a_full_pipe(autojump_clock: Clock) -> None:  # (7), (8)
    async def talk(connection: Connection) -> None:
        await connection.send(b"x" * 100_000)

    async with transport(talk, ping_interval_s=20.0, ping_timeout_s=15.0, send_timeout_s=3600.0) as fixture:
        await fixture.open()
        await trio.sleep(35.1)
        assert fixture.open_connections == 0


async def test_a_server_that_was_suspended_asks_again_before_it_gives_a_client_up(autojump_clock: Clock) -> None:
    async with transport(ping_interval_s=20.0, ping_timeout_s=15.0) as fixture:
        client = await fixture.open()
        assert isinstance(await client.next_event(), Ping)
        autojump_clock.jump(100.0)
        again = await client.next_event()
        assert isinstance(again, Ping)
        await client.send_event(Pong(payload=again.payload))
        await trio.sleep(19.0)
        assert fixture.open_connections == 1
        await trio.sleep(17.0)  # but then it is given up as ever
        assert fixture.open_connections == 0


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


async def test_a_silent_client_does_not_hold_the_close(autojump_clock: Clock) -> None:  # (5)
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


async def test_a_blocked_writer_does_not_hold_the_close(autojump_clock: Clock) -> None:  # (5)
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


async def test_nothing_is_written_after_a_write_that_was_cut_short(autojump_clock: Clock) -> None:  # (4)
    async def session(connection: Connection) -> None:
        with trio.move_on_after(1):
            await connection.send(b"a" * 1000)
        with suppress(Disconnected):
            await connection.send(b"b" * 10)
        await connection.close(1001, "bye")

    async with transport(session, capacity_bytes=400) as fixture:
        client = BareClient(await fixture.listener.connect())
        await client.open()
        await trio.sleep(2)
        received = await read_all(client.stream)  # reads on: there is room for whatever might be said
        assert received == b"\x82\x7e\x03\xe8" + b"a" * (len(received) - 4)


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


async def test_empty_fragments_without_end_are_cut_off(autojump_clock: Clock) -> None:
    async with transport() as fixture:
        client = await fixture.open()
        sent = 0
        with suppress(trio.BrokenResourceError):
            while sent < 1_000_000:
                await client.stream.send_all(b"\x00\x80\0\0\0\0" * 1000 if sent else b"\x02\x80\0\0\0\0")
                sent += 1000
        assert sent < 100_000
        await trio.testing.wait_all_tasks_blocked()
        assert fixture.open_connections == 0
        assert fixture.refused("internal_error") == 0


async def test_a_client_that_never_stops_sending_is_dropped(autojump_clock: Clock) -> None:
    async with transport(max_message_bytes=1024, close_timeout_s=3.0) as fixture:
        client = await fixture.open()
        with suppress(trio.BrokenResourceError):
            for _ in range(1000):
                await client.send(b"x" * 2000)
                await trio.sleep(0.1)
        assert trio.current_time() == pytest.approx(3.0, abs=0.2)
        assert fixture.open_connections == 0


async def test_running_out_of_descriptors_ends_nothing(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "trio.serve_listeners")
    async with transport() as fixture:
        fixture.listener.faults = [OSError(errno.EMFILE, "too many open files")] * 5
        client = await fixture.open()
        await client.send_event(BytesMessage(data=b"alive"))
        assert (await client.next_event()).data == b"alive"


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
        assert engine.metrics.registry.get_sample_value("wsbatch_connections") == 0
        assert len(trio.lowlevel.current_root_task().child_nurseries) == baseline
        client = BareClient(await listener.connect())
        await client.open()
        assert isinstance(await client.receive(), Hello)
        nursery.cancel_scope.cancel()
