#!/usr/bin/env python3
"""A complete client on asyncio and the `websockets` library: the protocol needs nothing of wsbatch's.

    python asyncio_client.py ws://127.0.0.1:8765 "Once upon a time" "The sea is"

Needs `pip install websockets msgpack`. All prompts are asked at once on one connection; each answer is printed whole,
in the order in which they end. With one prompt it streams. Ctrl-C cancels. The protocol is docs/protocol.md.
"""

import argparse
import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgpack
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

SUBPROTOCOL = "wsbatch.v1.msgpack"


class ServerError(Exception):
    """An `error` frame, or the loss of the connection."""

    def __init__(self, code: str, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.retry_after_ms = retry_after_ms


class Client:
    """Many generations on one connection. Use as `async with Client(url) as client`."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # A server's frames are small, but a whole answer with log probabilities (`stream: false`) may not be.
        self._connecting = connect(url, subprotocols=[SUBPROTOCOL], additional_headers=headers, max_size=64 * 2**20)
        self._socket: ClientConnection
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._last_id = 0
        self._lost: ServerError | None = None
        self.hello: dict[str, Any] = {}

    async def __aenter__(self) -> "Client":
        self._socket = await self._connecting.__aenter__()
        self.hello = msgpack.unpackb(await self._socket.recv())
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._connecting.__aexit__(*exc_info)
        await self._reader

    async def generate(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of one generation: accepted, tokens …, finished. Raises ServerError.

        Close it (`contextlib.aclosing`) where it is left before its end: that cancels the request on the server.
        """
        if self._lost is not None:
            raise self._lost
        self._last_id += 1
        id = self._last_id
        # The reader must never wait for a slow consumer: it would see no pings. What can gather here is bounded by
        # max_tokens.
        answers = self._answers[id] = asyncio.Queue()
        await self._send({"type": "generate", "id": id, **request})
        try:
            while True:
                frame = await answers.get()
                if frame["type"] == "error":
                    raise ServerError(frame["code"], frame["message"], frame.get("retry_after_ms"))
                yield frame
                if frame["type"] == "finished":
                    return
        finally:
            if self._answers.pop(id, None) is not None and self._lost is None:
                await self._send({"type": "cancel", "id": id})

    async def _send(self, frame: dict[str, Any]) -> None:
        try:
            await self._socket.send(msgpack.packb(frame))
        except ConnectionClosed as closed:
            raise ServerError("connection_lost", str(closed)) from closed

    async def _read(self) -> None:
        """Hand each frame to its request, until the connection ends."""
        refusal = None
        try:
            async for message in self._socket:
                frame = msgpack.unpackb(message)
                if frame["type"] == "error" and "id" not in frame:
                    refusal = frame  # about the connection as a whole; its end follows
                answers = self._answers.get(frame.get("id"))
                if answers is None:  # of a request that was left, or of no request: unknown frames are ignored
                    continue
                if frame["type"] in ("finished", "error"):
                    del self._answers[frame["id"]]
                answers.put_nowait(frame)
            why = "the server closed the connection"
        except ConnectionClosed as closed:
            why = str(closed)
        lost = refusal or {"type": "error", "code": "connection_lost", "message": why}
        self._lost = ServerError(lost["code"], lost["message"])
        for answers in self._answers.values():
            answers.put_nowait(lost)
        self._answers.clear()


async def ask(client: Client, prompt: str, options: argparse.Namespace, *, stream: bool) -> None:
    """Print one answer; a refusal that says when to retry (a full queue) is retried."""
    request = {
        "messages" if options.chat else "prompt": [{"role": "user", "content": prompt}] if options.chat else prompt,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    for tries_left in reversed(range(5)):
        parts: list[str] = []
        try:
            async for event in client.generate(**request):
                if text := event.get("text"):
                    parts.append(text)
                    if stream:
                        print(text, end="", flush=True)
            break
        except ServerError as error:
            if error.retry_after_ms is None or parts or not tries_left:
                raise
            # Once to twice what the server says: clients must not come back all together.
            await asyncio.sleep(error.retry_after_ms / 1000 * (1 + random.random()))
    print() if stream else print(f"--- {prompt}\n{''.join(parts)}")


async def main(options: argparse.Namespace) -> None:
    async with Client(options.url, token=options.token) as client, asyncio.TaskGroup() as tasks:
        for prompt in options.prompts:
            tasks.create_task(ask(client, prompt, options, stream=len(options.prompts) == 1))


def run() -> int:
    parser = argparse.ArgumentParser(description="Ask a wsbatch server, with asyncio and websockets.")
    parser.add_argument("url", help="ws:// or wss:// address")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages, not text to continue")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--token", default=os.environ.get("WSBATCH_AUTH_TOKEN"), help="default: $WSBATCH_AUTH_TOKEN")
    problem = None
    try:
        asyncio.run(main(parser.parse_args()))
    except* ServerError as group:
        problem = str(_first(group))
    except* (OSError, InvalidStatus) as group:
        problem = f"cannot connect: {_first(group)}"
    if problem is not None:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
