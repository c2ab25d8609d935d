"""`open_pool`: from addresses to a running pool, and down again."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Unpack

import trio

from wsbatch.auth import without_secrets
from wsbatch.client import ConnectOptions, ConnectParams, connect
from wsbatch.client.dial import parse_url
from wsbatch.config import PoolConfig
from wsbatch.errors import ConnectionLost
from wsbatch.nurseries import background_tasks
from wsbatch.pool.engine_pool import EnginePool
from wsbatch.pool.upkeep import Dial


@asynccontextmanager
async def open_pool(
    replicas: Iterable[str] | dict[str, Dial], config: PoolConfig | None = None, **params: Unpack[ConnectParams]
) -> AsyncIterator[EnginePool]:
    """A running pool over these servers, once the first of them is ready.

    Args:
        replicas: their URLs (ws://, wss://); or names, and how to open a connection to each.
        config: see `PoolConfig`.
        params: how to connect to the replicas whose URLs are given; see `ConnectOptions`.

    Raises ConnectionLost where none is ready within `first_replica_s`, ValueError for a bad URL or option. Leaving the
    block ends what is live with `shutdown`; the replicas live on.
    """
    config = config or PoolConfig()
    pool = EnginePool(config)
    dials = replicas if isinstance(replicas, dict) else _by_name(replicas, params)
    for name, dial in dials.items():
        pool.add(name, dial)
    async with background_tasks() as nursery:
        nursery.start_soon(pool.run)
        with trio.move_on_after(config.first_replica_s) as patience:
            await pool.wait_ready()
        if patience.cancelled_caught:
            raise ConnectionLost(f"none of {', '.join(dials)} was ready within {config.first_replica_s:g} s")
        yield pool


def _by_name(urls: Iterable[str], params: ConnectParams) -> dict[str, Dial]:
    """Named by their URLs, as these may be logged: one that is named as another already is gets a number."""
    dials: dict[str, Dial] = {}
    for url in dict.fromkeys(urls):
        name = shown = without_secrets(url)
        number = 1
        while name in dials:
            number += 1
            name = f"{shown} ({number})"
        dials[name] = _dialling(url, params)
    return dials


def _dialling(url: str, params: ConnectParams) -> Dial:
    """How to connect to a replica by its URL. Raises ValueError for a bad one, and for bad options."""
    parse_url(url)
    ConnectOptions(**params)
    # The pool asks often enough by itself; a replica that is silent is found out that way.
    how: ConnectParams = {"keepalive_s": None, **params}
    return lambda: connect(url, **how)
