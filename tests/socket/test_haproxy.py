"""A rolling restart of two servers behind the real HAProxy, with docs/haproxy.cfg, under load: no request is lost."""

import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from wsbatch.client import Refused, connect
from wsbatch.errors import ConnectionLost, RequestError

CONFIG = Path(__file__).parents[2] / "docs" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
CLIENTS = 16

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (apt-get install haproxy)")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def balancing(port: int, server_ports: tuple[int, int]) -> AsyncIterator[None]:
    """HAProxy on `port` while the block runs."""
    addresses = {
        "BIND": f"127.0.0.1:{port}",
        "SERVER_A": f"127.0.0.1:{server_ports[0]}",
        "SERVER_B": f"127.0.0.1:{server_ports[1]}",
    }
    command = [HAPROXY or "", "-db", "-f", str(CONFIG)]
    process = subprocess.Popen(command, env={**os.environ, **addresses}, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Load:
    """Clients that ask, one request after the other, and come back where they are refused.

    Attributes:
        count: of what became of the requests; `lost` was accepted and never ended.
        by_server: requests answered, by the port that answered.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.count = Counter[str]()
        self.stopping = False

    async def client(self, seed: int) -> None:
        while not self.stopping:
            try:
                async with connect(self.url) as connection:
                    while not self.stopping and connection.draining is None:
                        await self._ask(connection, seed)
            except (ConnectionLost, RequestError, Refused):
                self.count["not connected"] += 1
                await trio.sleep(0.05)

    async def _ask(self, connection: Any, seed: int) -> None:
        accepted = False
        try:
            async with connection.generate("Hello", max_tokens=40, temperature=1.0, seed=seed) as stream:
                async for event in stream:
                    accepted = True
                    finished = event
            self.count[finished.finish_reason] += 1
        except (ConnectionLost, RequestError) as error:
            kind = "lost" if accepted else "refused" if isinstance(error, RequestError) else "unanswered"
            self.count[kind] += 1
            if isinstance(error, ConnectionLost):
                raise


async def ready(port: int) -> None:
    """Wait until the load balancer has a server for a newcomer."""
    with trio.fail_after(30):
        while True:
            try:
                async with connect(f"ws://127.0.0.1:{port}"):
                    return
            except (ConnectionLost, Refused, RequestError):
                await trio.sleep(0.05)


async def test_a_rolling_restart_loses_nothing(serve_process: Callable[..., Any]) -> None:
    flags = ("--scheduler", "continuous", "--max-batch-size", "16")

    def start(port: int) -> Any:
        return serve_process(*flags, model="simulated:tau_ms=5", port=port)

    port = free_port()
    servers = [start(0), start(0)]
    async with balancing(port, (servers[0].port, servers[1].port)), trio.open_nursery() as nursery:
        await ready(port)
        load = Load(f"ws://127.0.0.1:{port}")
        for seed in range(CLIENTS):
            nursery.start_soon(load.client, seed)
        for index in (0, 1):
            before = load.count["length"]
            with trio.fail_after(60):
                while load.count["length"] < before + 2 * CLIENTS:  # noqa: ASYNC110
                    await trio.sleep(0.02)
            servers[index].terminate()
            status, err = await trio.to_thread.run_sync(servers[index].end)
            assert status == 0, err
            servers[index] = start(servers[index].port)
            # Until the balancer sends newcomers to it: only then may the other one go.
            with trio.fail_after(30):
                while b"wsbatch_connections 0.0" in await metrics_beside_a_newcomer(  # noqa: ASYNC110
                    port, servers[index].port
                ):
                    await trio.sleep(0.05)
        before = load.count["length"]
        with trio.fail_after(60):
            while load.count["length"] < before + 2 * CLIENTS:  # noqa: ASYNC110
                await trio.sleep(0.02)
        load.stopping = True
    assert load.count["lost"] == 0, load.count
    assert load.count["unanswered"] == 0, load.count
    assert load.count["shutdown"] == 0, load.count
    assert load.count["not connected"] == 0, load.count


async def metrics_beside_a_newcomer(port: int, server_port: int) -> bytes:
    """What this server says of itself while one more client has come to the load balancer."""
    async with connect(f"ws://127.0.0.1:{port}"), await trio.open_tcp_stream("127.0.0.1", server_port) as stream:
        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")
        return b"".join([part async for part in stream])
