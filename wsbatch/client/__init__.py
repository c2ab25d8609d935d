"""The Trio client: many generations on one WebSocket.

    async with connect("ws://127.0.0.1:8765") as client:
        async with client.generate("Once upon a time", max_tokens=64) as stream:
            async for event in stream:
                ...

`generate(url, prompt)` does the same from a script that has no Trio.
"""

import random
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Unpack

import trio

from wsbatch.auth import clean_token, without_secrets
from wsbatch.client.connection import Client, greeting
from wsbatch.client.dial import open_stream, parse_url, upgrade
from wsbatch.client.errors import ProtocolError, Refused
from wsbatch.client.request import GenerateParams, Prompt
from wsbatch.client.stream import Completion, Jitter, TokenStream, backoff_s
from wsbatch.client.watch import BatchWatch
from wsbatch.errors import ConnectionLost, RequestError
from wsbatch.wire import CODECS, MSGPACK

__all__ = [
    "BatchWatch",
    "Client",
    "Completion",
    "GenerateParams",
    "Prompt",
    "ProtocolError",
    "Refused",
    "TokenStream",
    "connect",
    "generate",
    "open_client",
]


@asynccontextmanager
async def connect(
    url: str,
    *,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    subprotocol: str = MSGPACK.subprotocol,
    connect_timeout_s: float = 10.0,
    keepalive_s: float | None = 20.0,
    close_timeout_s: float = 2.0,
    retries: int = 0,
    jitter: Jitter = random.random,
) -> AsyncIterator[Client]:
    """Connect to a server and wait for its hello.

    Args:
        url: ws:// or wss://.
        auth_token: sent as `Authorization: Bearer`, without the white space around it.
        ssl_context: for wss; None trusts the system's authorities.
        subprotocol: `wsbatch.v1.msgpack` or `wsbatch.v1.json`.
        connect_timeout_s: for everything up to the hello, on each try.
        keepalive_s: silence after which the server is pinged, and again after which it is given up; None never does.
        close_timeout_s: bound on leaving the block.
        retries: how often a refusal that says when to retry (503) is retried.
        jitter: uniform in [0, 1); spreads the retries of many clients.

    Raises ConnectionLost where there is no connection to be had, the server's refusal (Unauthorized, QueueFull,
    Draining …), Refused for another HTTP status, ProtocolError, ValueError for a bad argument. Exceptions from the
    block come out as they are, never in a group.
    """
    address = parse_url(url)
    async with AsyncExitStack() as stack:
        while True:
            deadline = trio.current_time() + connect_timeout_s
            try:
                with trio.fail_after(connect_timeout_s):
                    stream = await open_stream(address, ssl_context)
            except trio.TooSlowError:
                raise ConnectionLost(f"{without_secrets(url)} did not answer within {connect_timeout_s} s") from None
            opening = open_client(
                stream,
                address.host_header,
                address.target,
                auth_token=auth_token,
                subprotocol=subprotocol,
                connect_timeout_s=max(0.0, deadline - trio.current_time()),
                keepalive_s=keepalive_s,
                close_timeout_s=close_timeout_s,
                jitter=jitter,
            )
            try:
                client = await stack.enter_async_context(opening)
                break
            except RequestError as exc:
                delay_s = backoff_s(exc, jitter)
                if retries == 0 or delay_s is None:
                    raise
            retries -= 1
            await trio.sleep(delay_s)
        yield client


@asynccontextmanager
async def open_client(
    stream: trio.abc.Stream,
    host: str,
    target: str = "/",
    *,
    auth_token: str | None = None,
    subprotocol: str = MSGPACK.subprotocol,
    connect_timeout_s: float = 10.0,
    keepalive_s: float | None = 20.0,
    close_timeout_s: float = 2.0,
    jitter: Jitter = random.random,
) -> AsyncIterator[Client]:
    """`connect` over a stream that is already there (a socket, an in-memory pair), which it closes."""
    if subprotocol not in CODECS:
        raise ValueError(f"subprotocol must be one of {', '.join(CODECS)}, got {subprotocol!r}")
    if auth_token is not None and not (auth_token := clean_token(auth_token, name="auth_token")).isascii():
        raise ValueError("auth_token must be printable ASCII")
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        # The nursery would wrap what is raised in it in a group; so nothing is, not even Cancelled.
        try:
            tasks = await nursery.start(_background)
            try:
                client = await _open(
                    tasks,
                    stream,
                    host=host,
                    target=target,
                    subprotocol=subprotocol,
                    auth_token=auth_token,
                    timeout_s=connect_timeout_s,
                    jitter=jitter,
                )
                tasks.start_soon(client.receive)
                tasks.start_soon(client.transmit)
                if keepalive_s is not None:
                    tasks.start_soon(client.keep_alive, keepalive_s)
                try:
                    yield client
                finally:
                    await client.close(close_timeout_s)
            finally:
                tasks.cancel_scope.cancel()
                await trio.aclose_forcefully(stream)
        except BaseException as exc:  # noqa: BLE001  (raised below)
            raised = exc
    if raised is not None:
        raise raised


async def _background(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """The connection's own tasks outlive a cancelled caller for as long as `close` takes, to say what it left."""
    async with trio.open_nursery() as tasks:
        tasks.cancel_scope.shield = True
        task_status.started(tasks)
        await trio.sleep_forever()


async def _open(
    tasks: trio.Nursery,
    stream: trio.abc.Stream,
    *,
    host: str,
    target: str,
    subprotocol: str,
    auth_token: str | None,
    timeout_s: float,
    jitter: Jitter,
) -> Client:
    codec = CODECS[subprotocol]()
    try:
        with trio.fail_after(timeout_s):
            websocket = await upgrade(
                tasks, stream, host=host, target=target, subprotocol=subprotocol, auth_token=auth_token
            )
            hello = await greeting(websocket, codec)
    except trio.TooSlowError:
        raise ConnectionLost(f"{host} did not say hello within {timeout_s:g} s") from None
    return Client(websocket, stream, codec=codec, hello=hello, jitter=jitter)


def generate(
    url: str,
    prompt: Prompt,
    *,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    retries: int = 0,
    **params: Unpack[GenerateParams],
) -> Completion:
    """Connect, generate, disconnect: for scripts without Trio. Blocks until done; raises what `connect` and
    `Client.complete` raise. `retries` counts for each of the two.
    """

    async def main() -> Completion:
        async with connect(url, auth_token=auth_token, ssl_context=ssl_context, retries=retries) as client:
            return await client.complete(prompt, retries=retries, **params)

    return trio.run(main)
