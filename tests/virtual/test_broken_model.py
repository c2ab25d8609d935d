"""A model that fails: for one request, for a while, for good. Who is told, and when the engine gives up."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.errors import EngineDead, QueueFull
from wsbatch.messages import Failed, Finished, GenerateRequest, SamplingParams
from wsbatch.steps import PaddedStart, PagedStep, StepPlan, StepResult
from wsbatch.testing import open_virtual_engine

SCHEDULERS = pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])


def config(scheduler: str, **fields: object) -> EngineConfig:
    values = {"model": "simulated", "scheduler": scheduler, "max_batch_size": 4, "max_wait_ms": 0.0}
    return EngineConfig(**(values | fields))  # type: ignore[arg-type]


async def ask(engine: BatchEngine, prompt: str = "abcd", tokens: int = 3) -> Finished | Failed:
    stream = await engine.submit(GenerateRequest(prompt=prompt, sampling=SamplingParams(max_tokens=tokens)))
    return [event async for event in stream][-1]  # type: ignore[return-value]


def poisoned(plan: StepPlan) -> bool:
    return isinstance(plan, PaddedStart | PagedStep) and any(1 in row.token_ids for row in plan.rows)


def probes_with_one_id(plan: StepPlan) -> bool:
    return isinstance(plan, PaddedStart | PagedStep) and plan.rows[0].key == 0 and len(plan.rows[0].token_ids) == 1


@SCHEDULERS
@pytest.mark.parametrize("worked_before", [True, False])
async def test_a_model_that_is_broken_for_good_ends_the_engine(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, scheduler: str, worked_before: bool
) -> None:
    async with open_virtual_engine(config(scheduler, max_batch_size=1)) as (engine, worker):
        if worked_before:
            assert isinstance(await ask(engine), Finished)
        worker.fail = lambda plan: True
        ends: list[Failed | Finished] = []

        async def one() -> None:
            ends.append(await ask(engine))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
            await trio.sleep(1.0)  # three have failed, and a probe: nothing more is let in
            assert [end.code for end in ends if isinstance(end, Failed)] == ["model_error"] * 3
            assert isinstance(engine.refusal(), QueueFull)
            assert engine.status().retry_after_ms == 1000
            with pytest.raises(QueueFull, match="the model fails and is being probed"):
                await ask(engine)
        assert [end.code for end in ends if isinstance(end, Failed)] == ["model_error"] * 3 + ["engine_dead"] * 7
        assert engine.state == "dead"
        assert "it failed 6 times in a row, probes included" in (await engine.wait_dead()).message
        with pytest.raises(EngineDead):
            await ask(engine)
        assert trio.current_time() < 3.0
    assert sum("the model failed: told to fail" in record.message for record in caplog.records) == 6


@SCHEDULERS
async def test_a_model_whose_numbers_are_never_finite_ends_the_engine(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    """It raises nothing: it names every row, those of probes too."""
    async with open_virtual_engine(config(scheduler, max_batch_size=1)) as (engine, worker):
        step = worker.step

        async def name(plan: StepPlan) -> StepResult:
            assert isinstance(plan, PaddedStart | PagedStep)
            return replace(await step(plan), failed={row.key: "not finite" for row in plan.rows})

        monkeypatch.setattr(worker, "step", name)
        for _ in range(3):
            end = await ask(engine)
            assert isinstance(end, Failed)
            assert end.code == "model_error"
        with trio.fail_after(60):
            assert "probes included" in str(await engine.wait_dead())


@SCHEDULERS
@pytest.mark.parametrize("worked_before", [True, False])
async def test_no_client_ends_the_engine_with_requests_that_fail(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, scheduler: str, worked_before: bool
) -> None:
    async with open_virtual_engine(config(scheduler)) as (engine, worker):
        if worked_before:
            assert isinstance(await ask(engine), Finished)
        # What has worked is probed with; single ids, none of which may be good, only where nothing ever has.
        worker.fail = lambda plan: poisoned(plan) or (worked_before and probes_with_one_id(plan))
        for _ in range(50):
            assert isinstance(await ask(engine, "po\x01son"), Failed)
            assert engine.refusal() is None
        assert isinstance(await ask(engine), Finished)
        assert len(caplog.records) == 10
        await trio.sleep(60)
        await ask(engine, "po\x01son")
        assert "(40 more were not logged)" in caplog.records[-1].message
        assert caplog.records[-1].levelno == logging.WARNING


@SCHEDULERS
async def test_what_ails_the_model_may_pass(autojump_clock: MockClock, scheduler: str) -> None:
    async with open_virtual_engine(config(scheduler)) as (engine, worker):
        worker.fail = lambda plan: trio.current_time() < 1.5
        for _ in range(3):
            assert isinstance(await ask(engine), Failed)
        await trio.sleep(1.0)
        assert isinstance(engine.refusal(), QueueFull)
        await trio.sleep(1.5)
        assert engine.refusal() is None
        assert isinstance(await ask(engine), Finished)


async def test_a_probe_that_hangs_is_a_stalled_step(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_virtual_engine(config("dynamic", step_stall_s=5.0)) as (engine, worker):
        worker.fail = lambda plan: True
        step: Callable[[StepPlan], object] = worker.step

        async def hang(plan: StepPlan) -> StepResult:
            if isinstance(plan, PaddedStart) and plan.rows[0].key == 0:
                await trio.sleep_forever()
            return await step(plan)  # type: ignore[misc, no-any-return]

        monkeypatch.setattr(worker, "step", hang)
        for _ in range(3):
            assert isinstance(await ask(engine), Failed)
        assert "no progress for 5.0 s" in (await engine.wait_dead()).message
