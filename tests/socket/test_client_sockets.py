"""The client over real sockets, against the real server with a simulated model."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trustme

from wsbatch.client import Client, connect, generate
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.engine.open import open_engine
from wsbatch.errors import ConnectionLost, QueueFull, Unauthorized
from wsbatch.messages import Accepted, Finished, Tokens
from wsbatch.server.serve import Server, serve
from wsbatch.wire import SUBPROTOCOLS


@asynccontextmanager
async def running(config: ServerConfig) -> AsyncIterator[Server]:
    async with (
        open_engine(EngineConfig(model="simulated")) as engine,
        trio.open_nursery() as nursery,
    ):
        yield await nursery.start(serve, engine, config)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("subprotocol", SUBPROTOCOLS)
async def test_tokens_come_through(subprotocol: str) -> None:
    async with running(ServerConfig(port=0)) as server, connect(server.url, subprotocol=subprotocol) as client:
        async with client.generate("hello", max_tokens=20, ignore_eos=True, seed=3) as stream:
            events = [event async for event in stream]
        assert isinstance(events[0], Accepted)
        assert isinstance(events[-1], Finished)
        streamed = [event for event in events if isinstance(event, Tokens)]
        ids = [id for event in streamed for id in event.token_ids]
        text = "".join(event.text for event in streamed) + events[-1].text
        assert len(ids) == 20
        whole = await client.complete("hello", max_tokens=20, ignore_eos=True, seed=3, stream=False)
        assert (whole.text, list(whole.token_ids)) == (text, ids)


async def test_thirty_at_once_on_one_connection() -> None:
    config = ServerConfig(port=0, max_live_requests=30)
    async with running(config) as server, connect(server.url) as client:
        lengths = {}

        async def ask(client: Client, n: int) -> None:
            lengths[n] = len((await client.complete(f"prompt {n}", max_tokens=1 + n % 7, ignore_eos=True)).token_ids)

        async with trio.open_nursery() as nursery:
            for n in range(30):
                nursery.start_soon(ask, client, n)
        assert lengths == {n: 1 + n % 7 for n in range(30)}


async def test_generate_without_trio() -> None:
    async with running(ServerConfig(port=0, auth_token="s3cret")) as server:
        call = partial(generate, server.url, "hello", auth_token="s3cret", max_tokens=3, ignore_eos=True)
        completion = await trio.to_thread.run_sync(call)
        assert len(completion.token_ids) == 3


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(chain, append=True)
    certificate.private_key_pem.write_to_path(key)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with running(ServerConfig(port=0, certfile=str(chain), keyfile=str(key))) as server:
        url = f"wss://localhost:{server.port}"
        async with connect(url, ssl_context=context) as client:
            assert (await client.complete("hello", max_tokens=2, ignore_eos=True)).token_ids
        with pytest.raises(ConnectionLost, match=r"(?i)certificate"):
            async with connect(url):
                pass


async def test_refusals_before_the_upgrade() -> None:
    async with running(ServerConfig(port=0, auth_token="s3cret", max_connections=1)) as server:
        with pytest.raises(Unauthorized, match="auth token"):
            async with connect(server.url, auth_token="wrong"):
                pass
        async with connect(f"{server.url}/?token=s3cret"):
            delays: list[float] = []

            def jitter() -> float:
                delays.append(trio.current_time())
                return 0.0

            with pytest.raises(QueueFull, match="1 connections") as caught:
                async with connect(server.url, auth_token="s3cret", retries=1, jitter=jitter):
                    pass
            assert caught.value.retry_after_ms == 1000
            assert len(delays) == 2, "asked for both refusals; the second was one too many"


async def test_nobody_listens() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    with pytest.raises(ConnectionLost, match=f"cannot connect to 127.0.0.1:{port}"):
        async with connect(f"ws://127.0.0.1:{port}"):
            pass


async def test_the_server_goes_away() -> None:
    async with running(ServerConfig(port=0)) as server, connect(server.url) as client:
        async with client.generate("hello", max_tokens=5000, ignore_eos=True) as stream:
            assert isinstance(await anext(stream), Accepted)
            server.shutdown()
            events = [event async for event in stream]
        # Every accepted request gets its terminal frame, also now.
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reason in ("cancelled", "shutdown")
        with pytest.raises(ConnectionLost, match="1001"):
            await until_closed(client)


async def until_closed(client: Client) -> None:
    while True:
        await client.complete("hello", max_tokens=1)
