"""Arbitrary bytes as heads, arbitrary frames after one: at worst that connection ends, and nothing is unexpected."""

import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wsbatch.config import ServerConfig
from wsbatch.messages import Hello
from wsbatch.server.serve import Server
from wsbatch.testing import BareClient, MemoryListener, ScriptedEngine

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def attack(parts: list[bytes]) -> None:
    """Send the parts, vanish; the server must be as it was, and serve the next client."""
    engine = ScriptedEngine()
    server = Server(engine, ServerConfig(max_message_bytes=1024), addresses=[("127.0.0.1", 1)])
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, [listener])
        stream = await listener.connect()
        try:
            for part in parts:
                await stream.send_all(part)
                await trio.sleep(0.1)
        except trio.BrokenResourceError:
            pass
        await stream.aclose()
        await trio.sleep(10)
        assert repr(server).endswith("0 open, 0 of them WebSockets>>")
        sample = server.metrics.registry.get_sample_value
        assert sample("wsbatch_requests_refused_total", {"code": "internal_error"}) is None
        assert (engine.live, engine.submitting) == ([], 0)
        client = BareClient(await listener.connect())
        await client.open()
        assert isinstance(await client.receive(), Hello)
        nursery.cancel_scope.cancel()


def run(parts: list[bytes]) -> None:
    trio.run(attack, parts, clock=trio.testing.MockClock(autojump_threshold=0))


names = st.sampled_from(
    b"Host Connection Upgrade Sec-WebSocket-Protocol Sec-WebSocket-Extensions Sec-WebSocket-Key "
    b"Origin Authorization Content-Length Transfer-Encoding Expect X".split()
)
headers = st.lists(st.tuples(names, st.binary(max_size=12)), max_size=3)


@settings(max_examples=100, deadline=None)
@given(headers, st.booleans())
@example([(b"Sec-WebSocket-Protocol", b"\xff")], True)
def test_any_headers(extra: list[tuple[bytes, bytes]], first: bool) -> None:
    line, rest = UPGRADE.split(b"\r\n", 1)
    block = b"".join(name + b": " + value + b"\r\n" for name, value in extra)
    run([line + b"\r\n" + (block + rest if first else rest + block) + b"\r\n"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
@example([b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n"])
def test_any_bytes_as_a_head(parts: list[bytes]) -> None:
    run(parts)


def frame(opcode: int, flags: int, payload: bytes, masked: bool) -> bytes:
    head = bytes([flags << 4 | opcode, (0x80 if masked else 0) | len(payload)])
    return head + (b"\0\0\0\0" if masked else b"") + payload


close_codes = st.sampled_from([0, 999, 1000, 1001, 1005, 1006, 1015, 2000, 5000]).map(
    lambda code: code.to_bytes(2, "big")
)
payloads = st.binary(max_size=20) | close_codes | st.sampled_from([b"\x81\xa4type\xa4ping", b"\xc1"])
frames = st.builds(
    frame,
    st.integers(0, 15) | st.sampled_from([0, 1, 2, 8, 9, 10]),
    st.sampled_from([8, 8, 8, 0, 4, 12]),
    payloads,
    st.sampled_from([True, True, True, False]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(frames | st.binary(max_size=20), max_size=8))
@example([frame(8, 8, b"\x03\xe8", True), frame(9, 8, b"", True)])  # a ping after the client's close
@example([frame(2, 8, b"\xc1", True), frame(9, 8, b"", True)])  # a ping after the server's
@example([b"\x82\xfe\x07\xd0\0\0\0\0" + b"x" * 2000, frame(9, 8, b"", True)])  # a ping after 1009
@example([frame(8, 8, b"\x03\xee", True)])  # 1006 may not be sent
def test_any_frames(parts: list[bytes]) -> None:
    run([UPGRADE + b"\r\n", *parts])


@settings(max_examples=30, deadline=None)
@given(st.lists(frames, max_size=4))
def test_any_frames_with_the_head(parts: list[bytes]) -> None:
    run([UPGRADE + b"\r\n" + b"".join(parts)])
