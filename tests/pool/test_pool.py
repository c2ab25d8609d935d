"""A pool of replicas in virtual time: routing, losses, drains, stalls; client and replicas are the real ones."""

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from virtual_replica import VirtualReplica
from wsbatch.engine.interface import Mortal
from wsbatch.errors import BadRequest, ConnectionLost, Draining, QueueFull
from wsbatch.messages import Accepted, Failed, Finished, SamplingParams
from wsbatch.pool import PoolConfig, open_pool
from wsbatch.server.ending import Phase
from wsbatch.steps import PagedStep

from .harness import ENGINE, POISON, cluster, request, submit, undisturbed, until


async def test_a_request_through_the_pool_is_as_from_one_server(autojump_clock: MockClock) -> None:
    async with cluster() as group:
        for asked in [
            request(),
            request(sampling=SamplingParams(max_tokens=30, temperature=1.0, seed=3), stream=False),
        ]:
            started_s = trio.current_time()
            reader = await (await submit(group.pool, asked)).read()
            reader.check_undisturbed()
            assert isinstance(reader.end, Finished)
            assert reader.end.timing.total_ms == pytest.approx((reader.ended_s - started_s) * 1000, abs=1)
            assert reader.end.batch.max_size == 1


async def test_what_a_replica_refuses_for_good_is_refused(autojump_clock: MockClock) -> None:
    async with cluster() as group:
        with pytest.raises(BadRequest, match="resume_token_ids"):
            await group.pool.submit(request(tokens=1, resume_token_ids=(65, 66)))


async def test_the_pool_tells_what_its_replicas_are(autojump_clock: MockClock) -> None:
    async with cluster(3) as group:
        info = group.pool.info
        assert (info.name, info.revision, info.dtype, info.max_model_len) == (
            "simulated",
            "simulated-1",
            "float32",
            8192,
        )
        status = group.pool.status()
        assert (status.state, status.max_batch_size, status.retry_after_ms) == ("ready", 12, None)
        assert not isinstance(group.pool, Mortal)
        assert all(isinstance(replica.engine, Mortal) for replica in group.names.values())


async def test_requests_go_where_the_least_work_is(autojump_clock: MockClock) -> None:
    """By tokens, not by requests: one long request weighs more than three short ones."""
    async with cluster(2) as group:
        readers = [await submit(group.pool, request(tokens=400, prompt="long"))]
        readers += [await submit(group.pool, request(tokens=50)) for _ in range(3)]
        assert sorted(group.where().values()) == [1, 3]
        await trio.sleep(0.25)  # now the replicas' own words count
        readers += [await submit(group.pool, request(tokens=50)) for _ in range(2)]
        assert sorted(group.where().values()) == [1, 5]
        for reader in readers:
            (await reader.read()).check_undisturbed()


async def test_work_of_other_routers_counts(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        other = await group["a"].engine.submit(request(tokens=1000))
        await trio.sleep(0.2)
        readers = [await submit(group.pool, request(tokens=50)) for _ in range(4)]
        assert group.where() == {"a": 0, "b": 4}
        for reader in readers:
            await reader.read()
        other.cancel()


async def test_a_prompt_goes_where_its_beginning_was_computed(autojump_clock: MockClock) -> None:
    prefix = "system: " + "be brief. " * 100
    async with cluster(3, affinity_tokens=500) as group:
        first = await submit(group.pool, request(tokens=100, prompt=prefix + "one"))
        (home,) = [name for name, live in group.where().items() if live]
        await trio.sleep(0.2)
        more = [await submit(group.pool, request(tokens=50, prompt=prefix + word)) for word in ("two", "three")]
        assert group.where()[home] >= 2  # although the others have nothing to do
        third = await submit(group.pool, request(tokens=50, prompt=prefix + "four"))
        assert sum(live > 0 for live in group.where().values()) == 2  # until it is too busy
        for reader in [first, *more, third]:
            (await reader.read()).check_undisturbed()


async def test_full_replicas_refuse_with_the_soonest_time(autojump_clock: MockClock) -> None:
    engine = replace(ENGINE, max_batch_size=1, max_queue_requests=2)
    async with cluster(2, engine=engine) as group:
        readers = []
        for _ in range(6):
            readers.append(await submit(group.pool, request(tokens=100)))
            await trio.sleep(0.001)
        with pytest.raises(QueueFull) as refused:
            await submit(group.pool, request(tokens=100))
        assert refused.value.retry_after_ms is not None
        assert refused.value.retry_after_ms >= 50
        await trio.sleep(0.2)
        retries = [replica.engine.status().retry_after_ms for replica in group.names.values()]
        refusal = group.pool.refusal()
        assert isinstance(refusal, QueueFull)
        assert refusal.retry_after_ms == min(retries)  # type: ignore[type-var]
        for reader in readers:
            (await reader.read()).check_undisturbed()
        await trio.sleep(0.2)
        assert group.pool.refusal() is None


async def test_streams_go_on_when_their_replica_is_killed(autojump_clock: MockClock) -> None:
    """Running ones resume, waiting ones move; nobody can tell but by the clock."""
    async with cluster(2) as group:
        asked = [
            request(sampling=SamplingParams(max_tokens=60, temperature=temperature, seed=index), prompt=f"p{index}")
            for index, temperature in enumerate([0.0, 1.0] * 8)
        ]
        readers = [await submit(group.pool, one) for one in asked]
        assert group.where() == {"a": 8, "b": 8}
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            await trio.sleep(0.3)
            group["a"].kill()
            await trio.sleep(0.01)
            assert group.where() == {"a": 0, "b": 16}
        for reader in readers:
            reader.check_undisturbed()
        metrics = group.pool.metrics.registry
        assert metrics.get_sample_value("wsbatch_requests_resumed_total") == 4
        assert metrics.get_sample_value("wsbatch_requests_moved_total") == 4


async def test_a_seed_that_was_drawn_is_kept(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        reader = await submit(group.pool, request(sampling=SamplingParams(max_tokens=60, temperature=1.0)))
        assert reader.stream.accepted is not None
        await trio.sleep(0.2)
        for name, live in group.where().items():
            if live:
                group[name].kill()
        await reader.read()
        seeded = SamplingParams(max_tokens=60, temperature=1.0, seed=reader.stream.accepted.seed)
        assert reader.text == undisturbed(request(sampling=seeded))[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_and_logprobs_survive(autojump_clock: MockClock, stream: bool) -> None:
    whole = undisturbed(request(tokens=60))[1]
    sampling = SamplingParams(max_tokens=60, stop=(whole[30:34],), logprobs=1)
    for kill_after in range(27, 35):
        async with cluster(2) as group:
            reader = await submit(group.pool, request(sampling=sampling, stream=stream))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader.read)
                (route,) = group.pool._routes.values()
                await until(lambda: len(route.answer.token_ids) >= kill_after or not reader.stream.live)  # noqa: B023
                for name, live in group.where().items():
                    if live:
                        group[name].kill()
            reader.check_undisturbed()
            assert isinstance(reader.end, Finished)
            assert (reader.logprobs if stream else len(reader.end.logprobs or ())) == 34


async def test_a_lost_replica_is_taken_back(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        group["a"].kill()
        await trio.sleep(20)
        assert [group.pool.replicas[name].state for name in "ab"] == ["away", "ready"]
        dials = group["a"].dials
        await trio.sleep(30)
        assert 5 <= group["a"].dials - dials <= 15  # not in a hurry
        await group.start("a")
        await trio.sleep(6)
        await group.all_ready()
        readers = [await submit(group.pool, request()) for _ in range(4)]
        assert group.where() == {"a": 2, "b": 2}
        for reader in readers:
            await reader.read()


async def test_with_all_replicas_lost_accepted_requests_wait_and_new_ones_are_refused(
    autojump_clock: MockClock,
) -> None:
    async with cluster(2) as group:
        readers = [await submit(group.pool, request(tokens=80)) for _ in range(4)]
        await trio.sleep(0.3)
        group["a"].kill()
        group["b"].kill()
        await trio.sleep(0.1)
        with pytest.raises(QueueFull, match="no replica is there"):
            await group.pool.submit(request())
        assert len(group.pool._waiting) == 4
        await trio.sleep(10)
        await group.start("b")
        for reader in readers:
            (await reader.read()).check_undisturbed()


async def test_streams_that_a_full_replica_refuses_wait_for_longer_than_it_may_be_silent(
    autojump_clock: MockClock,
) -> None:
    engine = replace(ENGINE, max_batch_size=2, max_queue_requests=1)
    async with cluster(2, engine=engine, accept_timeout_s=1.0, request_stall_s=60.0) as group:
        readers = []
        for _ in range(5):
            readers.append(await submit(group.pool, request(tokens=800)))
            await trio.sleep(0.1)
        assert group.where() == {"a": 3, "b": 2}
        await trio.sleep(0.3)
        group["a"].kill()  # before "b" says how full it is, it is sent three, and takes one
        await trio.sleep(0.1)
        assert len(group.pool._waiting) == 2
        for reader in readers:
            (await reader.read()).check_undisturbed()


async def test_an_accepted_request_does_not_wait_for_ever(autojump_clock: MockClock) -> None:
    async with cluster(1, resume_timeout_s=20.0) as group:
        running = await submit(group.pool, request(tokens=80))
        await trio.sleep(0.3)
        group["a"].kill()
        killed_s = trio.current_time()
        await running.read()
        assert isinstance(running.end, Failed)
        assert running.end.code == "model_error"
        assert "no other one with the same weights" in running.end.message
        assert trio.current_time() - killed_s == pytest.approx(20, abs=0.1)


async def test_timeouts_count_from_the_arrival_at_the_pool(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        started_s = trio.current_time()
        reader = await submit(group.pool, request(tokens=1000, timeout_ms=2000))
        held = await submit(group.pool, request(tokens=1000, timeout_ms=2500))
        await trio.sleep(1.0)
        group["a"].kill()
        await trio.sleep(0.5)
        await reader.read()
        assert isinstance(reader.end, Finished)
        assert reader.end.finish_reason == "timeout"
        assert reader.ended_s - started_s == pytest.approx(2.0, abs=0.01)
        group["b"].kill()
        await held.read()
        assert isinstance(held.end, Finished)
        assert held.end.finish_reason == "timeout"
        assert held.ended_s - started_s == pytest.approx(2.75, abs=0.01)


async def test_a_stalled_replica_is_taken_out_and_taken_back(autojump_clock: MockClock) -> None:
    async with cluster(2, stall_s=2.0) as group:
        readers = [await submit(group.pool, request(tokens=60)) for _ in range(4)]
        await trio.sleep(0.3)
        group["a"].stall_s = 60.0
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
        for reader in readers:
            reader.check_undisturbed()
        assert 2.0 <= trio.current_time() <= 4.5
        assert group.pool.replicas["a"].state == "away"
        await trio.sleep(10)
        assert group.pool.replicas["a"].state == "away"  # it answers, but its step still runs
        group["a"].stall_s = 0.0
        await trio.sleep(65)
        assert group.pool.replicas["a"].state == "ready"


async def test_a_draining_replica_ends_its_streams_and_gets_no_more(autojump_clock: MockClock) -> None:
    async with cluster(2) as group, trio.open_nursery() as nursery:
        readers = [await submit(group.pool, request(tokens=60)) for _ in range(4)]
        await trio.sleep(0.2)
        nursery.start_soon(group["a"].drain, 30.0)
        await trio.sleep(0.01)
        assert group.pool.replicas["a"].state == "draining"
        readers += [await submit(group.pool, request(tokens=60)) for _ in range(4)]
        assert group.where() == {"a": 2, "b": 6}
        for reader in readers:
            (await reader.read()).check_undisturbed()
        assert group.pool.metrics.registry.get_sample_value("wsbatch_requests_resumed_total") == 0


async def test_a_drain_with_no_patience_moves_its_streams(autojump_clock: MockClock) -> None:
    async with cluster(2) as group, trio.open_nursery() as nursery:
        readers = [await submit(group.pool, request(tokens=200)) for _ in range(4)]
        await trio.sleep(0.2)
        nursery.start_soon(group["a"].drain, 0.5)
        for reader in readers:
            (await reader.read()).check_undisturbed()
        assert group.pool.metrics.registry.get_sample_value("wsbatch_requests_resumed_total") == 2


async def test_other_weights_do_not_go_on_with_a_stream(autojump_clock: MockClock) -> None:
    """Requests that have not begun may move to them; streams wait for their own, and end honestly."""
    async with cluster(2, resume_timeout_s=5.0) as group:
        group["b"].kill()
        group["b"].revision = "simulated-2"
        await group.start("b")
        await trio.sleep(6)
        group["b"].stall_s = 0.5
        readers = [await submit(group.pool, request(tokens=60)) for _ in range(8)]
        waiting = [await submit(group.pool, request(tokens=500, prompt="z")) for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for reader in readers + waiting:
                nursery.start_soon(reader.read)
            await trio.sleep(0.3)
            group["b"].stall_s = 0.0
            running = [
                route for route in group.pool._routes.values() if route.search.kind == ("simulated-1", "float32")
            ]
            assert len(running) == 4
            group["a"].kill()
        failed = [reader for reader in readers + waiting if isinstance(reader.end, Failed)]
        assert len(failed) == 4
        for reader in readers + waiting:
            if reader in failed:
                assert isinstance(reader.end, Failed)
                assert reader.end.code == "model_error"
                assert undisturbed(reader.stream.request)[1].startswith(reader.text)
            else:
                reader.check_undisturbed()


async def test_a_stream_of_weights_that_are_gone_for_good_ends_at_once(autojump_clock: MockClock) -> None:
    async with cluster(2, resume_timeout_s=60.0) as group:
        reader = await submit(group.pool, request(tokens=200))
        await trio.sleep(0.3)
        (name,) = [name for name, live in group.where().items() if live]
        other = next(other for other in group.names if other != name)
        group[other].kill()
        group[other].revision = "simulated-2"
        await group.start(other)
        await trio.sleep(0.5)
        group[name].kill()
        await trio.sleep(0.1)
        await group.pool.remove(name)
        await trio.sleep(0.5)
        killed_s = trio.current_time()
        await reader.read()
        assert isinstance(reader.end, Failed)
        assert reader.end.code == "model_error"
        assert trio.current_time() - killed_s <= 5.5  # when the other one was heard of


async def test_a_poisoned_request_takes_two_replicas_at_most(autojump_clock: MockClock) -> None:
    async with cluster(4) as group:

        def arm(replica: VirtualReplica) -> None:
            def poisoned(plan: object) -> bool:
                if isinstance(plan, PagedStep) and any(ord(POISON) in row.token_ids for row in plan.rows):
                    replica.kill()
                return False

            replica.worker.fail = poisoned

        for replica in group.names.values():
            arm(replica)
        others = [await submit(group.pool, request(tokens=150, prompt=f"{index}")) for index in range(12)]
        await trio.sleep(0.3)
        poison = await submit(group.pool, request(prompt="a" + POISON))
        async with trio.open_nursery() as nursery:
            for reader in [*others, poison]:
                nursery.start_soon(reader.read)
        assert sum(not replica.alive for replica in group.names.values()) == 2
        assert isinstance(poison.end, Failed)
        assert poison.end.code == "model_error"
        assert "one after another" in poison.end.message
        ends = [type(reader.end) for reader in others]
        for reader in others:
            if isinstance(reader.end, Finished):
                reader.check_undisturbed()
        assert ends.count(Finished) >= 10


async def test_a_cancelled_stream_ends_with_the_text_that_was_held_back(autojump_clock: MockClock) -> None:
    whole = undisturbed(request(tokens=60))[1]
    sampling = SamplingParams(max_tokens=60, stop=(whole[20:24] + "\n",))
    async with cluster(2) as group:
        reader = await submit(group.pool, request(sampling=sampling))
        (route,) = group.pool._routes.values()
        await until(lambda: len(route.answer.token_ids) == 23)
        reader.stream.cancel()
        await reader.read()
        assert isinstance(reader.end, Finished)
        assert reader.end.finish_reason == "cancelled"
        assert reader.text == whole[: len(reader.ids)]
        await trio.sleep(0.1)
        assert [replica.engine.status().running for replica in group.names.values()] == [0, 0]


async def test_a_cancelled_stream_ends_even_if_its_replica_does_not_answer(autojump_clock: MockClock) -> None:
    async with cluster(1) as group:
        for loss in (True, False):
            reader = await submit(group.pool, request(tokens=600))
            await trio.sleep(0.2)
            if not loss:  # it hears nothing more, and says nothing
                for session in group["a"].server._sessions:
                    session._ending.phase = Phase.ENDING
            cancelled_s = trio.current_time()
            reader.stream.cancel()
            if loss:
                group["a"].kill()
            await reader.read()
            assert isinstance(reader.end, Finished)
            assert reader.end.finish_reason == "cancelled"
            assert reader.ended_s - cancelled_s == pytest.approx(0.0 if loss else 1.0, abs=0.01)
            if loss:
                await group.start("a")
                await trio.sleep(5)
                await group.all_ready()


async def test_drain_lets_live_requests_finish(autojump_clock: MockClock) -> None:
    async with cluster(2) as group, trio.open_nursery() as nursery:
        short = await submit(group.pool, request(tokens=60))
        long = await submit(group.pool, request(tokens=2000))
        await trio.sleep(0.1)
        nursery.start_soon(group.pool.drain, 5.0)
        await trio.sleep(0.1)
        with pytest.raises(Draining):
            await group.pool.submit(request())
        (await short.read()).check_undisturbed()
        await long.read()
        assert isinstance(long.end, Finished)
        assert long.end.finish_reason == "shutdown"
        assert long.ended_s == pytest.approx(5.0, abs=0.5)


async def test_replicas_come_and_go_at_run_time(autojump_clock: MockClock) -> None:
    async with cluster(1) as group:
        readers = [await submit(group.pool, request(tokens=100)) for _ in range(2)]
        added = group.names["b"] = VirtualReplica(ENGINE)
        await group.start("b")
        group.pool.add("b", added.dial)
        with pytest.raises(ValueError, match="'b' is there already"):
            group.pool.add("b", added.dial)
        await group.all_ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.pool.remove, "a", 60.0)
            for reader in readers:
                nursery.start_soon(reader.read)
            await trio.sleep(0.01)
            readers.append(await submit(group.pool, request(tokens=100)))
            assert group.where() == {"b": 1}
            nursery.start_soon(readers[-1].read)
        for reader in readers:
            reader.check_undisturbed()


async def test_a_pool_without_replicas_does_not_open(autojump_clock: MockClock) -> None:
    with pytest.raises(ConnectionLost, match="none of a was ready within 3 s"):
        async with open_pool({"a": VirtualReplica(ENGINE).dial}, PoolConfig(first_replica_s=3.0)):
            pass


async def test_accepted_comes_first_and_once(autojump_clock: MockClock) -> None:
    async with cluster(2) as group:
        stream = await group.pool.submit(request(tokens=30))
        await trio.sleep(0.1)
        for name, live in group.where().items():
            if live:
                group[name].kill()
        events = [event async for event in stream]
        assert [isinstance(event, Accepted) for event in events].count(True) == 1
        assert isinstance(events[0], Accepted)
        assert isinstance(events[-1], Finished)
