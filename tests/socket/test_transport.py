"""What only real sockets show: the crash by header bytes, resets, descriptors, a token's way over TCP."""

import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import trio

from wsbatch.config import ServerConfig
from wsbatch.messages import Accepted, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.server.serve import serve
from wsbatch.testing import BareClient, Closed, ScriptedEngine, serving
from wsbatch.wire import JSON, MSGPACK, Codec

HEAD = (
    b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
HOSTILE = {
    "host byte": HEAD.replace(b"Host: test", b"Host: \xff"),
    "host idna": HEAD.replace(b"Host: test", b"Host: xn--a"),
    "connection": HEAD.replace(b"Connection: Upgrade", b"Connection: Upgrade\xff"),
    "protocol": HEAD[:-2] + b"Sec-WebSocket-Protocol: \xff\r\n\r\n",
    "extensions": HEAD[:-2] + b"Sec-WebSocket-Extensions: \xff\r\n\r\n",
}


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await trio.sleep(0.005)


@pytest.mark.parametrize("codec", [None, MSGPACK, JSON], ids=["none offered", "msgpack", "json"])
async def test_a_prompt_streams_tokens_to_its_end(codec: Codec | None) -> None:
    async with serving(ServerConfig(port=0)) as served:
        client = await served.client(codec)
        await client.send(GenerateRequest(id=1, prompt="hi", sampling=SamplingParams(max_tokens=3)))
        events: list[Any] = [await client.receive()]
        while not isinstance(events[-1], Finished):
            events.append(await client.receive())
        accepted, *tokens, finished = events
        assert accepted == Accepted(1, 2, 0, 7)
        assert all(isinstance(frame, Tokens) for frame in tokens)
        assert "".join(frame.text for frame in tokens) == "abc"
        assert finished.finish_reason == "length"


@pytest.mark.parametrize("head", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_header_byte_does_not_end_the_server(head: bytes) -> None:
    async with serving(ServerConfig(port=0)) as served:
        neighbour = await served.client()
        stream = await served.tcp()
        await stream.send_all(head)
        answer = b""
        while part := await stream.receive_some():
            answer += part
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        await neighbour.send(GenerateRequest(id=1, prompt="still here?"))
        assert isinstance(await neighbour.receive(), Accepted)


async def test_port_and_url_are_known_before_the_first_connection() -> None:
    async with serving(ServerConfig(port=0)) as served:
        port = served.server.port
        assert port > 0
        assert served.server.url == f"ws://127.0.0.1:{port}"
        assert served.server.addresses == [("127.0.0.1", port)]


async def test_a_port_in_use_is_a_plain_oserror() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await serve(ScriptedEngine(), ServerConfig(port=taken.getsockname()[1]))


async def test_small_frames_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[trio.SocketStream] = []
    original = trio.SocketListener.accept

    async def accept(self: trio.SocketListener) -> trio.SocketStream:
        streams.append(await original(self))
        return streams[-1]

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    async with serving(ServerConfig(port=0)) as served:
        await served.client()
        assert streams[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_client_that_stops_reading_is_reset() -> None:
    """With data it will never read still unsent, a plain close would leave the kernel offering it for minutes."""
    async with serving(ServerConfig(port=0, send_timeout_s=0.3), interval_s=None) as served:
        engine = served.engine
        client = await served.client()
        await client.send(GenerateRequest(id=1, prompt="x"))
        await until(lambda: len(engine.live) == 1)
        with trio.move_on_after(60):
            while engine.live:
                for _ in range(200):
                    engine.live[0].push([1] * 100, "x" * 5000, [])
                await trio.sleep(0.01)
        assert engine.live == []
        assert isinstance(client.stream, trio.SocketStream)
        with pytest.raises(trio.BrokenResourceError):
            await read_to_end(client.stream)


async def test_a_reset_is_seen_at_once() -> None:
    """No timeout of the server's finds it: they are an hour."""
    config = ServerConfig(port=0, ping_interval_s=3600.0, send_timeout_s=3600.0)
    async with serving(config, interval_s=None) as served:
        engine = served.engine
        client = await served.client()
        await client.send(GenerateRequest(id=1, prompt="x"))
        await until(lambda: len(engine.live) == 1)
        reset(client)
        with trio.fail_after(60):
            await engine.wait_live(0)


async def test_vanishing_clients_leave_the_server_as_it_was() -> None:
    engine = ScriptedEngine(submit_s=0.001)
    async with serving(ServerConfig(port=0), engine=engine, interval_s=0.001) as served:
        await served.client()
        descriptors = len(os.listdir("/proc/self/fd"))
        for count in range(100):
            client = BareClient(await served.tcp())
            if count % 5:
                await client.open()
                await client.send(GenerateRequest(id=1, prompt="x", sampling=SamplingParams(max_tokens=1000)))
                if count % 2:
                    await client.receive()
            if count % 3:
                reset(client)
            else:
                await client.stream.aclose()
        await until(lambda: not engine.live and not engine.submitting)
        await until(lambda: repr(served.server).endswith("1 open, 1 of them WebSockets>>"))
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert served.server.metrics.registry.get_sample_value("wsbatch_connections") == 1


async def test_a_big_message_is_read_and_a_bigger_one_told_why() -> None:
    async with serving(ServerConfig(port=0, max_message_bytes=2_000_000), interval_s=None) as served:
        client = await served.client()
        await client.send(GenerateRequest(id=1, prompt="x" * 1_900_000))
        accepted = await client.receive()
        assert isinstance(accepted, Accepted)
        assert accepted.prompt_tokens == 1_900_000
        await client.send(b"x" * 10_000_000)
        with pytest.raises(Closed) as closed:
            await client.receive()
        assert closed.value.code == 1009


async def read_to_end(stream: trio.SocketStream) -> None:
    while await stream.receive_some(1_000_000):
        pass


def reset(client: BareClient) -> None:
    assert isinstance(client.stream, trio.SocketStream)
    client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.stream.socket.close()
