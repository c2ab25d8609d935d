"""The engine's core alone, without an event loop: whatever is called in whatever order, its books balance."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.fairness import Client
from wsbatch.batching.scheduler import Idle, Step, WaitUntil
from wsbatch.config import EngineConfig
from wsbatch.engine.core import EngineCore
from wsbatch.engine.open import make_scheduler
from wsbatch.engine.outbox import Outbox
from wsbatch.errors import EngineDead, RequestError, StepFailed
from wsbatch.messages import Accepted, Event, Failed, Finished, GenerateRequest, SamplingParams, Started, Tokens
from wsbatch.model.simulated import SimulatedModel
from wsbatch.steps import PagedStep, StepResult
from wsbatch.text import ByteText

CONFIG: dict[str, Any] = {
    "model": "simulated",
    "max_batch_size": 3,
    "max_queue_requests": 4,
    "max_queue_tokens": 24,
    "max_wait_ms": 20.0,
    "queue_timeout_ms": 400,
}


@dataclass
class Driver:
    """A shell of the core that does what it is told, and looks at the books after everything."""

    scheduler: str
    now_s: float = 0.0
    outboxes: list[Outbox] = field(default_factory=list)
    events: dict[int, list[Event]] = field(default_factory=dict)
    flight: Step | None = None

    def __post_init__(self) -> None:
        config = EngineConfig(**CONFIG, scheduler=self.scheduler)
        pool = BlockPool(12, 4)  # smaller than a configuration allows: rows are preempted
        self.model = SimulatedModel(max_model_len=48, block_tokens=4)
        scheduler = make_scheduler(config, now_s=0.0)
        if self.scheduler == "continuous":
            scheduler = ContinuousScheduler(
                max_batch_size=3, max_batch_prefill_tokens=8, prefill_chunk_tokens=4, pool=pool
            )
        self.core = EngineCore(config, info=self.model.info, scheduler=scheduler, codec=ByteText(), now_s=0.0)

    def submit(self, request: GenerateRequest, client: Client, tokenize_s: float, gives_up: bool) -> None:
        arrived_s = self.now_s
        try:
            request = self.core.check(request)
            with self.core.reserve(request, client) as place:
                self.turn(tokenize_s)
                if gives_up:
                    raise StepFailed("anything")
                ids = list((request.prompt or "").encode())
                outbox = Outbox(self.core.fit(request, ids))
                self.core.add(outbox, ids, place, client=client, arrived_s=arrived_s, now_s=self.now_s)
                self.outboxes.append(outbox)
        except (RequestError, StepFailed):
            pass

    def turn(self, seconds: float) -> None:
        """Time passes, and the step in flight, if there is one, goes on."""
        self.now_s += seconds
        self.core.expire(self.now_s)

    def step(self, fate: str) -> None:
        """Begin a step, or end the one in flight."""
        if self.flight is None:
            if self.core.death is None:
                decision = self.core.next(self.now_s)
                assert isinstance(decision, Step | WaitUntil | Idle)
                self.flight = decision if isinstance(decision, Step) else None
            return
        plan, self.flight = self.flight.plan, None
        if fate == "abort":
            self.core.abort(StepFailed("told to"), self.now_s)
            return
        result = self.model.compute(plan)
        failed: dict[int, StepFailed] = {}
        if fate == "row" and isinstance(plan, PagedStep):
            failed[plan.rows[0].key] = StepFailed("told to")
            result = StepResult(result.token_ids, None, result.model_ms)
        self.core.complete(result, failed, self.now_s)

    def check(self) -> None:
        core, scheduler = self.core, self.core.scheduler
        places = core._admission._places
        waiting = list(scheduler.queue)
        assert (places.requests, places.lent) == (len(waiting), 0)
        assert places.tokens == sum(len(work.token_ids) for work in waiting)
        lines = {client: line.waiting for client, line in core._admission._fairness._lines.items()}
        assert lines == Counter(core._requests._by_key[work.key].client for work in waiting)
        assert {outbox.key for outbox in self.outboxes if outbox.live} == {outbox.key for outbox in core.unfinished}
        assert set(core._requests._deadlines._at_s) <= {outbox.key for outbox in core.unfinished}
        assert len(core._requests._deadlines._heap) <= 2 * len(core._requests._deadlines) + 64
        if isinstance(scheduler, ContinuousScheduler):
            scheduler.check()
            assert scheduler.pool.free + scheduler.pool.cached + scheduler.pool.used == scheduler.pool.total
        for outbox in self.outboxes:
            self.events.setdefault(outbox.key, []).extend(outbox.take())

    def check_streams(self) -> None:
        """Of each accepted request: `Accepted`, contiguous tokens, and one ending after which nothing comes."""
        for outbox in self.outboxes:
            first, *middle, last = self.events[outbox.key]
            assert isinstance(first, Accepted)
            assert isinstance(last, Finished | Failed)
            assert all(isinstance(event, Tokens | Started) for event in middle)
            if isinstance(last, Finished) and last.finish_reason == "timeout":
                assert outbox.request.timeout_ms is not None
                assert last.timing.total_ms >= outbox.request.timeout_ms
            index = len(outbox.request.resume_token_ids)
            for event in middle:
                assert isinstance(event, Tokens)
                assert event.index == index
                index += len(event.token_ids)
            assert index <= outbox.request.sampling.most_tokens


CLIENTS = st.builds(Client, st.sampled_from("ab"), st.integers(0, 1))
REQUESTS = st.builds(
    lambda prompt, tokens, resumed, **fields: GenerateRequest(
        prompt=prompt, sampling=SamplingParams(max_tokens=tokens), resume_token_ids=resumed, **fields
    ),
    prompt=st.text("ab", min_size=1, max_size=14),
    tokens=st.one_of(st.none(), st.integers(1, 12)),
    resumed=st.lists(st.integers(97, 98), max_size=2).map(tuple),
    priority=st.integers(0, 9),
    timeout_ms=st.one_of(st.none(), st.integers(1, 300)),
    queue_timeout_ms=st.one_of(st.none(), st.integers(1, 300)),
    stream=st.booleans(),
)
CALLS = st.one_of(
    st.tuples(st.just("submit"), REQUESTS, CLIENTS, st.sampled_from([0.0, 0.01, 0.5]), st.booleans()),
    st.tuples(st.just("step"), st.sampled_from(["complete", "complete", "complete", "row", "abort"])),
    st.tuples(st.just("turn"), st.sampled_from([0.0, 0.01, 0.1])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


@pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])
@given(calls=st.lists(CALLS, max_size=60), end=st.sampled_from(["shut_down", "die", "run"]))
@settings(max_examples=1000, deadline=None)
def test_every_accepted_request_has_one_ending_and_leaves_nothing_behind(
    scheduler: str, calls: list[tuple[Any, ...]], end: str
) -> None:
    driver = Driver(scheduler)
    for name, *arguments in calls:
        if name == "cancel":
            live = driver.core.unfinished
            if live:
                driver.core.cancel(live[arguments[0] % len(live)], driver.now_s)
        else:
            getattr(driver, name)(*arguments)
        driver.check()
    if end == "shut_down":
        driver.core.shut_down(driver.now_s)
    elif end == "die":
        driver.core.die(EngineDead("told to"), driver.now_s)
    for _ in range(400):
        if not driver.core._requests._by_key and driver.flight is None:
            break
        driver.turn(0.05)
        driver.step("complete")
    driver.check()
    assert driver.core._requests._by_key == {}
    assert len(driver.core._requests._deadlines) == 0
    driver.check_streams()


def test_a_days_deadlines_leave_with_their_requests() -> None:
    driver = Driver("continuous")
    for _ in range(500):
        request = GenerateRequest(prompt="a", sampling=SamplingParams(max_tokens=1), timeout_ms=86_400_000)
        driver.submit(request, Client(), 0.0, gives_up=False)
        driver.step("complete")
        driver.step("complete")
    assert all(isinstance(outbox.terminal, Finished) for outbox in driver.outboxes)
    assert len(driver.core._requests._deadlines._heap) <= 64
