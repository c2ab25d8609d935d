"""docs/extending.md: a policy from outside serves requests; every sampling parameter reaches the model."""

from collections.abc import Sequence
from dataclasses import fields
from math import inf

import pytest
from trio.testing import MockClock

from wsbatch.batching.accounting import Ledger, RowReport
from wsbatch.batching.costs import StepCost
from wsbatch.batching.queue import ScheduledRequest, WaitingQueue
from wsbatch.batching.scheduler import PROBE, Decision, Idle, Release, RowToken, Step, StepOutcome
from wsbatch.config import EngineConfig
from wsbatch.engine.open import SCHEDULERS, SchedulerKind
from wsbatch.messages import Finished, GenerateRequest, RowPhase, SamplingParams
from wsbatch.steps import PaddedDecode, PaddedRow, PaddedStart, PagedStep, StepResult
from wsbatch.testing import open_virtual_engine
from wsbatch.wire import JSON


class ShortestFirst:
    """Implements `Scheduler`: one request at a time, and of those that wait the one with the shortest prompt."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.ledger = Ledger()
        self._row: ScheduledRequest | None = None
        self._fresh = False  # the step in flight prefills the row
        self._ended = False  # the row is over
        self._in_flight = False
        self._releases: list[Release] = []

    @property
    def running(self) -> int:
        return int(self._row is not None and not self._ended)

    def add(self, request: ScheduledRequest) -> None:
        self.queue.add(request)

    def decide(self, now_s: float) -> Decision:
        self._fresh = self._row is None
        if self._row is not None:
            self._in_flight = True
            return Step(PaddedDecode())
        if not self.queue:
            return Idle()
        request = self._row = min(self.queue, key=lambda each: (len(each.token_ids), each.order))
        self.queue.remove(request.key)
        self.ledger.join(request.key)
        self._in_flight = True
        plan = PaddedStart((PaddedRow(request.key, request.token_ids, request.sampling),), request.max_new_tokens)
        return Step(plan, started=(request.key,))

    def complete(self, result: StepResult, now_s: float) -> StepOutcome:
        row, self._in_flight = self._row, False
        assert row is not None
        prefilled, useful = (len(row.token_ids) if self._fresh else 0), int(not self._ended)
        cost = StepCost(
            1, prefilled, useful * prefilled, int(not self._fresh), useful * (not self._fresh), result.model_ms / 1000
        )
        self.ledger.record(cost, [row.key])
        logprobs = result.logprobs[0] if result.logprobs else None
        tokens = () if self._ended else (RowToken(row.key, result.token_ids[0], logprobs),)
        self._release()
        return StepOutcome(tokens, cost)

    def abort(self, now_s: float) -> tuple[int, ...]:
        keys = (self._row.key,) if self._row is not None and not self._ended else ()
        self._in_flight, self._ended = False, True
        self._release()
        return keys

    def probe(self, token_ids: tuple[int, ...]) -> PaddedStart | None:
        return None if self._row else PaddedStart((PaddedRow(PROBE, token_ids, SamplingParams()),), max_new_tokens=1)

    def end(self, key: int, now_s: float) -> None:
        if self.queue.remove(key) is None and self._row is not None and self._row.key == key:
            self._ended = True
            self._release()

    def slot_phases(self) -> Sequence[tuple[int, RowPhase]]:
        return [] if self._row is None else [(self._row.key, "prefill" if self._fresh else "decode")]

    def releases(self) -> Sequence[Release]:
        releases, self._releases = self._releases, []
        return releases

    def report(self, key: int) -> RowReport | None:
        return self.ledger.report(key)

    def cache(self) -> None:
        return None

    def request(self, key: int) -> ScheduledRequest | None:
        return self._row if self._row is not None and self._row.key == key else self.queue.get(key)

    def _release(self) -> None:
        if self._row is not None and self._ended and not self._in_flight:
            self._releases.append(Release(self._row.key, 0.0, self.ledger.leave(self._row.key)))
            self._row, self._ended = None, False


@pytest.fixture
def shortest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the list in the document does to `open.py` and `config/engine.py`."""
    kind = SchedulerKind(
        scheduler=lambda config, now_s: ShortestFirst(),
        model=SCHEDULERS["dynamic"].model,
        most_tokens=lambda config: inf,
        block_tokens=lambda config, info: config.block_tokens,
    )
    monkeypatch.setitem(SCHEDULERS, "shortest_first", kind)
    name = EngineConfig.__dataclass_fields__["scheduler"]
    choices = (*name.metadata["choices"], "shortest_first")
    monkeypatch.setattr(name, "metadata", {**name.metadata, "choices": choices})


def config(scheduler: str) -> EngineConfig:
    return EngineConfig(model="simulated", scheduler=scheduler)  # type: ignore[arg-type]  # a name from outside


def asked(prompt: str, max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True), stream=False)


def test_a_scheduler_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="scheduler is 'shortest_first': must be one of dynamic, continuous"):
        config("shortest_first")


async def answers(scheduler: str) -> tuple[list[Finished], list[int]]:
    """The endings of four requests that the engine gets in this order, and the order in which their rows ran."""
    async with open_virtual_engine(config(scheduler)) as (engine, worker):
        streams = [await engine.submit(asked(prompt)) for prompt in ("a first one", "x" * 40, "short", "y" * 20)]
        endings = [[event async for event in stream][-1] for stream in streams]
        assert engine.core.status(0.0).running == engine.core.status(0.0).waiting == 0
    assert all(isinstance(ending, Finished) for ending in endings)
    return endings, worker.keys_seen  # type: ignore[return-value]


@pytest.mark.usefixtures("shortest_first")
async def test_a_policy_from_outside_serves_requests(autojump_clock: MockClock) -> None:
    endings, order = await answers("shortest_first")
    assert order == [1, 3, 4, 2]
    known, _ = await answers("dynamic")
    assert [(each.token_ids, each.finish_reason) for each in endings] == [
        (each.token_ids, each.finish_reason) for each in known
    ]
    assert {each.batch.max_size for each in endings} == {1}


@pytest.mark.usefixtures("shortest_first")
async def test_a_request_that_is_cancelled_makes_room_for_the_next(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config("shortest_first")) as (engine, worker):
        running = await engine.submit(asked("first", max_tokens=1000))
        waiting = await engine.submit(asked("waits", max_tokens=1000))
        last = await engine.submit(asked("and the last"))
        waiting.cancel()
        running.cancel()
        assert [event async for event in last][-1].finish_reason == "length"  # type: ignore[union-attr]
    assert worker.keys_seen == [1, 3]


HERE = {"max_tokens", "stop", "stop_token_ids", "ignore_eos"}
"""Sampling parameters that the engine acts on by itself."""


async def test_every_other_sampling_parameter_reaches_the_model(autojump_clock: MockClock) -> None:
    asked_for = SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, top_k=40, seed=11, logprobs=2)
    names = {spec.name for spec in fields(SamplingParams)} - HERE
    assert [name for name in names if getattr(asked_for, name) == getattr(SamplingParams(), name)] == []
    async with open_virtual_engine(config("continuous")) as (engine, worker):
        received = JSON.decode_client(JSON.encode_client(GenerateRequest(prompt="x", sampling=asked_for)))
        assert isinstance(received, GenerateRequest)
        stream = await engine.submit(received)
        await stream.ended.wait()
    ((_, plan),) = worker.plans
    assert isinstance(plan, PagedStep)
    (row,) = plan.rows
    assert {name: getattr(row.sampling, name) for name in names} == {name: getattr(asked_for, name) for name in names}
