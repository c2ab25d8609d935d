"""What the engine promises when it is overloaded: bounds, order, shedding, fair shares, goodput under retries."""

import random

import pytest
import trio
from trio.testing import MockClock

from wsbatch.batching.fairness import Client
from wsbatch.batching.queue import AGEING_S
from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.stream import Stream
from wsbatch.errors import BY_CODE, QueueFull, RequestError
from wsbatch.messages import Failed, Finished, GenerateRequest, SamplingParams
from wsbatch.testing import open_virtual_engine


def config(**fields: object) -> EngineConfig:
    values = {"model": "simulated", "scheduler": "continuous", "max_batch_size": 4}
    return EngineConfig(**(values | fields))  # type: ignore[arg-type]


def request(tokens: int = 4, **fields: object) -> GenerateRequest:
    return GenerateRequest(prompt="abcd", sampling=SamplingParams(max_tokens=tokens), **fields)  # type: ignore[arg-type]


def told_ms(refusal: RequestError | None) -> int:
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_ms is not None
    return refusal.retry_after_ms


async def ending(stream: Stream) -> Finished | Failed:
    last: object = None
    async for event in stream:
        last = event
    assert isinstance(last, Finished | Failed)
    return last


async def fill(engine: BatchEngine, waiting: int, **fields: object) -> list[Stream]:
    """Four long requests that occupy every slot, then this many that wait."""
    for _ in range(4):
        await engine.submit(request(tokens=200))
        await trio.sleep(0.05)
    return [await engine.submit(request(**fields)) for _ in range(waiting)]


async def test_twice_the_cap_gets_exactly_the_cap(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=20)) as (engine, _):
        await fill(engine, 0)
        accepted, refused, began_s = 0, 0, trio.current_time()

        async def ask() -> None:
            nonlocal accepted, refused
            try:
                await engine.submit(request())
                accepted += 1
            except QueueFull:
                refused += 1
                assert trio.current_time() == began_s

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask)
        assert (accepted, refused) == (20, 20)


async def test_retry_after_is_about_when_half_of_the_queue_is_served(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=40)) as (engine, _):
        streams = [await engine.submit(request(tokens=20)) for _ in range(40)]
        for stream in streams[:20]:
            await ending(stream)
        streams += [await engine.submit(request(tokens=20)) for _ in range(24)]
        with pytest.raises(QueueFull) as refused:
            await engine.submit(request())
        told_s = (refused.value.retry_after_ms or 0) / 1000
        began_s = trio.current_time()
        for stream in streams[20:40]:
            await ending(stream)
        assert told_s == pytest.approx(trio.current_time() - began_s, rel=0.5)


@pytest.mark.parametrize("spread", [False, True])
async def test_refused_clients_come_back_one_after_the_other(autojump_clock: MockClock, spread: bool) -> None:
    """Four hundred at once, all of whom come back when they are told, or once to twice as late: they are served as fast
    as if they had all waited in the queue, and do not ask much oftener than that takes."""
    source, attempts = random.Random(3), 0

    async def client(engine: BatchEngine) -> None:
        nonlocal attempts
        while True:
            attempts += 1
            try:
                stream = await engine.submit(request(tokens=10))
            except QueueFull as refusal:
                await trio.sleep(told_ms(refusal) / 1000 * (1 + spread * source.random()))
            else:
                await ending(stream)
                return

    async def crowd_s(engine: BatchEngine, count: int) -> float:
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(client, engine)
        return trio.current_time() - began_s

    async with open_virtual_engine(config(max_queue_requests=400)) as (engine, _):
        waiting_s = await crowd_s(engine, 400)
    async with open_virtual_engine(config(max_queue_requests=16)) as (engine, _):
        await crowd_s(engine, 20)  # the server has seen some load: it knows its own rate
        await trio.sleep(100)  # and does not take a pause for service
        attempts = 0
        assert await crowd_s(engine, 400) < 1.05 * waiting_s
        assert attempts < 4 * 400


async def test_a_refusal_does_not_look_through_the_queue(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody less urgent waits nobody can give way: sorting a full queue would take longer than the refusal."""
    async with open_virtual_engine(config(max_queue_requests=16)) as (engine, _):
        await fill(engine, 16)
        monkeypatch.setattr("wsbatch.engine.admission.sheddable", lambda *_, **__: pytest.fail("looked through"))
        assert isinstance(engine.refuse_early(), QueueFull)
        with pytest.raises(QueueFull):
            await engine.submit(request())


async def test_probes_expect_nobody_back(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=16)) as (engine, _):
        await fill(engine, 16)
        told = {told_ms(engine.refusal()) for _ in range(100)}
        assert told == {engine.status().retry_after_ms}
        assert told_ms(engine.refuse_early()) in told
        assert told_ms(engine.refuse_early()) > max(told)


async def test_a_queue_that_lasts_is_told_up_to_half_a_minute(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=16)) as (engine, _):
        await fill(engine, 16)
        told = [told_ms(engine.refuse_early()) for _ in range(2000)]
        assert told == sorted(told)
        assert max(told) == 30_000
        await trio.sleep(40)
        await fill(engine, 16)
        assert told_ms(engine.refuse_early()) < 2 * told[0]  # they are all back


async def test_what_would_miss_a_latency_goal_is_refused_unread(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(ttft_slo_ms=400.0)) as (engine, _):
        await fill(engine, 0)
        while engine.refusal() is None:
            await engine.submit(request(tokens=200))
        assert engine.full
        with pytest.raises(QueueFull, match="over ttft_slo_ms 400"):
            await engine.submit(request())


async def test_the_least_urgent_is_shed_for_a_more_urgent_one(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=3)) as (engine, _):
        middle, low, later_low = (
            *(await fill(engine, 1, priority=5)),
            await engine.submit(request(priority=8)),
            await engine.submit(request(priority=8)),
        )
        with pytest.raises(QueueFull):
            await engine.submit(request(priority=8))  # not more urgent than anybody
        urgent = await engine.submit(request(priority=0))
        shed = await ending(later_low)
        assert isinstance(shed, Failed)
        assert (shed.code, shed.status) == ("shed", 503)
        assert shed.retry_after_ms is not None
        for stream in (urgent, middle, low):
            assert isinstance(await ending(stream), Finished)


async def test_urgent_requests_of_one_peer_leave_another_its_share(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=16)) as (engine, _):
        await fill(engine, 0)
        patient = [await engine.submit(request(priority=9), client=Client("patient", 1)) for _ in range(16)]
        refused = 0
        for number in range(40):
            try:
                await engine.submit(request(priority=0), client=Client("urgent", number))
            except QueueFull:
                refused += 1
        assert refused == 32
        assert sum(stream.live for stream in patient) == 8


async def test_a_queue_is_not_full_to_newcomers_while_a_less_urgent_request_waits(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=2)) as (engine, _):
        await fill(engine, 1, priority=5)
        low = await engine.submit(request(priority=6))
        assert engine.refusal() is None
        await engine.submit(request())
        assert isinstance(await ending(low), Failed)
        assert isinstance(engine.refusal(), QueueFull)


async def test_urgent_requests_overtake_but_nobody_waits_for_ever(autojump_clock: MockClock) -> None:
    """A stream of urgent requests that alone fills the server; the one of class 9 is served all the same."""
    async with open_virtual_engine(config(max_batch_size=1)) as (engine, _):

        async def keep_full() -> None:
            while True:
                nursery.start_soon(ending, await engine.submit(request(tokens=10, priority=0)))
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_full)
            await trio.sleep(1)
            end = await ending(await engine.submit(request(priority=9)))
            nursery.cancel_scope.cancel()
    assert isinstance(end, Finished)
    assert 9 * AGEING_S < end.timing.queue_ms / 1000 < 9 * AGEING_S * 1.2  # all that came within it went first


async def test_one_client_with_a_thousand_requests_does_not_starve_another(autojump_clock: MockClock) -> None:
    waits: dict[bool, float] = {}
    for fair in (True, False):
        async with open_virtual_engine(config(max_queue_requests=2000, queue_timeout_ms=600_000)) as (engine, _):
            for _ in range(20):  # the server has seen some load: it knows its own rate
                await ending(await engine.submit(request()))
            for _ in range(1000):
                await engine.submit(request(tokens=20), client="greedy")
            began_s = trio.current_time()
            await trio.sleep(0.01)
            single = await engine.submit(request(), client="modest" if fair else "greedy")
            end = await ending(single)
            assert isinstance(end, Finished)
            waits[fair] = trio.current_time() - began_s
    assert waits[True] < 1.0
    assert waits[False] > 20.0


@pytest.mark.parametrize("goal", ["ttft_slo_ms", "itl_slo_ms"])
async def test_latency_goals_refuse_what_would_break_them(autojump_clock: MockClock, goal: str) -> None:
    """Steps take 10 ms + 1 ms a row + 0.5 ms a prompt token: 60 ms is a prompt of 96, or 50 rows."""
    chosen = config(max_batch_size=64, max_batch_prefill_tokens=4096, **{goal: 60.0})
    async with open_virtual_engine(chosen) as (engine, _):
        for length in (4, 8, 16, 32, 4, 8, 16, 32, 4, 8):  # what the costs are learnt from
            await ending(
                await engine.submit(GenerateRequest(prompt="x" * length, sampling=SamplingParams(max_tokens=3)))
            )
        if goal == "ttft_slo_ms":
            await ending(await engine.submit(GenerateRequest(prompt="y" * 80, sampling=SamplingParams(max_tokens=1))))
            with pytest.raises(QueueFull, match="over ttft_slo_ms 60"):
                await engine.submit(GenerateRequest(prompt="y" * 120))
        else:
            for _ in range(45):
                await engine.submit(request(tokens=500))
            with pytest.raises(QueueFull, match="over itl_slo_ms 60"):
                await fill(engine, 2, tokens=500)


async def goodput(engine: BatchEngine, rate: float, seconds: float, *, retry: bool, source: random.Random) -> float:
    """Requests per second answered in full within the patience of their clients, 2 s, at this rate of arrivals."""
    answered = 0

    async def client() -> None:
        nonlocal answered
        for _ in range(5 if retry else 1):
            try:
                stream = await engine.submit(request(tokens=10, timeout_ms=2000))
            except RequestError:
                await trio.sleep(0.2 * source.random())  # a rude client: it does not honour retry_after_ms
                continue
            end = await ending(stream)
            if isinstance(end, Finished) and end.finish_reason == "length":
                answered += 1
                return
            assert isinstance(end, Finished) or end.code in BY_CODE

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(client)
                await trio.sleep(source.expovariate(rate))
    return answered / seconds


async def test_a_retry_storm_keeps_the_goodput(autojump_clock: MockClock) -> None:
    """Ten times the capacity arrives, gives up and comes back: at least 90 % of the peak is still answered in time."""
    results: dict[float, float] = {}
    for rate in (24.0, 28.0, 160.0):
        # Four slots, ten tokens of 14 ms: 4 / 0.15 s, about 26 a second at the most.
        async with open_virtual_engine(config(max_queue_requests=16)) as (engine, _):
            results[rate] = await goodput(engine, rate, 10.0, retry=rate > 100, source=random.Random(3))
    peak = max(results[rate] for rate in (24.0, 28.0))
    assert results[160.0] >= 0.9 * peak
