"""Replicas that are taken out of a pool in good order, in virtual time: nothing fails, and nobody is blamed."""

import pytest
import trio
from trio.testing import MockClock

from virtual_replica import VirtualReplica
from wsbatch.messages import Finished

from .harness import ENGINE, Reader, cluster, request, submit, undisturbed


async def test_requests_of_replicas_removed_one_after_another_go_on(autojump_clock: MockClock) -> None:
    """Each is moved up to three times within a few tokens: had its replicas died, it would be the suspect."""
    async with cluster(4) as group:
        readers = [await submit(group.pool, request(tokens=60, prompt=f"p{number}")) for number in range(32)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            await trio.sleep(0.1)
            for name in "abc":
                await group.pool.remove(name)
                await trio.sleep(0.02)
            assert group.where() == {"d": 32}
        for reader in readers:
            reader.check_undisturbed()


async def test_removals_at_the_same_time_end_each_with_its_last_stream(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        readers = {"a": await submit(group.pool, request(tokens=100))}
        if group.where()["a"] == 0:
            readers["b"] = readers.pop("a")
        other = "b" if "a" in readers else "a"
        readers[other] = await submit(group.pool, request(tokens=200))
        assert group.where() == {"a": 1, "b": 1}
        ended_s: dict[str, float] = {}

        async def remove(name: str) -> None:
            await group.pool.remove(name, 3600.0)
            ended_s[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for name, reader in readers.items():
                nursery.start_soon(reader.read)
                nursery.start_soon(remove, name)
        for name, reader in readers.items():
            assert ended_s[name] == pytest.approx(reader.ended_s, abs=0.1)


async def test_the_removal_of_a_replica_that_dies_ends_with_it(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        readers = [await submit(group.pool, request(tokens=400)) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            await trio.sleep(0.2)
            nursery.start_soon(kill_later, group["a"])
            before_s = trio.current_time()
            await group.pool.remove("a", 3600.0)
            assert trio.current_time() - before_s == pytest.approx(0.2, abs=0.1)
        for reader in readers:
            reader.check_undisturbed()


async def kill_later(replica: VirtualReplica) -> None:
    await trio.sleep(0.2)
    replica.kill()


async def test_another_revision_takes_over_and_goes_on_with_nothing(autojump_clock: MockClock) -> None:
    async with cluster(1) as group:
        short, long = [await submit(group.pool, request(tokens=tokens)) for tokens in (50, 2000)]
        await trio.sleep(0.1)
        added = group.names["b"] = VirtualReplica(ENGINE, revision="simulated-2")
        await group.start("b")
        group.pool.add("b", added.dial)
        await group.all_ready()
        assert group.pool.info.revision == "simulated-1"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.pool.remove, "a", 5.0)
            for reader in (short, long):
                nursery.start_soon(reader.read)
            await trio.sleep(0.2)
            new = await submit(group.pool, request(tokens=2000))
            assert group.where() == {"b": 1}
            assert group.pool.info.revision == "simulated-2"
            nursery.start_soon(new.read)
        short.check_undisturbed()
        new.check_undisturbed()
        check_shut_down(long)
        assert added.engine.status().running == 0


def check_shut_down(reader: Reader) -> None:
    """It has what there was of it, and was told."""
    assert isinstance(reader.end, Finished)
    assert reader.end.finish_reason == "shutdown"
    whole = undisturbed(reader.stream.request)[1]
    assert reader.text == whole[: len(reader.ids)]
    assert len(reader.ids) > 300
