"""The server driven by the `websockets` library: a client that nobody here wrote, in a thread of its own."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import pytest
import trio
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from wsbatch.config import ServerConfig
from wsbatch.testing import Served, serving

T = TypeVar("T")


async def talk(served: Served, conversation: Callable[[ClientConnection], T], **options: Any) -> T:
    def run() -> T:
        with connect(served.server.url, open_timeout=10, close_timeout=10, **options) as socket:
            return conversation(socket)

    return await trio.to_thread.run_sync(run)


def read(socket: ClientConnection) -> dict[str, Any]:
    message = socket.recv(timeout=10)
    return json.loads(message) if isinstance(message, str) else msgpack.unpackb(message)


def read_to_end(socket: ClientConnection) -> tuple[list[str], int]:
    """The types of all frames until the server closes, and its close code."""
    kinds = []
    try:
        while True:
            kinds.append(read(socket)["type"])
    except ConnectionClosed as closed:
        return kinds, closed.rcvd.code if closed.rcvd else 1006


@pytest.mark.parametrize("subprotocol", [None, "wsbatch.v1.msgpack", "wsbatch.v1.json"])
async def test_a_whole_conversation(subprotocol: str | None) -> None:
    as_json = subprotocol == "wsbatch.v1.json"

    def conversation(socket: ClientConnection) -> list[dict[str, Any]]:
        assert socket.subprotocol == subprotocol
        ask = {"type": "generate", "id": "q", "prompt": "hi", "max_tokens": 4}
        socket.send(json.dumps(ask) if as_json else msgpack.packb(ask))
        frames = [read(socket)]
        while frames[-1]["type"] != "finished":
            frames.append(read(socket))
        assert socket.ping().wait(10)
        return frames

    options = {"subprotocols": [Subprotocol(subprotocol)]} if subprotocol else {}
    async with serving(ServerConfig(port=0)) as served:
        hello, accepted, *tokens, finished = await talk(served, conversation, **options)
    assert (hello["type"], hello["model"], hello["state"]) == ("hello", "scripted", "ready")
    assert (accepted["type"], accepted["id"], accepted["prompt_tokens"]) == ("accepted", "q", 2)
    assert [frame["type"] for frame in tokens] == ["tokens"] * len(tokens)
    assert "".join(frame["text"] for frame in tokens) == "abcd"
    assert (finished["finish_reason"], finished["usage"]["completion_tokens"]) == ("length", 4)


async def test_many_requests_on_one_connection() -> None:
    def conversation(socket: ClientConnection) -> dict[int, str]:
        texts = dict.fromkeys(range(20), "")
        for id in texts:
            socket.send(msgpack.packb({"type": "generate", "id": id, "prompt": "hi", "max_tokens": id + 1}))
        ended = 0
        while ended < len(texts):
            frame = read(socket)
            if frame["type"] == "tokens":
                texts[frame["id"]] += frame["text"]
            ended += frame["type"] == "finished"
        return texts

    async with serving(ServerConfig(port=0)) as served:
        texts = await talk(served, conversation)
    assert texts == {id: "abcdefghijklmnopqrstuvwxyz"[: id + 1] for id in range(20)}


async def test_fragments_and_compression_offers() -> None:
    def conversation(socket: ClientConnection) -> str:
        data = msgpack.packb({"type": "generate", "id": 1, "prompt": "hi", "max_tokens": 1})
        socket.send(bytes([byte]) for byte in data)  # a message in as many fragments as it has bytes
        return " ".join(read(socket)["type"] for _ in range(4))

    async with serving(ServerConfig(port=0)) as served:
        assert await talk(served, conversation, compression="deflate") == "hello accepted tokens finished"


async def test_a_cancel() -> None:
    def conversation(socket: ClientConnection) -> dict[str, Any]:
        read(socket)
        socket.send(msgpack.packb({"type": "generate", "id": 1, "prompt": "hi", "max_tokens": 100_000}))
        socket.send(msgpack.packb({"type": "cancel", "id": 1}))
        while (frame := read(socket))["type"] != "finished":
            pass
        return frame

    async with serving(ServerConfig(port=0), interval_s=0.01) as served:
        assert (await talk(served, conversation))["finish_reason"] == "cancelled"


@pytest.mark.parametrize(
    ("message", "code"),
    [(b"\xc1", 1007), ("text", 1007), (b"x" * 2_000_000, 1009)],
    ids=["not msgpack", "text", "too big"],
)
async def test_what_ends_a_connection(message: bytes | str, code: int) -> None:
    def conversation(socket: ClientConnection) -> int:
        read(socket)
        socket.send(message)
        return read_to_end(socket)[1]

    async with serving(ServerConfig(port=0, max_message_bytes=1_000_000)) as served:
        assert await talk(served, conversation) == code
        assert await talk(served, lambda socket: read(socket)["type"]) == "hello"


async def test_a_refused_handshake() -> None:
    async with serving(ServerConfig(port=0, auth_token="s3cret")) as served:
        with pytest.raises(InvalidStatus) as refused:
            await talk(served, read)
        assert refused.value.response.status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        assert (await talk(served, read, additional_headers=headers))["type"] == "hello"


async def test_draining_is_a_clean_close() -> None:
    async with serving(ServerConfig(port=0)) as served:

        def conversation(socket: ClientConnection) -> tuple[list[str], int]:
            hello = read(socket)["type"]
            trio.from_thread.run_sync(lambda: nursery.start_soon(served.server.drain))
            kinds, code = read_to_end(socket)
            return [hello, *kinds], code

        async with trio.open_nursery() as nursery:
            assert await talk(served, conversation) == (["hello", "draining"], 1001)
