"""`connect`: from a URL to a `Client`, and down again. `generate` does all of it in one call."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Unpack, cast

import trio

from wsbatch.auth import without_secrets
from wsbatch.client.connection import Client
from wsbatch.client.dial import greet, open_stream, parse_url, upgrade
from wsbatch.client.options import ConnectOptions, ConnectParams, ScriptParams
from wsbatch.client.request import GenerateParams, Prompt
from wsbatch.client.stream import Completion, backoff_s
from wsbatch.errors import ConnectionLost, RequestError
from wsbatch.nurseries import background_tasks
from wsbatch.wire import CODECS


@asynccontextmanager
async def connect(url: str, *, retries: int = 0, **params: Unpack[ConnectParams]) -> AsyncIterator[Client]:
    """Connect to a server and wait for its hello.

    Args:
        url: ws:// or wss://.
        retries: how often a refusal that says when to retry (503) is retried.
        params: see `ConnectOptions`.

    Raises ConnectionLost where there is no connection to be had, the server's refusal (Unauthorized, QueueFull,
    Draining …), Refused for another HTTP status, ProtocolError, ValueError for a bad argument, TypeError for an unknown
    one. Exceptions from the block come out as they are, never in a group.
    """
    address, options = parse_url(url), ConnectOptions(**params)
    async with AsyncExitStack() as stack:
        while True:
            deadline_s = trio.current_time() + options.connect_timeout_s
            try:
                with trio.fail_at(deadline_s):
                    stream = await open_stream(address, options.ssl_context)
            except trio.TooSlowError:
                where, bound_s = without_secrets(url), options.connect_timeout_s
                raise ConnectionLost(f"{where} did not answer within {bound_s:g} s") from None
            opened = _opened(stream, address.host_header, address.target, options, deadline_s=deadline_s)
            try:
                client = await stack.enter_async_context(opened)
                break
            except RequestError as exc:
                delay_s = backoff_s(exc, options.jitter)
                if retries == 0 or delay_s is None:
                    raise
            retries -= 1
            await trio.sleep(delay_s)
        yield client


@asynccontextmanager
async def open_client(
    stream: trio.abc.Stream, host: str, target: str = "/", **params: Unpack[ConnectParams]
) -> AsyncIterator[Client]:
    """`connect` over a stream that is already there (a socket, an in-memory pair), which it closes."""
    options = ConnectOptions(**params)
    deadline_s = trio.current_time() + options.connect_timeout_s
    async with _opened(stream, host, target, options, deadline_s=deadline_s) as client:
        yield client


@asynccontextmanager
async def _opened(
    stream: trio.abc.Stream, host: str, target: str, options: ConnectOptions, *, deadline_s: float
) -> AsyncIterator[Client]:
    async with background_tasks() as nursery:
        tasks = await nursery.start(_background)
        try:
            client = await _greeted(tasks, stream, host, target, options, deadline_s=deadline_s)
            tasks.start_soon(client.receive)
            tasks.start_soon(client.transmit)
            if options.keepalive_s is not None:
                tasks.start_soon(client.keep_alive, options.keepalive_s)
            try:
                yield client
            finally:
                await client.close(options.close_timeout_s)
        finally:
            tasks.cancel_scope.cancel()
            await trio.aclose_forcefully(stream)


async def _background(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """The connection's own tasks outlive a cancelled caller for as long as `close` takes, to say what it left."""
    async with trio.open_nursery() as tasks:
        tasks.cancel_scope.shield = True
        task_status.started(tasks)
        await trio.sleep_forever()


async def _greeted(
    tasks: trio.Nursery, stream: trio.abc.Stream, host: str, target: str, options: ConnectOptions, *, deadline_s: float
) -> Client:
    codec = CODECS[options.subprotocol]()
    try:
        with trio.fail_at(deadline_s):
            websocket = await upgrade(tasks, stream, host, target, options)
            hello = await greet(websocket, codec)
    except trio.TooSlowError:
        raise ConnectionLost(f"{host} did not say hello within {options.connect_timeout_s:g} s") from None
    return Client(websocket, stream, codec=codec, hello=hello, jitter=options.jitter)


def generate(url: str, prompt: Prompt, *, retries: int = 0, **params: Unpack[ScriptParams]) -> Completion:
    """Connect, generate, disconnect: for scripts without Trio. Blocks until done.

    Args:
        url: ws:// or wss://.
        prompt: see `Client.generate`.
        retries: how often connecting, and then the request, is retried where a refusal says when.
        params: what `connect` and `Client.generate` take.

    Raises what `connect` and `Client.complete` raise.
    """
    own = ConnectParams.__annotations__
    how = cast(ConnectParams, {name: value for name, value in params.items() if name in own})
    what = cast(GenerateParams, {name: value for name, value in params.items() if name not in own})

    async def main() -> Completion:
        async with connect(url, retries=retries, **how) as client:
            return await client.complete(prompt, retries=retries, **what)

    return trio.run(main)
