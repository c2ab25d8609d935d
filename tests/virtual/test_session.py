"""One connection's session, in virtual time and in memory."""

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio

from memory_connection import MemoryConnection
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.errors import Draining, EngineDead, ModelError, QueueFull
from wsbatch.messages import (
    Accepted,
    Cancel,
    ClientMessage,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    GetStatus,
    Hello,
    Ping,
    Pong,
    SamplingParams,
    Started,
    Status,
    Tokens,
)
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.input_budget import InputBudget
from wsbatch.server.memory import FreedMemory
from wsbatch.server.metrics import ServerMetrics
from wsbatch.server.session import MAX_BACKLOG, Session
from wsbatch.testing import ScriptedEngine, open_virtual_engine
from wsbatch.wire import JSON, MSGPACK, Codec, MsgpackCodec


class Fixture:
    """A running session, the client's end of it, and its engine."""

    def __init__(
        self, codec: Codec = MSGPACK, submit_s: float = 0.0, decoding: trio.Lock | None = None, **settings: Any
    ) -> None:
        self.deadlines = ClientDeadlines()
        self.decoding = decoding or trio.Lock()
        self.engine = ScriptedEngine(submit_s=submit_s)
        self.client = MemoryConnection(codec)
        self.config = ServerConfig(**settings)
        self.metrics = ServerMetrics()
        self.session = Session(
            self.client,
            self.engine,
            self.config,
            codec=codec,
            decoding=self.decoding,
            deadlines=self.deadlines,
            metrics=self.metrics,
        )
        self.ended = trio.Event()

    async def run(self) -> None:
        await self.session.run()
        self.ended.set()

    async def hear_all(self, count: int) -> list[Any]:
        return [await self.client.hear() for _ in range(count)]

    async def generate(self, id: int | str, prompt: str = "hi") -> Any:
        """Ask, and return the engine's side of it."""
        await self.client.say(GenerateRequest(id=id, prompt=prompt))
        while not any(stream.request.id == id for stream in self.engine.live):
            await trio.testing.wait_all_tasks_blocked()
        return next(stream for stream in self.engine.live if stream.request.id == id)


@asynccontextmanager
async def session(**settings: Any) -> AsyncIterator[Fixture]:
    """A session whose hello has been read; whatever a test leaves running must end at its disconnect, at once."""
    fixture = Fixture(**settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fixture.run)
        assert isinstance(await fixture.client.hear(), Hello)
        yield fixture
        fixture.client.release()
        fixture.client.disconnect()
        with trio.fail_after(1):
            await fixture.ended.wait()
    assert fixture.engine.live == []
    assert fixture.engine.submitting == 0


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(3600):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await trio.sleep(0.01)


@pytest.mark.parametrize("codec", [MSGPACK, JSON])
async def test_frames_of_a_request_come_in_order(autojump_clock: trio.testing.MockClock, codec: Codec) -> None:
    async with session(codec=codec) as fixture:
        stream = await fixture.generate("a")
        assert await fixture.client.hear() == Accepted("a", 2, 0, 7)
        fixture.engine.push(stream, "x")
        assert await fixture.client.hear() == Tokens("a", 0, (120,), "x")
        fixture.engine.push(stream, "y")
        fixture.engine.finish(stream)
        assert await fixture.client.hear() == Tokens("a", 1, (121,), "y")
        finished = await fixture.client.hear()
        assert isinstance(finished, Finished)
        assert finished.finish_reason == "stop"


async def test_hello_tells_the_limits(autojump_clock: trio.testing.MockClock) -> None:
    async with session(max_live_requests=3, max_message_bytes=2048) as fixture:
        hello = fixture.client.frames[0]
        assert isinstance(hello, Hello)
        assert (hello.limits.max_live_requests, hello.limits.max_message_bytes) == (3, 2048)
        assert (hello.limits.max_model_len, hello.model, hello.state) == (4096, "scripted", "ready")


async def test_what_a_slow_reader_has_not_read_is_merged(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.client.hold()
        for letter in "abcdef":
            fixture.engine.push(stream, letter)
            await trio.sleep(1)
        fixture.client.release()
        first, second = await fixture.hear_all(2)
        assert (first.text, first.index) == ("a", 0)
        assert (second.text, second.index) == ("bcdef", 1)
        fixture.engine.push(stream, "g")
        (third,) = await fixture.hear_all(1)
        assert (third.text, third.index) == ("g", 6)


@pytest.mark.parametrize("codec", [MSGPACK, JSON])
async def test_a_long_answer_is_sent_in_pieces_each_of_which_has_its_time(
    autojump_clock: trio.testing.MockClock, codec: Codec
) -> None:
    async with session(codec=codec, send_timeout_s=10.0) as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.client.piece_s = 9.0
        logprobs = [(-0.5, tuple((token_id, -1.0) for token_id in range(20)))] * 1000
        stream.push([1] * 1000, "x" * 1000, logprobs)
        asked_s = trio.current_time()
        tokens = await fixture.client.hear()
        assert (len(tokens.token_ids), tokens.logprobs) == (1000, tuple(logprobs))
        assert trio.current_time() - asked_s > 20.0
        fixture.client.piece_s = 0.0


async def test_streams_take_turns(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        one, two, three = [await fixture.generate(id) for id in (1, 2, 3)]
        await fixture.hear_all(3)
        fixture.client.hold()
        fixture.engine.push(one)
        await trio.sleep(1)  # the writer is held with this frame of the first
        for stream in (one, one, two, three, one):
            fixture.engine.push(stream)
        fixture.client.release()
        frames = await fixture.hear_all(4)
        assert [(frame.id, len(frame.token_ids)) for frame in frames] == [(1, 1), (1, 3), (2, 1), (3, 1)]
        fixture.client.hold()
        fixture.engine.push(three)
        await trio.sleep(1)
        for stream in (one, two, three, one):
            fixture.engine.push(stream)
        fixture.client.release()
        assert [frame.id for frame in await fixture.hear_all(4)] == [3, 1, 2, 3]


@pytest.mark.parametrize("codec", [MSGPACK, JSON])
async def test_others_have_their_turn_while_a_large_message_is_decoded(
    autojump_clock: trio.testing.MockClock, codec: Codec
) -> None:
    lock = trio.Lock()
    large = codec.encode_client(GenerateRequest(id=1, token_ids=tuple(range(262_144))))
    settings: dict[str, Any] = {"codec": codec, "decoding": lock, "frame_interval_ms": 0.0}
    async with session(**settings) as busy, session(**settings) as also_busy, session(**settings) as neighbour:
        for fixture in (busy, also_busy):
            await fixture.client.say(large)
        for nonce in range(5):
            await neighbour.client.say(Ping(nonce))
            assert await neighbour.client.hear() == Pong(nonce)
            assert len(busy.client.frames) == len(also_busy.client.frames) == 1
        for fixture in (busy, also_busy):
            assert isinstance(await fixture.client.hear(), Accepted)


async def test_a_message_that_was_not_decoded_gives_its_memory_back(autojump_clock: trio.testing.MockClock) -> None:
    budget = InputBudget(1_000_000, FreedMemory())
    fixture = Fixture(decoding=trio.Lock())
    large = MSGPACK.encode_client(GenerateRequest(id=1, prompt="x" * 100_000))
    async with fixture.decoding, trio.open_nursery() as nursery:
        fixture.client.share = budget.share(60.0)
        fixture.client.share.complete(len(large))
        nursery.start_soon(fixture.run)
        await fixture.client.say(large)
        await trio.sleep(1)
        assert budget.used_bytes == len(large)
        nursery.cancel_scope.cancel()
    assert budget.used_bytes == 0


async def test_cancel_ends_only_its_own_request(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        await fixture.generate(1)
        await fixture.generate(2)
        await fixture.hear_all(2)
        await fixture.client.say(Cancel(99))  # unknown: it may just have ended
        await fixture.client.say(Cancel(1))
        finished = await fixture.client.hear()
        assert (finished.id, finished.finish_reason) == (1, "cancelled")
        assert [stream.request.id for stream in fixture.engine.live] == [2]


async def test_a_request_cancelled_while_it_is_tokenized_gets_its_terminal_frame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session(submit_s=5.0) as fixture:
        started_at = trio.current_time()
        await fixture.client.say(GenerateRequest(id=1, prompt="long"))
        await trio.sleep(1)
        await fixture.client.say(Cancel(1))
        accepted, finished = await fixture.hear_all(2)
        assert isinstance(accepted, Accepted)
        assert (accepted.prompt_tokens, finished.usage.prompt_tokens) == (0, 0)
        assert finished.finish_reason == "cancelled"
        assert trio.current_time() - started_at == pytest.approx(1.0)


async def test_each_connection_is_a_client_of_the_engine(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as one, session() as other:
        for fixture in (one, other):
            await fixture.generate(1)
            await fixture.generate(2)
        (mine, again), (others, _) = one.engine.clients, other.engine.clients
        assert mine == again
        assert mine != others
        assert mine is not None


async def test_a_long_tokenizing_blocks_nobody(autojump_clock: trio.testing.MockClock) -> None:
    async with session(submit_s=5.0) as fixture:
        await fixture.client.say(GenerateRequest(id=1, prompt="long"))
        await fixture.client.say(Ping(1))
        with trio.fail_after(1):
            assert await fixture.client.hear() == Pong(1)


@pytest.mark.parametrize("submit_s", [0.0, 50.0], ids=["queued", "in submit"])
async def test_a_disconnect_cancels_everything_within_a_second(
    autojump_clock: trio.testing.MockClock, submit_s: float
) -> None:
    async with session(submit_s=submit_s) as fixture:
        for id in range(5):
            await fixture.client.say(GenerateRequest(id=id, prompt="x"))
        await until(lambda: len(fixture.engine.live) + fixture.engine.submitting == 5)
        gone_at = trio.current_time()
        fixture.client.disconnect()
        await fixture.ended.wait()
        assert trio.current_time() - gone_at < 1
        assert (fixture.engine.live, fixture.engine.submitting) == ([], 0)


async def test_a_disconnect_cancels_what_is_live_before_a_slow_submit_has_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    fixture = Fixture()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fixture.run)
        await fixture.generate(1)
        fixture.engine.cancellable = False
        fixture.engine.submit_s = 30.0
        await fixture.client.say(GenerateRequest(id=2, prompt="long"))
        await until(lambda: fixture.engine.submitting == 1)
        fixture.client.disconnect()
        with trio.fail_after(1):
            await fixture.engine.wait_live(0)
        await fixture.ended.wait()
    assert (fixture.engine.live, fixture.engine.submitting) == ([], 0)


async def test_a_session_that_is_cancelled_cancels_what_is_live(autojump_clock: trio.testing.MockClock) -> None:
    fixture = Fixture()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fixture.run)
        await fixture.generate(1)
        nursery.cancel_scope.cancel()
    assert fixture.engine.live == []


async def test_a_disconnect_is_seen_behind_a_blocked_writer(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.client.hold()
        fixture.engine.push(stream)
        await trio.sleep(1)
        gone_at = trio.current_time()
        fixture.client.disconnect()
        await fixture.ended.wait()
        assert trio.current_time() - gone_at < 1
        assert fixture.engine.live == []


async def test_an_id_is_refused_while_it_is_live_and_free_afterwards(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        stream = await fixture.generate("a")
        await fixture.client.hear()
        await fixture.client.say(GenerateRequest(id="a", prompt="again"))
        refused = await fixture.client.hear()
        assert (refused.code, refused.status, refused.id) == ("duplicate_id", 409, "a")
        assert stream.live
        fixture.engine.finish(stream)
        await fixture.client.hear()
        await fixture.generate("a")
        assert isinstance(await fixture.client.hear(), Accepted)


async def test_an_id_may_be_used_again_the_moment_its_end_is_read(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        stream = await fixture.generate("a")
        await fixture.client.hear()
        fixture.client.send_s = 1.0  # the writer is still busy with the frame that the client has read
        fixture.engine.finish(stream)
        assert isinstance(await fixture.client.hear(), Finished)
        await fixture.client.say(GenerateRequest(id="a", prompt="again"))
        assert isinstance(await fixture.client.hear(), Accepted)


async def test_an_id_is_taken_while_its_request_is_tokenized(autojump_clock: trio.testing.MockClock) -> None:
    async with session(submit_s=5.0) as fixture:
        await fixture.client.say(GenerateRequest(id="a", prompt="x"))
        await fixture.client.say(GenerateRequest(id="a", prompt="x"))
        refused = await fixture.client.hear()
        assert refused.code == "duplicate_id"


async def test_live_requests_of_a_connection_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    async with session(max_live_requests=2) as fixture:
        first = await fixture.generate(1)
        await fixture.generate(2)
        await fixture.hear_all(2)
        await fixture.client.say(GenerateRequest(id=3, prompt="x"))
        refused = await fixture.client.hear()
        assert (refused.code, refused.status, refused.id) == ("quota", 429, 3)
        fixture.engine.finish(first)
        await fixture.client.hear()
        await fixture.generate(3)


async def test_a_refusal_of_the_engine_is_one_error_frame(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        fixture.engine.refuse = QueueFull("256 requests wait, the most allowed", retry_after_ms=250)
        await fixture.client.say(GenerateRequest(id=1, prompt="x"))
        assert await fixture.client.hear() == Failed(1, "queue_full", 503, "256 requests wait, the most allowed", 250)
        fixture.engine.refuse = None
        await fixture.generate(1)
        assert isinstance(await fixture.client.hear(), Accepted)


class Glancing(MsgpackCodec):
    """Counts the messages that were decoded."""

    decoded = 0

    def decoding(self, data: bytes | str) -> Generator[None, None, ClientMessage]:
        self.decoded += 1
        return super().decoding(data)


async def test_a_full_engine_refuses_what_nobody_has_read(autojump_clock: trio.testing.MockClock) -> None:
    """One answer each, with its own id; a hundred long texts are neither decoded nor submitted."""
    async with session(codec=(codec := Glancing())) as fixture:
        live = await fixture.generate(0)
        await fixture.client.hear()
        fixture.engine.refuse = QueueFull("full", retry_after_ms=250)
        decoded, submitted = codec.decoded, len(fixture.engine.clients)
        for id in range(1, 100):
            await fixture.client.say(GenerateRequest(id=id, prompt="x" * 100_000, priority=id % 10))
        assert [(each.id, each.code) for each in await fixture.hear_all(99)] == [
            (i, "queue_full") for i in range(1, 100)
        ]
        assert (codec.decoded - decoded, len(fixture.engine.clients) - submitted) == (0, 0)
        assert fixture.metrics.refused.labels("queue_full")._value.get() == 99
        # What is not about room is told as ever, and what is no `generate` is done.
        await fixture.client.say(GenerateRequest(id=0, prompt="x"))
        assert (await fixture.client.hear()).code == "duplicate_id"
        await fixture.client.say(Cancel(0))
        assert (await fixture.client.hear()).finish_reason == "cancelled"
        assert not live.live


async def test_answers_are_not_held_back_to_be_merged(autojump_clock: trio.testing.MockClock) -> None:
    async with session(frame_interval_ms=1000) as fixture:
        began_s = trio.current_time()
        for nonce in range(10):
            await fixture.client.say(Ping(nonce))
            assert await fixture.client.hear() == Pong(nonce)
        assert trio.current_time() == began_s


async def test_an_urgent_request_is_let_in_by_a_full_queue(autojump_clock: trio.testing.MockClock) -> None:
    config = EngineConfig(model="simulated", scheduler="continuous", max_batch_size=1, max_queue_requests=1)
    async with open_virtual_engine(config) as (engine, _), trio.open_nursery() as nursery:
        client = MemoryConnection(MSGPACK)
        nursery.start_soon(Session(client, engine, ServerConfig(), codec=MSGPACK).run)
        assert isinstance(await client.hear(), Hello)
        long = SamplingParams(max_tokens=200)
        answers = {}
        for id, priority in enumerate((5, 8, 8, 5, 5)):
            await client.say(GenerateRequest(id=id, prompt="x", priority=priority, sampling=long, stream=False))
            await trio.sleep(0.1)
        while len(answers) < 5:
            frame = await client.hear()
            if isinstance(frame, Failed | Finished):
                answers[frame.id] = frame.code if isinstance(frame, Failed) else frame.finish_reason
        assert answers == {0: "length", 1: "shed", 2: "queue_full", 3: "length", 4: "queue_full"}
        nursery.cancel_scope.cancel()


async def test_a_failing_request_is_one_error_frame_after_its_tokens(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        stream = await fixture.generate(1)
        fixture.engine.push(stream, "x")
        fixture.engine.fail(stream, ModelError("the model failed"))
        accepted, tokens, failed = await fixture.hear_all(3)
        assert isinstance(accepted, Accepted)
        assert tokens.text == "x"
        assert failed.code == "model_error"


async def test_a_bad_field_costs_its_request_only(autojump_clock: trio.testing.MockClock) -> None:
    async with session(codec=JSON) as fixture:
        await fixture.client.say('{"type": "generate", "id": 4, "prompt": "x", "max_tokens": -1}')
        refused = await fixture.client.hear()
        assert (refused.id, refused.code) == (4, "bad_request")
        assert "max_tokens" in refused.message
        await fixture.generate(4)
        await fixture.client.hear()
        # The same with a live id must not read as that request's end.
        await fixture.client.say('{"type": "generate", "id": 4, "prompt": "x", "max_tokens": -1}')
        refused = await fixture.client.hear()
        assert (refused.id, refused.code) == (4, "duplicate_id")


async def test_a_fatal_frame_ends_the_connection_after_every_terminal_frame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session() as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.engine.push(stream, "x")
        await fixture.client.say(b"\xc1 not msgpack")
        await until(lambda: fixture.client.closed is not None)
        assert fixture.client.closed is not None
        assert fixture.client.closed[0] == 1007
        frames = fixture.client.frames[2:]
        assert sorted(type(frame).__name__ for frame in frames) == ["Failed", "Finished", "Tokens"]
        assert [frame.finish_reason for frame in frames if isinstance(frame, Finished)] == ["cancelled"]


async def test_the_time_of_a_suspended_server_is_not_the_clients(autojump_clock: trio.testing.MockClock) -> None:
    async with session(send_timeout_s=30.0, frame_interval_ms=0.0) as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.client.hold()
        fixture.engine.push(stream)
        await trio.sleep(10)
        autojump_clock.jump(1000)
        fixture.deadlines.put_off(1000)
        await trio.sleep(19)
        assert not fixture.client.aborted
        fixture.client.release()
        assert isinstance(await fixture.client.hear(), Tokens)


async def test_a_client_that_stops_reading_is_aborted_after_the_send_timeout(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session(send_timeout_s=30.0, frame_interval_ms=0.0) as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.client.hold()
        fixture.engine.push(stream)
        stuck_at = trio.current_time()
        await fixture.ended.wait()
        assert trio.current_time() - stuck_at == pytest.approx(30.0)
        assert fixture.client.aborted
        assert fixture.client.closed is None
        assert fixture.engine.live == []


async def test_time_between_frames_does_not_count_towards_the_send_timeout(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session(send_timeout_s=5.0) as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        await trio.sleep(1000)
        fixture.engine.push(stream)
        assert isinstance(await fixture.client.hear(), Tokens)


async def test_a_flood_of_answers_that_nobody_reads_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    async with session(close_timeout_s=3.0) as fixture:
        fixture.client.hold()
        started_at = trio.current_time()
        most = 0
        with suppress(trio.BrokenResourceError):
            for nonce in range(20_000):
                await fixture.client.say(Ping(nonce))
                most = max(most, fixture.session.backlog)
        await fixture.ended.wait()
        assert most == MAX_BACKLOG
        assert fixture.client.aborted
        assert trio.current_time() - started_at == pytest.approx(3.0)


async def test_a_flood_that_is_read_slowly_is_closed_with_1008(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        fixture.client.hold()
        for nonce in range(MAX_BACKLOG + 10):
            await fixture.client.say(Ping(nonce))
        await trio.sleep(1)
        fixture.client.release()
        await until(lambda: fixture.client.closed is not None)
        assert fixture.client.closed == (1008, "too many answers left unread")
        assert len(fixture.client.frames) <= MAX_BACKLOG + 2


async def test_draining_waits_for_the_live_and_closes_with_1001(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.session.drain(5000, open_s=0.5)
        assert await fixture.client.hear() == DrainingNotice(5000)
        fixture.engine.refuse = Draining("the server is shutting down", retry_after_ms=1000)
        await fixture.client.say(GenerateRequest(id=2, prompt="x"))
        assert (await fixture.client.hear()).code == "draining"
        await trio.sleep(3)
        assert fixture.client.closed is None
        fixture.engine.finish(stream)
        assert isinstance(await fixture.client.hear(), Finished)
        await fixture.ended.wait()
        assert fixture.client.closed == (1001, "drained")


async def test_an_idle_connection_drains_as_soon_as_last_words_are_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session() as fixture:
        fixture.engine.refuse = Draining("the server is shutting down", retry_after_ms=1000)
        told_at = trio.current_time()
        fixture.session.drain(5000, open_s=0.5)
        await trio.sleep(0.3)  # the client's request crosses the notice
        await fixture.client.say(GenerateRequest(id=1, prompt="x"))
        await fixture.ended.wait()
        assert trio.current_time() - told_at == pytest.approx(0.5)
        notice, refused = fixture.client.frames[1:]
        assert notice == DrainingNotice(5000)
        assert isinstance(refused, Failed)
        assert (refused.id, refused.code) == (1, "draining")
        assert fixture.client.closed == (1001, "drained")


async def test_an_end_does_not_wait_for_last_words(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        told_at = trio.current_time()
        fixture.session.drain(5000, open_s=0.5)
        await trio.sleep(0.1)
        fixture.session.end(1001, "the server is shutting down", within_s=0.2)
        await fixture.ended.wait()
        assert trio.current_time() - told_at == pytest.approx(0.1, abs=0.01)
        assert fixture.client.closed == (1001, "drained")


async def test_end_is_bounded_also_behind_a_blocked_writer(autojump_clock: trio.testing.MockClock) -> None:
    async with session(send_timeout_s=600.0) as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        fixture.client.hold()
        fixture.engine.push(stream)
        await trio.sleep(1)
        ended_at = trio.current_time()
        fixture.session.end(1011, "the engine died", within_s=2.0)
        await fixture.ended.wait()
        assert trio.current_time() - ended_at == pytest.approx(2.0)
        assert fixture.client.aborted


async def test_a_dead_engine_still_gives_every_request_its_terminal_frame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session() as fixture:
        for id in (1, 2):
            await fixture.generate(id)
        await fixture.hear_all(2)
        fixture.engine.die("the model thread died")
        frames = await fixture.hear_all(2)
        assert {(frame.id, frame.code) for frame in frames} == {(1, "engine_dead"), (2, "engine_dead")}
        await fixture.client.say(GenerateRequest(id=3, prompt="x"))
        assert (await fixture.client.hear()).code == EngineDead.code


async def test_tokens_in_quick_succession_are_merged_and_slow_ones_are_not_held_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with session(frame_interval_ms=5.0) as fixture:
        stream = await fixture.generate(1)
        await fixture.client.hear()
        await trio.sleep(1)
        began_s = trio.current_time()
        counts = []
        for _ in range(12):  # a token a millisecond
            fixture.engine.push(stream)
            await trio.sleep(0.001)
        while sum(counts) < 12:
            frame = await fixture.client.hear()
            assert isinstance(frame, Tokens)
            counts.append(len(frame.token_ids))
        assert counts[0] == 1  # the first was not held back
        assert len(counts) <= 4
        assert trio.current_time() - began_s <= 0.012 + 0.005
        await trio.sleep(0.010)
        slow_s = trio.current_time()
        fixture.engine.push(stream)
        await fixture.client.hear()
        assert trio.current_time() == slow_s


async def test_who_asks_for_the_status_is_told_of_starts(autojump_clock: trio.testing.MockClock) -> None:
    async with session() as fixture:
        before = await fixture.generate("before")
        assert isinstance(await fixture.client.hear(), Accepted)
        await fixture.client.say(GetStatus())
        status = await fixture.client.hear()
        assert isinstance(status, Status)
        assert (status.state, status.running, status.retry_after_ms) == ("ready", 1, None)
        after = await fixture.generate("after")
        assert isinstance(await fixture.client.hear(), Accepted)
        before.start()
        after.start()
        assert await fixture.client.hear() == Started("after")
        fixture.engine.push(after, "x")
        assert isinstance(await fixture.client.hear(), Tokens)
        fixture.engine.refuse = QueueFull("full", retry_after_ms=70)
        await fixture.client.say(GetStatus())
        assert (await fixture.client.hear()).retry_after_ms == 70


async def test_a_client_that_reads_is_not_slow(autojump_clock: trio.testing.MockClock) -> None:
    """Whatever the bounds: frames a second apart, and a single token that may be unread."""
    engine_config = EngineConfig(model="simulated", max_unsent_tokens=1)
    async with open_virtual_engine(engine_config) as (engine, _), trio.open_nursery() as nursery:
        client = MemoryConnection()
        nursery.start_soon(Session(client, engine, ServerConfig(frame_interval_ms=1000), codec=MSGPACK).run)
        await client.say(GenerateRequest(id=1, prompt="hi", sampling=SamplingParams(max_tokens=500)))
        while not isinstance(end := await client.hear(), Finished | Failed):
            pass
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == 500
        client.disconnect()
