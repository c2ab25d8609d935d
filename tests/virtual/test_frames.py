"""WebSocket frames as bytes, good and bad, against the transport and a session: RFC 6455 by the letter, in memory.

The Autobahn testsuite asks for far more (docs/conformance.md), but not on every run.
"""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from wsbatch.config import ServerConfig
from wsbatch.messages import Accepted, Finished, GenerateRequest, Hello, SamplingParams, Tokens
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener, MemoryStream, ScriptedEngine
from wsbatch.wire import JSON, MSGPACK

Clock = trio.testing.MockClock

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
REQUEST = GenerateRequest(id=1, prompt="ä", sampling=SamplingParams(max_tokens=4))
PACKED = MSGPACK.encode_client(REQUEST)
WRITTEN = JSON.encode_client(REQUEST)
assert isinstance(PACKED, bytes)
assert isinstance(WRITTEN, str)


def frame(
    opcode: int, payload: bytes, *, fin: bool = True, reserved: int = 0, mask: bytes | None = b"\x11\x22\x33\x44"
) -> bytes:
    """One frame of a client."""
    length = len(payload)
    short = length if length < 126 else 126
    head = bytes([fin << 7 | reserved << 4 | opcode, (mask is not None) << 7 | short])
    if short == 126:
        head += struct.pack("!H", length)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


class Raw:
    """A client that reads and writes frames as they are."""

    def __init__(self, stream: MemoryStream, engine: ScriptedEngine) -> None:
        self.stream = stream
        self.engine = engine
        self.head = b""
        self._data = b""

    async def send(self, *frames: bytes) -> None:
        await self.stream.send_all(b"".join(frames))

    async def receive(self) -> tuple[int, bytes]:
        """The next frame's opcode and payload; (-1, b"") at the end of the connection."""
        while True:
            if len(self._data) >= 2:
                length, at = self._data[1], 2
                assert length < 128, "servers do not mask"
                if length == 126:
                    length, at = struct.unpack("!H", self._data[2:4])[0], 4
                if len(self._data) >= at + length:
                    opcode, payload = self._data[0] & 0x0F, self._data[at : at + length]
                    assert self._data[0] & 0xF0 == 0x80, "whole messages, nothing reserved"
                    self._data = self._data[at + length :]
                    return opcode, payload
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                data = b""
            if not data:
                return -1, b""
            self._data += data

    async def kinds(self, count: int) -> list[type]:
        """Types of the next messages."""
        return [type(MSGPACK.decode_server((await self.receive())[1])) for _ in range(count)]

    async def close_code(self) -> int | None:
        """What the connection is closed with, None without a word; it must end."""
        opcode, payload = await self.receive()
        if opcode == -1:
            return None
        assert opcode == CLOSE
        await self.send(frame(CLOSE, payload[:2]))
        assert (await self.receive())[0] == -1
        return int(struct.unpack("!H", payload[:2])[0])


@asynccontextmanager
async def connected(headers: bytes = b"") -> AsyncIterator[Raw]:
    engine = ScriptedEngine()
    server = Server(engine, ServerConfig(max_message_bytes=2048), addresses=[("127.0.0.1", 1)])
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, [listener])
        nursery.start_soon(lambda: engine.play(interval_s=1.0))
        raw = Raw(await listener.connect(), engine)
        await raw.stream.send_all(
            b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n" + headers + b"\r\n"
        )
        while b"\r\n\r\n" not in raw.head:
            raw.head += await raw.stream.receive_some()
        raw.head, _, raw._data = raw.head.partition(b"\r\n\r\n")
        opcode, hello = await raw.receive()
        if b"json" not in headers:
            assert opcode == BINARY
            assert isinstance(MSGPACK.decode_server(hello), Hello)
        yield raw
        nursery.cancel_scope.cancel()


WHOLE_ANSWER = [Accepted, Tokens, Tokens, Tokens, Tokens, Finished]


async def test_a_message_in_one_frame(autojump_clock: Clock) -> None:
    async with connected() as raw:
        await raw.send(frame(BINARY, PACKED))
        assert await raw.kinds(6) == WHOLE_ANSWER


@pytest.mark.parametrize("size", [1, 7, 30])
async def test_a_message_in_fragments_with_pings_between_them(autojump_clock: Clock, size: int) -> None:
    async with connected() as raw:
        parts = [PACKED[at : at + size] for at in range(0, len(PACKED), size)]
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            await raw.send(frame(BINARY if index == 0 else CONTINUATION, part, fin=last))
            if not last:
                await raw.send(frame(PING, b"between %d" % index))
                assert await raw.receive() == (PONG, b"between %d" % index)
        assert await raw.kinds(6) == WHOLE_ANSWER


async def test_a_character_in_two_fragments(autojump_clock: Clock) -> None:
    async with connected(b"Sec-WebSocket-Protocol: wsbatch.v1.json\r\n") as raw:
        text = WRITTEN.encode()
        middle = text.index("ä".encode()) + 1
        await raw.send(frame(TEXT, text[:middle], fin=False), frame(CONTINUATION, text[middle:]))
        opcode, answer = await raw.receive()
        assert opcode == TEXT
        assert isinstance(JSON.decode_server(answer.decode()), Accepted)


async def test_empty_fragments_are_fragments(autojump_clock: Clock) -> None:
    async with connected() as raw:
        empty = frame(CONTINUATION, b"", fin=False)
        await raw.send(frame(BINARY, b"", fin=False), empty, frame(CONTINUATION, PACKED, fin=False), empty)
        await raw.send(frame(CONTINUATION, b""))
        assert await raw.kinds(6) == WHOLE_ANSWER


async def test_pings_are_answered_in_the_middle_of_a_stream(autojump_clock: Clock) -> None:
    async with connected() as raw:
        await raw.send(frame(BINARY, PACKED))
        assert await raw.kinds(3) == WHOLE_ANSWER[:3]
        asked_s = trio.current_time()
        await raw.send(frame(PING, b"x" * 125))
        assert await raw.receive() == (PONG, b"x" * 125)
        assert trio.current_time() == asked_s
        await raw.send(frame(PONG, b"nobody asked"))
        assert await raw.kinds(3) == WHOLE_ANSWER[3:]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(BINARY, PACKED, mask=None), 1002),
        (frame(BINARY, PACKED, reserved=4), 1002),
        (frame(BINARY, PACKED, reserved=1), 1002),
        (frame(PING, b"x", reserved=2), 1002),
        (frame(0x3, b""), 1002),
        (frame(0xF, b""), 1002),
        (frame(CONTINUATION, PACKED), 1002),
        (frame(BINARY, PACKED[:5], fin=False) + frame(BINARY, PACKED[5:]), 1002),
        (frame(PING, b"x", fin=False), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(CLOSE, b"\x03\xe8" + b"x" * 124), 1002),
        (frame(CLOSE, b"\x03"), 1002),
        (frame(CLOSE, b"\x03\xed"), 1002),
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, b"\xc3"), 1007),
        (frame(TEXT, b"\xed\xa0\x80"), 1007),
        (frame(TEXT, b"\xc3", fin=False) + frame(CONTINUATION, b"("), 1007),
        (frame(CLOSE, b"\x03\xe8\xff"), 1007),
        (frame(BINARY, bytes(2049)), 1009),
    ],
    ids=[
        "not masked",
        "reserved bit 1",
        "reserved bit 3",
        "reserved bit 2 of a ping",
        "reserved opcode",
        "reserved control opcode",
        "a continuation of nothing",
        "a new message within another",
        "a ping in fragments",
        "a ping over 125 bytes",
        "a close over 125 bytes",
        "half a close code",
        "close code 1005",
        "text that is not UTF-8",
        "text that ends in a character",
        "a surrogate",
        "fragments that are not UTF-8",
        "a close reason that is not UTF-8",
        "too big",
    ],
)
async def test_what_the_protocol_forbids_fails_the_connection(autojump_clock: Clock, bad: bytes, code: int) -> None:
    async with connected() as raw:
        await raw.send(frame(BINARY, PACKED))
        assert await raw.kinds(2) == WHOLE_ANSWER[:2]
        await raw.send(bad)
        assert await raw.close_code() == code
        await trio.testing.wait_all_tasks_blocked()
        assert raw.engine.live == []  # its request went with it


@pytest.mark.parametrize(
    "offer", [b"permessage-deflate", b"permessage-deflate; client_max_window_bits, x-webkit-deflate-frame"]
)
async def test_compression_is_not_taken_up(autojump_clock: Clock, offer: bytes) -> None:
    async with connected(b"Sec-WebSocket-Extensions: " + offer + b"\r\n") as raw:
        assert b"extensions" not in raw.head.lower()
        await raw.send(frame(BINARY, PACKED))
        assert await raw.kinds(6) == WHOLE_ANSWER


async def test_a_close_is_answered_with_its_code(autojump_clock: Clock) -> None:
    async with connected() as raw:
        await raw.send(frame(CLOSE, struct.pack("!H", 1000) + b"bye"))
        opcode, payload = await raw.receive()
        assert (opcode, payload[:2]) == (CLOSE, b"\x03\xe8")
        assert (await raw.receive())[0] == -1
