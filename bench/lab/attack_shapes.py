"""What a hostile client sends: the shapes of `attack.py`, each as what it does to open sockets.

Frames are masked with zeros: what is on the wire is the payload itself, and costs the attacker nothing.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from wsbatch.wire import WireLimits

MOST, WIDE = WireLimits().max_message_bytes, WireLimits().max_wide_chars
CONTINUATION, TEXT, BINARY, PING, PONG = 0x0, 0x1, 0x2, 0x9, 0xA
MSGPACK, JSON = "wsbatch.v1.msgpack", "wsbatch.v1.json"
LOUD_S = 4.0  # how long a flood lasts
ANSWER_S = 20.0  # how long an attacker waits for an answer


def frame(opcode: int, payload: bytes, *, final: bool = True, length: int | None = None) -> bytes:
    """One frame of a client; `length` is what its header claims."""
    size = len(payload) if length is None else length
    if size < 126:
        head = bytes([final << 7 | opcode, 0x80 | size])
    elif size < 65_536:
        head = struct.pack("!BBH", final << 7 | opcode, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", final << 7 | opcode, 0x80 | 127, size)
    return head + b"\0\0\0\0" + payload


class Attacker:
    """Opens connections to the server on `port`, and keeps them until `close`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        """A TCP connection that says nothing."""
        self.sockets.append(socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S))
        return self.sockets[-1]

    def upgrade(self, subprotocol: str) -> socket.socket:
        """A WebSocket whose hello has been read."""
        sock = self.connect()
        sock.sendall(
            b"GET / HTTP/1.1\r\nHost: lab\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            b"Sec-WebSocket-Protocol: " + subprotocol.encode() + b"\r\n\r\n"
        )
        answer = b""
        while b"hello" not in answer:
            answer += receive(sock)
        return sock

    def close(self) -> None:
        """Close all of them."""
        for sock in self.sockets:
            sock.close()


def receive(sock: socket.socket) -> bytes:
    """What comes next. Raises ConnectionError at the end."""
    data = sock.recv(1 << 20)
    if not data:
        raise ConnectionResetError
    return data


@dataclass(frozen=True, slots=True)
class Shape:
    """One attack: what it does, and the server's flags where they matter."""

    name: str
    run: Callable[[Attacker], None]
    flags: tuple[str, ...] = ()


def _message(subprotocol: str, make: Callable[[], bytes], *, times: int = 3) -> Callable[[Attacker], None]:
    """The same message again and again, each on a connection of its own, until the server answers or hangs up."""

    def run(attacker: Attacker) -> None:
        payload = make()
        assert len(payload) <= MOST
        for _ in range(times):
            sock = attacker.upgrade(subprotocol)
            try:
                sock.sendall(frame(BINARY if subprotocol == MSGPACK else TEXT, payload))
                receive(sock)
            except OSError:
                pass

    return run


def _flood(
    piece: bytes, *, first: bytes = b"", again: bool = False, bytes_per_s: float | None = None
) -> Callable[[Attacker], None]:
    """Frames without end; with `again` on a new connection each time the server hangs up."""

    def run(attacker: Attacker) -> None:
        batch = piece * max(1, 65_536 // len(piece))
        until = time.monotonic() + LOUD_S
        while time.monotonic() < until:
            sock = attacker.upgrade(MSGPACK)
            sock.settimeout(0.5)
            try:
                sock.sendall(first)
                while (began := time.monotonic()) < until:
                    sock.sendall(batch)
                    if bytes_per_s is not None:
                        time.sleep(max(0.0, began + len(batch) / bytes_per_s - time.monotonic()))
            except TimeoutError:  # paced: a drop at a time, as long as it lasts
                time.sleep(max(0.0, until - time.monotonic()))
            except OSError:
                if not again:
                    time.sleep(max(0.0, until - time.monotonic()))

    return run


def _unfinished(opcode: int, payload: bytes, connections: int) -> Callable[[Attacker], None]:
    """Messages that are complete but for their end, on many connections at once."""

    def run(attacker: Attacker) -> None:
        subprotocol = MSGPACK if opcode == BINARY else JSON
        for _ in range(connections):
            try:
                sock = attacker.upgrade(subprotocol)
                sock.settimeout(0.2)
                sock.sendall(frame(opcode, payload, final=False))
            except OSError:
                pass
        time.sleep(1)

    return run


def _idle(connections: int) -> Callable[[Attacker], None]:
    def run(attacker: Attacker) -> None:
        for _ in range(connections):
            attacker.connect()
        time.sleep(LOUD_S)

    return run


def _whole_answer(attacker: Attacker) -> None:
    sock = attacker.upgrade(MSGPACK)
    sock.settimeout(120)
    request = {"type": "generate", "id": 1, "prompt": "x", "max_tokens": 8000, "logprobs": 20, "stream": False}
    sock.sendall(frame(BINARY, _packed({**request, "ignore_eos": True})))
    received = 0
    while received < 1_262_144:
        received += len(receive(sock))


def _packed(value: object) -> bytes:
    return msgpack.packb(value)


def _array(item: bytes) -> bytes:
    """A frame with as many of these items under an unknown key as a message may hold."""
    count = (MOST - 64) // len(item)
    return b"\x82\xa4type\xa4ping\xa1x" + b"\xdd" + count.to_bytes(4, "big") + item * count


def _map(pair: bytes) -> bytes:
    count = (MOST - 64) // len(pair)
    return b"\xdf" + count.to_bytes(4, "big") + pair * count


def _ids(count: int) -> dict[str, object]:
    return {"type": "generate", "id": 1, "token_ids": [100 + index % 100_000 for index in range(count)]}


def _generate(**fields: object) -> dict[str, object]:
    return {"type": "generate", "id": 1, **fields}


def _text(text: str) -> bytes:
    return b'{"type":"generate","id":1,"prompt":"' + text.encode() + b'"}'


def _filled(piece: bytes, *, head: bytes = b"", tail: bytes = b"") -> bytes:
    return head + piece * ((MOST - len(head) - len(tail)) // len(piece)) + tail


_LARGE = ("--max-model-len", "1100000", "--max-queue-tokens", "1100000", "--max-batch-total-tokens", "1100000")
_HOLD = b'{"type":"ping","x":['

SHAPES = [
    Shape("nothing", lambda attacker: time.sleep(LOUD_S)),
    # Messages in msgpack.
    Shape("msgpack: a map of one key", _message(MSGPACK, lambda: _map(b"\xa1a\x00"))),
    Shape("msgpack: a map of nil keys", _message(MSGPACK, lambda: _map(b"\xc0\x00"))),
    Shape("msgpack: small numbers", _message(MSGPACK, lambda: _array(b"\x01"))),
    Shape("msgpack: short strings", _message(MSGPACK, lambda: _array(b"\xa2xy"))),
    Shape("msgpack: floats", _message(MSGPACK, lambda: _array(b"\xca\x3f\x80\0\0"))),
    Shape("msgpack: extensions", _message(MSGPACK, lambda: _array(b"\xd4\x05\x00"))),
    Shape("msgpack: empty arrays", _message(MSGPACK, lambda: _array(b"\x90"))),
    Shape("msgpack: arrays in arrays", _message(MSGPACK, lambda: b"\xdd\0\x10\0\0" * 1_000)),
    Shape("msgpack: an array that is not there", _message(MSGPACK, lambda: b"\xdd\xff\xff\xff\xff" + bytes(1000))),
    Shape("msgpack: 1,000,000 ids", _message(MSGPACK, lambda: _packed(_ids(1_000_000)))),
    Shape("msgpack: 262,144 ids", _message(MSGPACK, lambda: _packed(_ids(262_144)))),
    Shape("msgpack: 262,144 ids, let in", _message(MSGPACK, lambda: _packed(_ids(262_144)), times=1), _LARGE),
    Shape("msgpack: ids to the limit", _message(MSGPACK, lambda: _packed(_ids(1_600_000)))),
    Shape("msgpack: one long text", _message(MSGPACK, lambda: _packed(_generate(prompt="x" * (MOST - 64))))),
    Shape("msgpack: one long text, CJK", _message(MSGPACK, lambda: _packed(_generate(prompt="漢" * (MOST // 3 - 64))))),
    Shape(
        "msgpack: a text that is not UTF-8",
        _message(MSGPACK, lambda: b"\x83\xa4type\xa8generate\xa2id\x01\xa6prompt\xdb\0\x7f\0\0" + b"\xff" * 0x7F0000),
    ),
    Shape("msgpack: one long key", _message(MSGPACK, lambda: _packed({"type": "ping", "k" * (MOST - 64): 1}))),
    Shape(
        "msgpack: 1,024 empty messages",
        _message(MSGPACK, lambda: _packed(_generate(messages=[{"role": "user", "content": ""}] * 1024))),
    ),
    Shape(
        "msgpack: 1,024 long messages",
        _message(MSGPACK, lambda: _packed(_generate(messages=[{"role": "user", "content": "x" * 8000}] * 1024))),
    ),
    # Messages in JSON.
    Shape("json: a map of one key", _message(JSON, lambda: _filled(b',"a":1', head=b'{"a":1', tail=b"}"))),
    Shape("json: numbers", _message(JSON, lambda: _filled(b"1,", head=_HOLD, tail=b"1]}"))),
    Shape("json: floats", _message(JSON, lambda: _filled(b"1e-9,", head=_HOLD, tail=b"1]}"))),
    Shape("json: empty strings", _message(JSON, lambda: _filled(b'"",', head=_HOLD, tail=b"1]}"))),
    Shape("json: quotes", _message(JSON, lambda: _filled(b'"'))),
    Shape("json: empty arrays", _message(JSON, lambda: _filled(b"[],", head=_HOLD, tail=b"1]}"))),
    Shape("json: arrays in arrays", _message(JSON, lambda: _filled(b"["))),
    Shape("json: 1,000,000 ids", _message(JSON, lambda: json.dumps(_ids(1_000_000), separators=(",", ":")).encode())),
    Shape("json: 262,144 ids", _message(JSON, lambda: json.dumps(_ids(262_144), separators=(",", ":")).encode())),
    Shape("json: one long text", _message(JSON, lambda: _text("x" * (MOST - 64)))),
    Shape("json: one long text and an emoji", _message(JSON, lambda: _text("😀" + "x" * (MOST - 64)))),
    Shape("json: the longest text with an emoji", _message(JSON, lambda: _text("x" * (WIDE - 1) + "😀"))),
    Shape("json: one long text, escaped", _message(JSON, lambda: _text("\\u00e9" * (MOST // 6 - 64)))),
    Shape("json: newlines", _message(JSON, lambda: _text("\\n" * (MOST // 2 - 64)))),
    Shape("json: backslashes without end", _message(JSON, lambda: _filled(b"\\", head=b'{"a":"'))),
    Shape("json: white space", _message(JSON, lambda: _filled(b" ", tail=b"{}"))),
    Shape("json: one long number", _message(JSON, lambda: _filled(b"1", head=_HOLD, tail=b"]}"))),
    Shape("json: one long fraction", _message(JSON, lambda: _filled(b"1", head=_HOLD + b"0.", tail=b"]}"))),
    Shape("json: not JSON", _message(JSON, lambda: _filled(b"x"))),
    # Frames.
    Shape("frames: empty fragments", _flood(frame(0, b"", final=False), first=frame(BINARY, b"", final=False))),
    Shape(
        "frames: empty fragments, messages that end",
        _flood(frame(BINARY, b"", final=False) + frame(0, b"", final=False) * 10_000 + frame(0, b"\xc0")),
    ),
    Shape(
        "frames: empty fragments at 0.7 MB/s",
        _flood(frame(0, b"", final=False), first=frame(BINARY, b"", final=False), again=True, bytes_per_s=700_000),
    ),
    Shape(
        "frames: fragments of one byte",
        _flood(frame(0, b"\xc0", final=False), first=frame(BINARY, b"", final=False), again=True),
    ),
    Shape("frames: pongs", _flood(frame(PONG, b""), again=True)),
    Shape("frames: pongs at 0.7 MB/s", _flood(frame(PONG, b""), again=True, bytes_per_s=700_000)),
    Shape("frames: pings", _flood(frame(PING, b"x" * 125), again=True)),
    Shape("frames: small messages", _flood(frame(BINARY, _packed({"type": "cancel", "id": 1})), again=True)),
    Shape("frames: empty messages", _flood(frame(BINARY, b""), again=True)),
    # Memory.
    Shape("memory: 140 unfinished messages", _unfinished(BINARY, os.urandom(MOST - 1), 140)),
    Shape("memory: 60 unfinished texts with an emoji", _unfinished(TEXT, "😀".encode() + b"x" * (MOST - 8), 60)),
    Shape("memory: 1,000 unfinished messages of 1 MiB", _unfinished(BINARY, os.urandom(1 << 20), 1000)),
    # Answers, and sockets.
    Shape("answer: stream false, 20 logprobs, 8,000 tokens", _whole_answer),
    Shape("sockets: 2,100 that say nothing", _idle(2100)),
]
