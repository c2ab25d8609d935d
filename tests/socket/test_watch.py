"""`Client.watch` against a server on a socket."""

import pytest
import trio

from wsbatch.batching.costs import StepCost
from wsbatch.client import connect
from wsbatch.config import ServerConfig
from wsbatch.errors import BadRequest, ConnectionLost
from wsbatch.testing import Served, serving


def step(served: Served) -> None:
    now_s = trio.current_time()
    cost = StepCost(2, 0, 0, 2, 1, 0.01)
    phases = [(1, "decode"), (2, "kept")]
    served.engine.recorder.record(phases, cost, tokens=1, started_s=now_s, ended_s=now_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("subprotocol", ["wsbatch.v1.msgpack", "wsbatch.v1.json"])
async def test_snapshots_come_as_the_batch_runs(subprotocol: str) -> None:
    async with serving(ServerConfig(port=0, allow_watch=True)) as served:
        with trio.fail_after(30):
            async with connect(served.server.url, subprotocol=subprotocol) as client:
                assert client.hello.watch
                async with client.watch() as watch:
                    first = await anext(watch)
                    assert (first.scheduler, first.slots, first.steps) == ("continuous", 8, ())
                    step(served)
                    second = await anext(watch)
                    assert [one.rows for one in second.steps] == [((0, 1, "decode"), (1, 2, "kept"))]
                    assert second.slot_utilization == 0.5
                    with pytest.raises(RuntimeError, match="already"):
                        async with client.watch():
                            pass
                completion = await client.complete("hi", max_tokens=3)  # the connection is of use as before
                assert completion.text == "abc"
                assert not served.engine.recorder.watched
                async with client.watch() as watch:
                    assert (await anext(watch)).steps == ()


async def test_a_server_that_does_not_allow_it_is_not_asked() -> None:
    async with serving(ServerConfig(port=0)) as served, connect(served.server.url) as client:
        assert not client.hello.watch
        with pytest.raises(BadRequest, match="allow-watch"):
            async with client.watch():
                pass


async def test_the_end_of_the_connection_ends_the_iteration() -> None:
    async with serving(ServerConfig(port=0, allow_watch=True)) as served, connect(served.server.url) as client:
        async with client.watch() as watch:
            await anext(watch)
            served.server.shutdown()
            with trio.fail_after(30), pytest.raises(ConnectionLost, match="1001"):
                async for _ in watch:
                    pass
        with pytest.raises(ConnectionLost):
            async with client.watch():
                pass
