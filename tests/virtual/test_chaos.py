"""The whole stack under chaos, in virtual time: arrivals, cancels, disconnects anywhere, slow readers, failing steps,
timeouts and drains. Invariants are checked after every step of every task, and everything again at the end.

`pytest tests/virtual/test_chaos.py --hypothesis-profile=thorough` runs a thousand examples of each scheduler.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from wsproto.events import BytesMessage, TextMessage
from wsproto.utilities import LocalProtocolError

from schedule import seed_schedule
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.scheduler import Decision, Step
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.stream import Stream
from wsbatch.messages import (
    Accepted,
    Cancel,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    Hello,
    Ping,
    Pong,
    SamplingParams,
    Tokens,
)
from wsbatch.model.simulated import SimulatedModel
from wsbatch.server.serve import Server
from wsbatch.steps import PaddedDecode, PaddedRow, PaddedStart, PagedStep, StepPlan, StepResult
from wsbatch.testing import BareClient, Closed, MemoryListener, Rejected, VirtualWorker, open_virtual_engine
from wsbatch.wire import JSON, MSGPACK, Codec

GONE = (trio.BrokenResourceError, trio.ClosedResourceError, LocalProtocolError)
POISON = "\x01"  # never generated: the simulated model's tokens are printable
EXAMPLES = settings().max_examples if settings.get_current_profile_name() == "thorough" else 60
SETTLED_S = 120.0  # longer than every timeout: by then whoever fell silent was given up

SERVER = ServerConfig(
    max_connections=5,
    max_live_requests=3,
    head_timeout_s=5.0,
    ping_interval_s=20.0,
    ping_timeout_s=20.0,
    send_timeout_s=3.0,
    close_timeout_s=1.0,
    frame_interval_ms=0.0,  # so that every token that is read at once is a frame of its own
)


@dataclass(frozen=True)
class Ask:
    """One request, and what its client does after this time: nothing, or cancel it.

    `resumed` is the share of its output that was generated elsewhere before.
    """

    request: GenerateRequest
    pause_s: float
    cancel_after_s: float | None
    resumed: float = 0.0

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        ids, _, _ = undisturbed(self.request)
        return ids[: round(self.resumed * len(ids))]


@dataclass(frozen=True)
class Visit:
    """One connection. `ending` says how it ends, `cut` how much of the last bytes it still sends."""

    at_s: float
    codec: Codec
    asks: tuple[Ask, ...]
    blind: float | None  # how long it reads nothing after its second frame
    ending: str
    cut: float


@dataclass(frozen=True)
class Scenario:
    visits: tuple[Visit, ...]
    failing_steps: frozenset[int]
    drain: tuple[float, float] | None  # when, and with how much grace
    engine: dict[str, Any]
    schedule: int = 0  # seeds the order of tasks that are ready at the same time


asks = st.builds(
    Ask,
    request=st.builds(
        GenerateRequest,
        prompt=st.sampled_from(["a", "ab", "b" * 40, "b" * 40 + "c", "x" * 90, "poison" + POISON]),
        sampling=st.builds(
            SamplingParams,
            max_tokens=st.sampled_from([1, 2, 12, 40, 80]),
            temperature=st.sampled_from([0.0, 1.0]),
            seed=st.integers(0, 3),
            stop=st.sampled_from([(), (), ("a",), ("0",)]),
        ),
        priority=st.sampled_from([0, 5, 9]),
        timeout_ms=st.sampled_from([None, None, 400]),
        queue_timeout_ms=st.sampled_from([None, None, 100]),
        stream=st.sampled_from([True, True, True, False]),
    ),
    pause_s=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    cancel_after_s=st.sampled_from([None, None, None, 0.0, 0.05, 0.5]),
    resumed=st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0]),
)
visits = st.builds(
    Visit,
    at_s=st.sampled_from([0.0, 0.0, 0.05, 0.5, 2.0]),
    codec=st.sampled_from([MSGPACK, JSON]),
    asks=st.lists(asks, min_size=1, max_size=4).map(tuple),
    blind=st.sampled_from([None, None, None, 1.0, 10.0, 60.0]),
    ending=st.sampled_from(
        ["stay"] * 3
        + ["close", "vanish", "half-close", "silence"]
        + ["cut head", "cut head, silence", "cut frame", "cut frame, half-close", "cut frame, silence"]
    ),
    cut=st.floats(0, 0.99),
)


def scenarios(**engine: st.SearchStrategy[Any]) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        visits=st.lists(visits, min_size=1, max_size=7).map(tuple),
        failing_steps=st.frozensets(st.integers(0, 60), max_size=2),
        drain=st.sampled_from([None, None, None, (0.3, 0.5), (1.0, 20.0)]),
        engine=st.fixed_dictionaries(
            {
                "model": st.just("simulated"),
                "max_batch_size": st.sampled_from([1, 3, 8]),
                "max_queue_requests": st.sampled_from([2, 30]),
                "max_queue_tokens": st.sampled_from([100, 10_000]),
                "max_unsent_tokens": st.sampled_from([10, 4096]),
                **engine,
            }
        ),
        schedule=st.integers(0, 2**16 - 1),
    )


dynamic = scenarios(
    scheduler=st.just("dynamic"),
    max_wait_ms=st.sampled_from([0.0, 20.0]),
    early_compaction=st.booleans(),
    length_buckets=st.sampled_from([(), (8,)]),
)
continuous = scenarios(
    scheduler=st.just("continuous"),
    max_batch_total_tokens=st.sampled_from([256, 4096]),
    block_tokens=st.sampled_from([4, 16]),
    prefill_chunk_tokens=st.sampled_from([7, 64]),
    max_batch_prefill_tokens=st.just(64),
    prefix_cache=st.booleans(),
)


@cache
def undisturbed(request: GenerateRequest) -> tuple[tuple[int, ...], str, str]:
    """What this request gets from the model when nothing else exists: ids, text, finish reason."""
    model, sampling = SimulatedModel(), request.sampling
    chosen = SamplingParams(temperature=sampling.temperature, seed=sampling.seed or 0)
    row = PaddedRow(0, tuple((request.prompt or "").encode()), chosen)
    ids = list(model.compute(PaddedStart((row,), sampling.max_tokens)).token_ids)
    while len(ids) < sampling.max_tokens and not any(stop in bytes(ids).decode() for stop in sampling.stop):
        ids += model.compute(PaddedDecode()).token_ids
    text = bytes(ids).decode()
    for stop in sampling.stop:
        if stop in text:
            return tuple(ids), text[: text.index(stop)], "stop"
    return tuple(ids), text, "length"


class Watched(trio.abc.Instrument):
    """An engine under observation: its invariants, after every step of every task.

    Attributes:
        broken: what was found wrong.
        streams: every request that was ever accepted.
        step_ends: when model steps ended.
    """

    def __init__(self, engine: BatchEngine, worker: VirtualWorker, failing_steps: frozenset[int]) -> None:
        self.engine = engine
        self.broken: list[str] = []
        self.streams: list[Stream] = []
        self.step_ends: set[float] = set()
        self._last_end_s = 0.0
        self._core = engine.core
        self._scheduler = engine.scheduler
        self._worker_step, self._decide, self._add = worker.step, self._scheduler.decide, self._core.add
        worker.step = self._step  # type: ignore[method-assign]
        self._scheduler.decide = self._decided  # type: ignore[method-assign]
        self._core.add = self._added  # type: ignore[method-assign]
        worker.fail = lambda plan: (
            len(worker.plans) - 1 in failing_steps
            or (isinstance(plan, PaddedStart | PagedStep) and any(ord(POISON) in row.token_ids for row in plan.rows))
        )

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """The books are right whoever has just run."""
        admission, waiting = self._core._admission._places, self._scheduler.queue
        self._expect(
            admission.tokens == sum(len(work.token_ids) for work in waiting)
            and len(waiting) <= admission.requests <= admission._max_requests,
            lambda: f"{admission!r} for {[*waiting]}",
        )
        self._expect(
            all(stream.live or stream.terminal is not None for stream in self.streams)
            and {id(live.outbox) for live in self._core._requests._by_key.values()}
            >= {id(stream) for stream in self.streams if stream.live},
            lambda: "a live stream that the engine has forgotten",
        )
        if isinstance(self._scheduler, ContinuousScheduler):
            pool = self._scheduler.pool
            self._expect(pool.free + pool.cached + pool.used == pool.total, lambda: f"{pool!r}")

    async def _step(self, plan: StepPlan) -> StepResult:
        try:
            return await self._worker_step(plan)
        finally:
            self._last_end_s = trio.current_time()
            self.step_ends.add(self._last_end_s)

    def _decided(self, now_s: float) -> Decision:
        running = self._scheduler.running
        if isinstance(self._scheduler, ContinuousScheduler):
            self._scheduler.check()
        decision = self._decide(now_s)
        # With work at hand the model never waits, for a client least of all: so no gap between tokens is longer than
        # its steps.
        self._expect(
            not running or (isinstance(decision, Step) and now_s == self._last_end_s),
            lambda: f"{running} rows, {decision} at {now_s}, the last step ended at {self._last_end_s}",
        )
        return decision

    def _added(self, stream: Stream, *args: Any, **kwargs: Any) -> None:
        self._add(stream, *args, **kwargs)
        self.streams.append(stream)

    def _expect(self, holds: bool, what: Callable[[], str]) -> None:
        if not holds:  # raised from an instrument it would only be logged
            self.broken.append(what())


@dataclass
class Visitor:
    """Plays one `Visit`; what it has read, and when."""

    visit: Visit
    frames: list[tuple[float, Any]] = field(default_factory=list)
    closed: Closed | None = None
    rejected: Rejected | None = None
    sent: dict[int, Ask] = field(default_factory=dict)
    ended: set[Any] = field(default_factory=set)
    cut_short: bool = False
    changed: trio.Event = field(default_factory=trio.Event)

    @property
    def stays(self) -> bool:
        return self.visit.ending == "stay"

    async def run(self, listener: MemoryListener) -> None:
        await trio.sleep(self.visit.at_s)
        with suppress(*GONE):
            stream = await listener.connect()
            client = BareClient(stream, self.visit.codec)
            if "head" in self.visit.ending:
                head = b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: websocket\r\n\r\n"
                await stream.send_all(head[: round(len(head) * self.visit.cut)])
                await self._leave(client)
                return
            try:
                await client.open()
            except (Closed, Rejected) as end:
                self.rejected = end if isinstance(end, Rejected) else None
                await stream.aclose()
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, client)
                with suppress(*GONE):
                    await self._act(client, nursery)
                if not self.stays and "silence" not in self.visit.ending:
                    await trio.sleep(5)  # what still comes is read as well
                    nursery.cancel_scope.cancel()
            await stream.aclose()

    async def _act(self, client: BareClient, nursery: trio.Nursery) -> None:
        sending = trio.Lock()

        async def send(message: Any) -> None:
            async with sending:
                if not self.cut_short:
                    await client.send(message)

        async def cancel_later(id: int, after_s: float) -> None:
            await trio.sleep(after_s)
            with suppress(*GONE):
                await send(Cancel(id))

        for id, ask in enumerate(self.visit.asks):
            request = replace(ask.request, id=id, resume_token_ids=ask.resumed_ids)
            if id == len(self.visit.asks) - 1 and "frame" in self.visit.ending:
                data = self.visit.codec.encode_client(request)
                event = TextMessage(data=data) if isinstance(data, str) else BytesMessage(data=data)
                frame = client._protocol.send(event)
                async with sending:
                    self.cut_short = True
                    await client.stream.send_all(frame[: round(len(frame) * self.visit.cut)])
                break
            self.sent[id] = ask
            await send(request)
            if ask.cancel_after_s is not None:
                nursery.start_soon(cancel_later, id, ask.cancel_after_s)
            await trio.sleep(ask.pause_s)
        if self.stays:
            while self.closed is None and len(self.ended) < len(self.sent):
                with trio.move_on_after(10) as patience:
                    await self.changed.wait()
                if patience.cancelled_caught:
                    await send(Ping(0))  # it answers no pings: this is its sign of life
            await client.close()
        else:
            await self._leave(client)

    async def _leave(self, client: BareClient) -> None:
        if self.visit.ending == "close":
            await client.close()
        elif "half-close" in self.visit.ending:
            await client.stream.send_eof()
        elif "silence" not in self.visit.ending:
            await client.stream.aclose()

    async def _read(self, client: BareClient) -> None:
        blind = self.visit.blind
        with suppress(trio.ClosedResourceError):
            try:
                while True:
                    frame = await client.receive()
                    self.frames.append((trio.current_time(), frame))
                    if isinstance(frame, Finished | Failed):
                        self.ended.add(frame.id)
                    self._notify()
                    if blind is not None and len(self.frames) > 1:
                        await trio.sleep(blind)
                        blind = None
            except Closed as closed:
                self.closed = closed
                self._notify()
                if self.stays:
                    with suppress(Exception):  # a peer that has reset the connection hears no goodbye
                        await client.close()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


def judge(visitor: Visitor, scenario: Scenario, step_ends: set[float]) -> None:
    """Everything that was read is as promised; and all of it was, where the visitor stayed to the end."""
    if not visitor.frames:
        return
    told = Told(visitor, scenario, step_ends)
    assert isinstance(visitor.frames[0][1], Hello)
    for at_s, frame in visitor.frames[1:]:
        told.hear(at_s, frame)
    told.check_rest()
    if told.prompt and visitor.visit.ending in ("stay", "close"):
        told.check_close()


class Told:
    """What one visitor was told of its requests, frame by frame, each held to the protocol."""

    def __init__(self, visitor: Visitor, scenario: Scenario, step_ends: set[float]) -> None:
        self.visitor = visitor
        self.scenario = scenario
        self.step_ends = step_ends
        self.prompt = visitor.visit.blind is None
        self.live: dict[Any, list[int]] = {}
        self.texts: dict[Any, str] = {}
        self.ended: set[Any] = set()

    def hear(self, at_s: float, frame: Any) -> None:
        match frame:
            case Accepted(id=id):
                assert id in self.visitor.sent
                assert id not in self.live
                assert id not in self.ended
                self.live[id], self.texts[id] = list(self.visitor.sent[id].resumed_ids), ""
            case Tokens():
                self._tokens(at_s, frame)
            case Finished(id=id):
                check_finished(self.visitor.sent[id], self.live.pop(id), self.texts[id], frame, self.scenario)
                self.ended.add(id)
            case Failed(id=id):
                self._failed(id, frame)
            case DrainingNotice():
                assert self.scenario.drain is not None
            case other:
                assert isinstance(other, Pong)

    def _tokens(self, at_s: float, frame: Tokens) -> None:
        assert frame.index == len(self.live[frame.id])
        self.live[frame.id] += frame.token_ids
        self.texts[frame.id] += frame.text
        if self.prompt:
            assert at_s in self.step_ends
            assert len(frame.token_ids) == 1

    def _failed(self, id: Any, frame: Failed) -> None:
        assert id in self.visitor.sent
        assert id not in self.ended
        check_failed(self.visitor.sent[id], id in self.live, frame, self.scenario, prompt=self.prompt)
        self._check_beginning(id, self.live.pop(id, []))
        self.ended.add(id)

    def check_rest(self) -> None:
        """Of those without an ending."""
        for id, ids in self.live.items():
            self._check_beginning(id, ids)

    def check_close(self) -> None:
        """Of the connection of a visitor that read to its end."""
        closed = self.visitor.closed
        assert closed is not None
        assert closed.code in ({1000, 1001} if self.scenario.drain else {1000})
        if not self.visitor.stays:
            return
        # A drained server may have closed before it read the last of them; then it took none of those.
        assert not self.live
        if closed.code == 1000:
            assert self.ended == set(self.visitor.sent)

    def _check_beginning(self, id: Any, ids: list[int]) -> None:
        assert tuple(ids) == undisturbed(self.visitor.sent[id].request)[0][: len(ids)]


def check_finished(ask: Ask, streamed: list[int], text: str, frame: Finished, scenario: Scenario) -> None:
    ids, whole, reason = undisturbed(ask.request)
    got = tuple(streamed) if ask.request.stream else frame.token_ids
    assert got is not None
    assert got == ids[: len(got)]
    assert frame.usage.completion_tokens == len(got)
    assert frame.finish_reason in {
        reason: True,
        "cancelled": ask.cancel_after_s is not None,
        "timeout": ask.request.timeout_ms is not None,
        "shutdown": scenario.drain is not None,
    }
    whole = whole[len(ask.resumed_ids) :]  # a byte of text each
    if frame.finish_reason == reason:
        assert got == ids
        assert text + frame.text == whole
    else:
        assert {"cancelled": ask.cancel_after_s, "timeout": ask.request.timeout_ms, "shutdown": scenario.drain}[
            frame.finish_reason
        ] is not None
        assert whole.startswith(text + frame.text) or len(got) == len(ids)


def check_failed(ask: Ask, accepted: bool, frame: Failed, scenario: Scenario, *, prompt: bool) -> None:
    poisoned = any(
        POISON in (each.request.prompt or "")
        for visit in scenario.visits
        for each in (visit.asks if scenario.engine["scheduler"] == "dynamic" else (ask,))
    )
    possible = {
        "model_error": accepted and (poisoned or bool(scenario.failing_steps)),
        "slow_consumer": accepted and not prompt,
        "queue_timeout": accepted,
        "shed": accepted,
        "queue_full": not accepted,
        "draining": not accepted and scenario.drain is not None,
        "quota": not accepted,
    }
    assert possible[frame.code], (frame, ask)


async def play(scenario: Scenario) -> None:
    def tasks() -> list[str]:
        names: list[str] = []
        nurseries = list(trio.lowlevel.current_root_task().child_nurseries)  # type: ignore[union-attr]
        while nurseries:
            for task in nurseries.pop().child_tasks:
                names.append(task.name)
                nurseries += task.child_nurseries
        return sorted(names)

    async with open_virtual_engine(EngineConfig(**scenario.engine)) as (engine, worker):
        await trio.testing.wait_all_tasks_blocked()
        tasks_before = tasks()
        watched = Watched(engine, worker, scenario.failing_steps)
        trio.lowlevel.add_instrument(watched)
        listener = MemoryListener(capacity_bytes=500)  # a reader that pauses is soon behind
        server = Server(engine, SERVER, addresses=[("127.0.0.1", 1)])
        visitors = [Visitor(visit) for visit in scenario.visits]
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [listener])
            await trio.testing.wait_all_tasks_blocked()
            tasks_idle = tasks()
            async with trio.open_nursery() as visiting:
                for visitor in visitors:
                    visiting.start_soon(visitor.run, listener)
                if scenario.drain is not None:
                    at_s, grace_s = scenario.drain
                    await trio.sleep(at_s)
                    await server.drain(grace_s)
                    assert trio.current_time() <= at_s + grace_s
                await trio.sleep(SETTLED_S)
                for visitor in visitors:
                    judge(visitor, scenario, watched.step_ends)
                assert all(not stream.live for stream in watched.streams)
                visiting.cancel_scope.cancel()
            await trio.sleep(1)
            assert tasks() == (tasks_idle if scenario.drain is None else tasks_before)
            assert_idle(engine, server)
            if scenario.drain is None:
                worker.fail = lambda plan: False
                await assert_serves(listener)
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert tasks() == tasks_before
        trio.lowlevel.remove_instrument(watched)
        assert not watched.broken, watched.broken[:3]


def assert_idle(engine: BatchEngine, server: Server) -> None:
    core, admission = engine.core, engine.core._admission._places
    assert core._requests._by_key == {}
    assert (admission.requests, admission.tokens) == (0, 0)
    assert core._admission._fairness._lines == {}
    assert len(core._requests._deadlines) == 0
    assert (engine.scheduler.running, len(engine.scheduler.queue)) == (0, 0)
    if isinstance(engine.scheduler, ContinuousScheduler):
        pool = engine.scheduler.pool
        assert pool.used == 0
        assert pool.free + pool.cached == pool.total
        engine.scheduler.check()
    assert "<Transport 0 open, 0 of them" in repr(server)
    assert engine.metrics.registry.get_sample_value("wsbatch_num_requests_running") == 0
    assert server.metrics.registry.get_sample_value("wsbatch_connections") == 0
    for metrics in (engine.metrics, server.metrics):
        errors = metrics.registry.get_sample_value("wsbatch_requests_refused_total", {"code": "internal_error"})
        assert errors is None


async def assert_serves(listener: MemoryListener) -> None:
    """After all of it, the next one is served as ever."""
    ask = Ask(GenerateRequest(prompt="next", sampling=SamplingParams(max_tokens=3)), 0.0, None)
    visitor = Visitor(Visit(0.0, MSGPACK, (ask,), None, "stay", 0.0))
    await visitor.run(listener)
    (end,) = [frame for _, frame in visitor.frames if isinstance(frame, Finished)]
    assert end.finish_reason == "length"


def run(scenario: Scenario) -> None:
    seed_schedule(scenario.schedule)
    trio.run(play, scenario, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=EXAMPLES, deadline=None)
@given(dynamic)
def test_chaos_over_dynamic_batches(scenario: Scenario) -> None:
    run(scenario)


@settings(max_examples=EXAMPLES, deadline=None)
@given(continuous)
def test_chaos_over_continuous_batches(scenario: Scenario) -> None:
    run(scenario)


@pytest.mark.parametrize("schedule", range(10))
def test_a_client_that_closes_as_the_server_drains_reads_a_close_frame(schedule: int) -> None:
    ask = Ask(GenerateRequest(prompt="a", sampling=SamplingParams(max_tokens=1, temperature=0.0)), 1.0, None)
    visit = Visit(0.0, MSGPACK, (ask,), None, "stay", 0.0)
    run(Scenario((visit,), frozenset(), (1.0, 20.0), {"model": "simulated", "scheduler": "dynamic"}, schedule))
