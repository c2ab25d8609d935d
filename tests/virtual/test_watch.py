"""Watching the batch, in virtual time: what the engine shows, and how often a session sends it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from memory_connection import MemoryConnection
from wsbatch.batching.costs import StepCost
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.messages import (
    BatchSnapshot,
    Failed,
    GenerateRequest,
    Hello,
    Ping,
    Pong,
    SamplingParams,
    Tokens,
    Unwatch,
    Watch,
)
from wsbatch.server.session import Session
from wsbatch.testing import ScriptedEngine, open_virtual_engine
from wsbatch.wire import MSGPACK


def request(tokens: int, prompt: str = "abcd", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(max_tokens=tokens), **fields)


def phases(snapshot: BatchSnapshot, slot: int) -> list[str | None]:
    """What this slot did in each step; None for idle."""
    return [next((phase for place, _, phase in step.rows if place == slot), None) for step in snapshot.steps]


def spans(snapshot: BatchSnapshot) -> list[tuple[float, float]]:
    return [(step.t_ms, step.t_ms + step.ms) for step in snapshot.steps]


async def test_a_dynamic_batch_shows_its_finished_rows_as_kept(autojump_clock: MockClock) -> None:
    config = EngineConfig(model="simulated", scheduler="dynamic", max_batch_size=4, max_wait_ms=5)
    async with open_virtual_engine(config) as (engine, _):
        watcher = engine.watch(lambda: None)
        short, long = await engine.submit(request(2)), await engine.submit(request(5))
        async for _ in long:
            pass
        snapshot = watcher.take(trio.current_time())
        assert phases(snapshot, 0) == ["prefill", "decode", "kept", "kept", "kept"]
        assert phases(snapshot, 1) == ["prefill", "decode", "decode", "decode", "decode"]
        assert phases(snapshot, 2) == [None] * 5
        assert not short.live
        assert (snapshot.scheduler, snapshot.slots, snapshot.running, snapshot.queue_depth) == ("dynamic", 4, 0, 0)
        assert snapshot.slot_utilization == pytest.approx(5 / 8)  # of 4 decode steps with 2 rows, 3 were nobody's
        assert all(end <= begin for (_, end), (begin, _) in zip(spans(snapshot), spans(snapshot)[1:], strict=False))


async def test_a_continuous_batch_gives_a_slot_to_the_next_at_once(autojump_clock: MockClock) -> None:
    config = EngineConfig(model="simulated", scheduler="continuous", max_batch_size=2, prefix_cache=False)
    async with open_virtual_engine(config) as (engine, _):
        watcher = engine.watch(lambda: None)
        long = await engine.submit(request(9))
        await engine.submit(request(2))
        await engine.submit(request(2))
        assert watcher.take(trio.current_time()).queue_depth >= 1
        async for _ in long:
            pass
        snapshot = watcher.take(trio.current_time())
        assert phases(snapshot, 0) == ["prefill", *["decode"] * 8]
        # The loop may have taken the first request before the others came.
        joined = phases(snapshot, 1).index("prefill")
        assert joined <= 1
        assert phases(snapshot, 1)[joined : joined + 5] == ["prefill", "decode", "prefill", "decode", None]
        keys = {key for step in snapshot.steps for slot, key, _ in step.rows if slot == 1}
        assert len(keys) == 2
        assert snapshot.slot_utilization == 1.0


async def test_a_cancel_in_the_queue_is_seen_at_once(autojump_clock: MockClock) -> None:
    config = EngineConfig(model="simulated", scheduler="dynamic", max_wait_ms=60_000)
    async with open_virtual_engine(config) as (engine, _):
        changes: list[float] = []
        watcher = engine.watch(lambda: changes.append(trio.current_time()))
        stream = await engine.submit(request(2))
        await trio.sleep(1)
        stream.cancel()
        assert changes[-1] == trio.current_time()
        assert watcher.take(trio.current_time()).queue_depth == 0


async def test_watchers_make_no_difference_to_the_tokens(autojump_clock: MockClock) -> None:
    async def run(watched: bool) -> list[list[int]]:
        config = EngineConfig(model="simulated", scheduler="continuous", max_batch_size=2)
        async with open_virtual_engine(config) as (engine, _):
            watcher = engine.watch(lambda: None) if watched else None
            streams = [await engine.submit(request(n, prompt="p" * n)) for n in (3, 9, 1, 4)]
            told = [
                [id async for event in stream if isinstance(event, Tokens) for id in event.token_ids]
                for stream in streams
            ]
            if watcher is not None:
                assert watcher.take(trio.current_time()).steps
            return told

    assert await run(True) == await run(False)


class Watched:
    """A session over a scripted engine; its hello has been read."""

    def __init__(self, **settings: Any) -> None:
        self.engine = ScriptedEngine()
        self.client = MemoryConnection(MSGPACK)
        self.session = Session(self.client, self.engine, ServerConfig(**settings), codec=MSGPACK)

    def step(self) -> None:
        now_s = trio.current_time()
        cost = StepCost(1, 0, 0, 1, 1, 0.001)
        self.engine.recorder.record([(1, "decode")], cost, tokens=1, started_s=now_s - 0.001, ended_s=now_s)

    async def steps_for(self, seconds: float, interval_s: float = 0.001) -> None:
        with trio.move_on_after(seconds):
            while True:
                await trio.sleep(interval_s)
                self.step()

    @property
    def snapshots(self) -> list[BatchSnapshot]:
        return [frame for frame in self.client.frames if isinstance(frame, BatchSnapshot)]


@asynccontextmanager
async def watched(**settings: Any) -> AsyncIterator[Watched]:
    fixture = Watched(**({"allow_watch": True} | settings))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fixture.session.run)
        hello = await fixture.client.hear()
        assert isinstance(hello, Hello)
        assert hello.watch == fixture.session._config.allow_watch
        yield fixture
        fixture.client.disconnect()
    assert not fixture.engine.recorder.watched


async def test_watching_is_refused_by_name_unless_it_is_allowed(autojump_clock: MockClock) -> None:
    async with watched(allow_watch=False) as fixture:
        await fixture.client.say(Watch())
        answer = await fixture.client.hear()
        assert isinstance(answer, Failed)
        assert (answer.id, answer.code) == (None, "bad_request")
        assert "watch" in answer.message
        assert "allow_watch" in answer.message
        assert not fixture.engine.recorder.watched


async def test_a_frame_comes_at_once_then_at_most_ten_a_second(autojump_clock: MockClock) -> None:
    async with watched() as fixture:
        await fixture.client.say(Watch())
        first = await fixture.client.hear()
        assert isinstance(first, BatchSnapshot)
        assert (first.slots, first.steps) == (8, ())
        began = trio.current_time()
        await fixture.steps_for(3)
        frames = fixture.snapshots[1:]
        assert 28 <= len(frames) <= 10 * (trio.current_time() - began) + 1
        steps = [step for frame in frames for step in frame.steps]
        assert len(steps) >= 2900  # none is lost, but for those of the last interval
        assert all(frame.steps_dropped == 0 for frame in frames)
        assert [step.t_ms for step in steps] == sorted({step.t_ms for step in steps})


async def test_when_all_is_quiet_one_last_frame_tells(autojump_clock: MockClock) -> None:
    async with watched() as fixture:
        await fixture.client.say(Watch())
        await fixture.steps_for(0.5)
        assert fixture.snapshots[-1].tokens_per_s > 0
        await trio.sleep(3)
        count = len(fixture.snapshots)
        assert (fixture.snapshots[-1].tokens_per_s, fixture.snapshots[-1].waste_fraction) == (0.0, None)
        await trio.sleep(1000)
        assert len(fixture.snapshots) == count


async def test_a_reader_that_pauses_finds_one_frame_not_a_backlog(autojump_clock: MockClock) -> None:
    async with watched() as fixture:
        await fixture.client.say(Watch())
        await fixture.client.hear()
        fixture.client.hold()
        await fixture.steps_for(10)
        count = len(fixture.snapshots)
        assert count == 1
        fixture.client.release()
        await trio.sleep(0.05)
        # The one that was being written, and one with what has happened since, bounded.
        assert len(fixture.snapshots) <= count + 2
        kept = sum(len(step.rows) for step in fixture.snapshots[-1].steps)
        assert kept <= 4096
        assert fixture.snapshots[-1].steps_dropped > 0


async def test_asking_again_and_again_gives_no_frame_more(autojump_clock: MockClock) -> None:
    async with watched() as fixture:
        for _ in range(200):
            await fixture.client.say(Watch())
            await fixture.client.say(Unwatch())
        await fixture.client.say(Watch())
        await trio.sleep(0.35)
        assert len(fixture.snapshots) <= 4


async def test_unwatch_ends_it_and_the_connection_goes_on(autojump_clock: MockClock) -> None:
    async with watched() as fixture:
        await fixture.client.say(Unwatch())  # nothing to end: passes
        await fixture.client.say(Watch())
        await fixture.client.hear()
        await fixture.client.say(Unwatch())
        await fixture.client.say(Ping(1))
        assert isinstance(await fixture.client.hear(), Pong)
        assert not fixture.engine.recorder.watched
        await fixture.steps_for(1)
        assert len(fixture.snapshots) == 1


async def test_tokens_and_snapshots_both_get_through(autojump_clock: MockClock) -> None:
    async with watched() as fixture, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: fixture.engine.play(interval_s=0.001))
        await fixture.client.say(Watch())
        await fixture.client.say(request(500, id=1))
        await fixture.steps_for(1)
        kinds = [type(frame).__name__ for frame in fixture.client.frames]
        assert kinds.count("Finished") == 1
        assert kinds.count("BatchSnapshot") >= 9
        nursery.cancel_scope.cancel()
