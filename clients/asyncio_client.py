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
from contextlib import suppress
from typing import Any

import msgpack
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

SUBPROTOCOL = "wsbatch.v1.msgpack"
HELLO_TIMEOUT_S = 10


class ServerError(Exception):
    """An `error` frame, the loss of the connection, or a frame that cannot be read (`protocol_error`)."""

    def __init__(self, code: str, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
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
        try:
            self.hello = await self._greeting()
        except BaseException:
            await self._connecting.__aexit__(*sys.exc_info())
            raise
        self._reader = asyncio.create_task(self._read())
        return self

    async def _greeting(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = decoded(await self._socket.recv())
        except ConnectionClosed as closed:
            raise ServerError("connection_lost", str(closed)) from closed
        except TimeoutError:
            raise ServerError("timeout", f"no hello came within {HELLO_TIMEOUT_S} s") from None
        if frame["type"] == "error":
            raise error_of(frame)
        if frame["type"] != "hello":
            raise ServerError("protocol_error", f"a hello was due, got {frame['type']!r}")
        return frame

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
        try:
            await self._send({"type": "generate", "id": id, **request})
            while True:
                frame = await answers.get()
                if frame["type"] == "error":
                    raise error_of(frame)
                yield frame
                if frame["type"] == "finished":
                    return
        finally:
            if self._answers.pop(id, None) is not None and self._lost is None:
                with suppress(ServerError):  # the end of the connection cancels it too
                    await self._send({"type": "cancel", "id": id})

    async def _send(self, frame: dict[str, Any]) -> None:
        try:
            await self._socket.send(msgpack.packb(frame))
        except ConnectionClosed as closed:
            raise ServerError("connection_lost", str(closed)) from closed

    async def _read(self) -> None:
        """Hand each frame to its request until the connection ends; whatever ends it ends every request."""
        refusal = None
        try:
            async for message in self._socket:
                frame = decoded(message)
                if frame["type"] == "error" and "id" not in frame:
                    refusal = error_of(frame)  # about the connection as a whole; its end follows
                answers = self._answers.get(frame.get("id"))
                if answers is None:  # of a request that was left, or of no request: unknown frames are ignored
                    continue
                if frame["type"] in ("finished", "error"):
                    del self._answers[frame["id"]]
                answers.put_nowait(frame)
            lost = ServerError("connection_lost", "the server closed the connection")
        except ConnectionClosed as closed:
            lost = ServerError("connection_lost", str(closed))
        except ServerError as unreadable:
            lost = unreadable
        self._lost = refusal or lost
        frame = {"type": "error", "code": self._lost.code, "message": self._lost.message}
        for answers in self._answers.values():
            answers.put_nowait(frame)
        self._answers.clear()
        await self._socket.close()


# What is read of a frame, by type; `id` where it has one.
FIELDS: dict[str, dict[str, type]] = {
    "error": {"code": str, "message": str},
    "accepted": {"seed": int},
    "tokens": {"index": int, "token_ids": list, "text": str},
    "finished": {"finish_reason": str, "text": str},
}


def decoded(message: str | bytes) -> dict[str, Any]:
    """The frame in a message. Raises ServerError where it is none, or lacks what this client reads."""
    try:
        frame = msgpack.unpackb(message) if isinstance(message, bytes) else None
    except Exception as error:  # msgpack raises several kinds, ValueError and its own among them
        raise ServerError("protocol_error", f"the server sent a frame that cannot be read: {error!r}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise ServerError("protocol_error", "the server sent a message that is no frame")
    wanted = FIELDS.get(frame["type"], {})
    wrong = [name for name, kind in wanted.items() if not isinstance(frame.get(name), kind)]
    if not isinstance(frame.get("id"), int | str | None):
        wrong.append("id")
    if wrong:
        raise ServerError("protocol_error", f"the server sent a {frame['type']} frame without a valid {wrong[0]}")
    return frame


def error_of(frame: dict[str, Any]) -> ServerError:
    """The exception that an `error` frame stands for."""
    retry_after_ms = frame.get("retry_after_ms")
    return ServerError(frame["code"], frame["message"], retry_after_ms if isinstance(retry_after_ms, int) else None)


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
            if event["finish_reason"] not in ("stop", "length"):
                raise ServerError(event["finish_reason"], "the server ended the answer before it was whole")
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
    options = parser.parse_args()
    if options.token is not None and not (token := options.token.strip()):
        parser.error("the token is empty: give one, or none")
    options.token = None if options.token is None else token
    problem = None
    try:
        asyncio.run(main(options))
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
