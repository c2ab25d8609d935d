"""The engine's loop in virtual time: a step takes 10 ms plus 1 ms a decode row plus 0.5 ms a prompt token."""

from dataclasses import fields, replace

import pytest
import trio
from trio.testing import MockClock

from wsbatch.batching.scheduler import Idle
from wsbatch.config import EngineConfig
from wsbatch.engine.stream import Stream
from wsbatch.errors import (
    BadRequest,
    Draining,
    EngineDead,
    ModelError,
    NeverFits,
    QueueFull,
    QueueTimeout,
    RequestError,
    SlowConsumer,
    TooLarge,
)
from wsbatch.messages import Accepted, ChatMessage, Failed, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch.steps import PaddedStart, PagedStep, StepPlan, StepResult
from wsbatch.testing import open_virtual_engine
from wsbatch.text import ByteText


def request(tokens: int = 4, prompt: str = "abcd", **fields: object) -> GenerateRequest:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=tokens)
    return GenerateRequest(prompt=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def config(**fields: object) -> EngineConfig:
    values = {"model": "simulated", "scheduler": "dynamic", "max_batch_size": 4, "max_wait_ms": 50.0}
    return EngineConfig(**(values | fields))  # type: ignore[arg-type]


async def ending(stream: Stream) -> Finished | Failed:
    """Read the stream to its terminal event, checking that tokens are contiguous on the way."""
    index = len(stream.request.resume_token_ids)
    last: object = None
    async for event in stream:
        if isinstance(event, Tokens):
            assert event.index == index
            index += len(event.token_ids)
        last = event
    assert isinstance(last, Finished | Failed)
    return last


def starts(plans: list[tuple[float, object]]) -> list[tuple[float, int]]:
    """When each batch began, and how many rows it had."""
    return [(round(at_s, 4), len(plan.rows)) for at_s, plan in plans if isinstance(plan, PaddedStart)]


async def test_a_full_batch_goes_at_once(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, worker):
        streams = [await engine.submit(request()) for _ in range(4)]
        for stream in streams:
            assert isinstance(await ending(stream), Finished)
    assert starts(worker.plans) == [(0.0, 4)]


async def test_the_oldest_is_held_for_max_wait_and_no_longer(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, worker):
        await engine.submit(request())
        await trio.sleep(0.030)
        stream = await engine.submit(request())
        await ending(stream)
    assert starts(worker.plans) == [(0.050, 2)]


async def test_an_idle_server_without_wait_dispatches_immediately(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, worker):
        await trio.sleep(1.0)
        await ending(await engine.submit(request()))
    assert starts(worker.plans) == [(1.0, 1)]


async def test_time_behind_a_running_batch_counts_as_waited(autojump_clock: MockClock) -> None:
    """The busy server's trap: at the batch's end everything that came meanwhile goes as one batch, at once."""
    async with open_virtual_engine(config()) as (engine, worker):
        first = [await engine.submit(request(tokens=40)) for _ in range(4)]
        await trio.sleep(0.1)
        late = [await engine.submit(request()) for _ in range(3)]
        await ending(first[0])
        ended_s = trio.current_time()
        for stream in late:
            await ending(stream)
    assert starts(worker.plans) == [(0.0, 4), (round(ended_s, 4), 3)]


async def test_a_cancelled_waiter_never_reaches_the_model(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, worker):
        kept = await engine.submit(request())
        async with engine.generate(request()) as stream:
            pass
        gone = await ending(stream)
        assert isinstance(gone, Finished)
        assert gone.finish_reason == "cancelled"
        await ending(kept)
    assert starts(worker.plans) == [(0.050, 1)]


async def test_a_cancelled_row_stops_emitting_at_once(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, _):
        stream = await engine.submit(request(tokens=100))
        await trio.sleep(0.2)
        stream.cancel()
        before_s = trio.current_time()
        end = await ending(stream)
        assert trio.current_time() == before_s
        assert isinstance(end, Finished)
        assert end.finish_reason == "cancelled"
        assert 0 < end.usage.completion_tokens < 100
        await trio.sleep(10)
        assert stream.take() == []


async def test_events_and_timing_of_one_request(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=20.0)) as (engine, _):
        stream = await engine.submit(request(tokens=3))
        events = [event async for event in stream]
    accepted, end = events[0], events[-1]
    assert isinstance(accepted, Accepted)
    assert (accepted.prompt_tokens, accepted.requests_ahead) == (4, 0)
    assert isinstance(end, Finished)
    assert end.finish_reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (4, 3)
    # 20 ms wait; prefill of 4 tokens 12 ms; two decode steps of 11 ms.
    assert (end.timing.queue_ms, end.timing.prefill_ms, end.timing.ttft_ms, end.timing.total_ms) == (20, 12, 32, 54)
    assert (end.batch.max_size, end.batch.issued_tokens, end.batch.useful_tokens) == (1, 6, 6)


async def test_streaming_ends_at_its_own_end_a_whole_answer_with_its_batch(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, _):
        short = await engine.submit(request(tokens=2))
        whole = await engine.submit(request(tokens=2, stream=False))
        long = await engine.submit(request(tokens=10))
        short_end = await ending(short)
        short_s = trio.current_time()
        long_end = await ending(long)
        whole_end = await ending(whole)
        assert isinstance(short_end, Finished)
        assert isinstance(whole_end, Finished)
        assert isinstance(long_end, Finished)
        behind_ms = (trio.current_time() - short_s) * 1000
        assert behind_ms == pytest.approx(8 * 13)  # eight more steps of three rows
        assert whole_end.batch.hol_delay_ms == pytest.approx(behind_ms)
        assert short_end.batch.hol_delay_ms == 0
        assert whole_end.token_ids is not None
        assert len(whole_end.token_ids) == 2
        assert len(whole_end.text) == 2
        assert engine.metrics.registry.get_sample_value("wsbatch_head_of_line_delay_seconds_sum") == pytest.approx(
            2 * behind_ms / 1000
        )


async def test_the_queue_is_bounded_and_says_when_to_come_back(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=3, max_batch_size=8)) as (engine, _):
        for _ in range(3):
            await engine.submit(request())
        with pytest.raises(QueueFull) as refused:
            await engine.submit(request())
        assert refused.value.retry_after_ms is not None
        assert refused.value.retry_after_ms >= 50
        assert isinstance(engine.refusal(), QueueFull)
        await trio.sleep(1)
        assert engine.refusal() is None


async def test_the_queue_is_bounded_in_prompt_tokens(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_tokens=10)) as (engine, _):
        await engine.submit(request(prompt="x" * 8))
        with pytest.raises(QueueFull, match="8 prompt tokens are waiting; 3 more would pass the bound of 10"):
            await engine.submit(request(prompt="x" * 3))
        await engine.submit(request(prompt="x" * 2))


async def test_places_are_taken_before_tokenizing(autojump_clock: MockClock) -> None:
    """A burst of long prompts gets exactly the cap accepted, though none of them is tokenized when it is checked."""
    async with open_virtual_engine(config(max_queue_requests=3, max_batch_size=8)) as (engine, _):
        refused = 0

        async def ask() -> None:
            nonlocal refused
            try:
                await engine.submit(request(prompt="x" * 5000))
            except QueueFull:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask)
        assert refused == 3


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request(prompt=""), BadRequest, "prompt: must not be empty"),
        (GenerateRequest(token_ids=(1, 999)), BadRequest, "token_ids holds 999"),
        (request(tokens=100, prompt="x" * 30), NeverFits, "at most 128 fit"),
        (request(prompt="x" * 500), TooLarge, "500 bytes"),
        (request(tokens=2, resume_token_ids=(65, 66, 67)), BadRequest, "resume_token_ids"),
        (GenerateRequest(token_ids=(1,), parse_special=True), BadRequest, "parse_special: goes with prompt"),
        (GenerateRequest(messages=(ChatMessage("user", "x"),), parse_special=True), BadRequest, "parse_special: goes"),
    ],
)
async def test_what_can_never_run_is_refused_at_once(
    autojump_clock: MockClock, bad: GenerateRequest, error: type[RequestError], words: str
) -> None:
    async with open_virtual_engine(config(max_model_len=128, max_queue_requests=1)) as (engine, worker):
        with pytest.raises(error, match=words):
            await engine.submit(bad)
        end = await ending(await engine.submit(request()))  # nothing else is lost, no place is leaked
        assert isinstance(end, Finished)
        assert len(worker.keys_seen) == 1
        assert engine.refusal() is None


@pytest.mark.parametrize("field", ["prompt", "messages"])
async def test_a_token_that_the_model_lacks_is_that_requests_error(
    field: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteText, "encode", lambda self, text, **_: [65, 257])
    monkeypatch.setattr(ByteText, "encode_messages", lambda self, messages, **_: [65, 257])
    text = {"prompt": {"prompt": "a"}, "messages": {"messages": (ChatMessage("user", "a"),)}}[field]
    async with open_virtual_engine(config()) as (engine, worker):
        neighbour = await engine.submit(GenerateRequest(token_ids=(65, 256), sampling=SamplingParams(max_tokens=4)))
        with pytest.raises(BadRequest, match=rf"^{field} holds the token 257, .*: its vocabulary is 257$"):
            await engine.submit(GenerateRequest(**text))  # type: ignore[arg-type]
        assert isinstance(await ending(neighbour), Finished)
        assert len(worker.keys_seen) == 1


async def test_queue_timeout_fires_on_time_while_a_step_runs(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_batch_size=1, max_wait_ms=0.0)) as (engine, worker):
        await engine.submit(request(prompt="x" * 4000, tokens=1))  # one step of 2 s
        await trio.sleep(0.1)
        stream = await engine.submit(request(queue_timeout_ms=500))
        end = await ending(stream)
        assert trio.current_time() == pytest.approx(0.6)
        assert isinstance(end, Failed)
        assert end.code == QueueTimeout.code
        await trio.sleep(5)
    assert len(worker.keys_seen) == 1


async def test_a_client_can_only_shorten_the_queue_timeout(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_batch_size=1, max_wait_ms=0.0, queue_timeout_ms=300)) as (engine, _):
        await engine.submit(request(prompt="x" * 4000, tokens=1))
        await trio.testing.wait_all_tasks_blocked()
        await ending(await engine.submit(request(queue_timeout_ms=5000)))
        assert trio.current_time() == pytest.approx(0.3)


async def test_timeout_in_the_run_finishes_with_what_there_is(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, _):
        end = await ending(await engine.submit(request(tokens=1000, timeout_ms=500)))
        assert trio.current_time() == pytest.approx(0.5)
        assert isinstance(end, Finished)
        assert end.finish_reason == "timeout"
        assert end.usage.completion_tokens > 10


@pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])
async def test_every_sampling_parameter_reaches_the_model(autojump_clock: MockClock, scheduler: str) -> None:
    """The record itself goes there, with its seed: a parameter that is added to it cannot be lost on the way."""
    sampling = SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, stop=("z",), logprobs=2)
    assert [field.name for field in fields(sampling) if getattr(sampling, field.name) == field.default] == [
        "seed",
        "stop_token_ids",
        "ignore_eos",
    ]
    async with open_virtual_engine(config(scheduler=scheduler, max_wait_ms=0.0)) as (engine, worker):
        stream = await engine.submit(request(sampling=sampling))
        await ending(stream)
        assert stream.accepted is not None
        (_, plan), *_ = worker.plans
        assert isinstance(plan, PaddedStart | PagedStep)
        assert plan.rows[0].sampling == replace(sampling, seed=stream.accepted.seed)


async def test_a_failing_step_ends_its_batch_and_the_engine_serves_on(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=10.0)) as (engine, worker):
        worker.fail = lambda plan: isinstance(plan, PaddedStart) and plan.rows[0].key == 1
        for stream in [await engine.submit(request()) for _ in range(3)]:
            end = await ending(stream)
            assert isinstance(end, Failed)
            assert end.code == ModelError.code
        assert isinstance(await ending(await engine.submit(request())), Finished)


async def test_a_row_that_the_model_names_ends_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is named while it runs; another only when it has said all and its row goes on with the batch."""
    async with open_virtual_engine(config(max_wait_ms=10.0)) as (engine, worker):
        step = worker.step

        async def name(plan: StepPlan) -> StepResult:
            result = await step(plan)
            rows = {1: "not finite", 2: "not finite"} if len(worker.plans) == 3 else {}
            return replace(result, failed=rows)

        monkeypatch.setattr(worker, "step", name)
        named = await engine.submit(request())
        done = await engine.submit(request(tokens=2, stream=False))
        other = await engine.submit(request())
        end = await ending(named)
        assert isinstance(end, Failed)
        assert (end.code, "not finite" in end.message) == (ModelError.code, True)
        for stream, tokens in ((done, 2), (other, 4)):
            end = await ending(stream)
            assert isinstance(end, Finished)
            assert end.usage.completion_tokens == tokens
    assert len(worker.plans) == 4  # nothing was run again to find the row


async def test_a_stalled_step_kills_the_engine_honestly(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0, step_stall_s=1.0)) as (engine, _):
        running = await engine.submit(request(prompt="x" * 4000))
        await trio.sleep(0.1)
        waiting = await engine.submit(request())
        for stream in (running, waiting):
            end = await ending(stream)
            assert isinstance(end, Failed)
            assert end.code == EngineDead.code
        assert trio.current_time() == pytest.approx(1.0)
        assert engine.state == "dead"
        with pytest.raises(EngineDead, match=r"no progress for 1\.0 s"):
            await engine.submit(request())
        assert isinstance(await engine.wait_dead(), EngineDead)


async def test_a_suspended_process_does_not_take_its_step_for_stalled(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps over a minute, as when a stopped process goes on; the step then ends, in less than its time."""
    async with open_virtual_engine(config(max_wait_ms=0.0, step_stall_s=5.0)) as (engine, worker):
        step, held = worker.step, trio.Event()

        async def hold(plan: StepPlan) -> StepResult:
            await held.wait()
            return await step(plan)

        monkeypatch.setattr(worker, "step", hold)
        stream = await engine.submit(request(tokens=2))
        await trio.sleep(2.0)
        autojump_clock.jump(60.0)
        await trio.sleep(1.5)
        assert engine.state == "ready"
        held.set()
        assert isinstance(await ending(stream), Finished)
        # It still has what it had before; what the watchdog slept through counts as a second at most.
        held = trio.Event()
        await engine.submit(request())
        await trio.sleep(2.0)
        autojump_clock.jump(60.0)
        resumed_s = trio.current_time()
        await engine.wait_dead()
        assert 2.0 <= trio.current_time() - resumed_s <= 3.01


async def test_a_wedged_scheduler_is_noticed(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting > 0, running = 0, and the scheduler says idle: no request may wait for ever for that."""
    async with open_virtual_engine(config()) as (engine, _):
        monkeypatch.setattr(engine.scheduler, "decide", lambda now_s: Idle())
        end = await ending(await engine.submit(request()))
        assert isinstance(end, Failed)
        assert (end.code, engine.state) == (EngineDead.code, "dead")
        assert "1 requests wait and nothing runs" in end.message


async def test_drain_lets_live_requests_finish_and_refuses_new_ones(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, _), trio.open_nursery() as nursery:
        stream = await engine.submit(request(tokens=50))
        nursery.start_soon(engine.drain, 30.0)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Draining):
            await engine.submit(request())
        end = await ending(stream)
        assert isinstance(end, Finished)
        assert end.finish_reason == "length"


async def test_drain_ends_the_rest_at_its_deadline(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_batch_size=1, max_wait_ms=0.0)) as (engine, _):
        running = await engine.submit(request(tokens=1000))
        await trio.testing.wait_all_tasks_blocked()
        waiting = await engine.submit(request())
        await engine.drain(2.0)
        assert trio.current_time() == pytest.approx(2.0)
        for stream in (running, waiting):
            end = await ending(stream)
            assert isinstance(end, Finished)
            assert end.finish_reason == "shutdown"


async def test_an_unread_stream_is_ended_and_its_neighbour_is_not_slowed(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0, max_unsent_tokens=20, max_batch_size=2)) as (engine, _):
        slow = await engine.submit(request(tokens=300))
        brisk = await engine.submit(request(tokens=300))
        end = await ending(brisk)
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == 300
        slow_end = await ending(slow)
        assert isinstance(slow_end, Failed)
        assert slow_end.code == SlowConsumer.code


async def test_a_resumed_request_continues_as_if_undisturbed(autojump_clock: MockClock) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, _):
        whole = await ending(await engine.submit(request(sampling=sampling, stream=False)))
        assert isinstance(whole, Finished)
        assert whole.token_ids is not None
        resumed = request(sampling=sampling, stream=False, resume_token_ids=whole.token_ids[:8])
        rest = await ending(await engine.submit(resumed))
        assert isinstance(rest, Finished)
        assert rest.token_ids == whole.token_ids
        assert rest.text == whole.text[8:]


async def test_stop_strings_end_the_request_and_do_not_leak(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, _):
        whole = await ending(await engine.submit(request(tokens=30, stream=False)))
        assert isinstance(whole, Finished)
        stop = whole.text[10:13]
        stream = await engine.submit(request(sampling=SamplingParams(max_tokens=30, stop=(stop,))))
        text = ""
        async for event in stream:
            if isinstance(event, Tokens | Finished):
                text += event.text
        assert text == whole.text[: whole.text.index(stop)]
        assert isinstance(event, Finished)
        assert event.finish_reason == "stop"


async def test_a_stop_string_that_began_before_the_resumption_is_found(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, _):
        whole = await ending(await engine.submit(request(tokens=30, stream=False)))
        assert isinstance(whole, Finished)
        assert whole.token_ids is not None
        sampling = SamplingParams(max_tokens=30, stop=(whole.text[10:13],))
        end = await ending(await engine.submit(request(sampling=sampling, resume_token_ids=whole.token_ids[:11])))
        assert isinstance(end, Finished)
        assert (end.finish_reason, end.text, end.usage.completion_tokens) == ("stop", "", 13)


async def test_what_was_wholly_generated_elsewhere_ends_at_once(autojump_clock: MockClock) -> None:
    """A server lost after the last token and before the word of the end: another one knows how it ended."""
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (engine, worker):
        whole = await ending(await engine.submit(request(tokens=30, stream=False)))
        assert isinstance(whole, Finished)
        assert whole.token_ids is not None
        steps = len(worker.plans)
        ids, text = whole.token_ids, whole.text
        for sampling, resumed, reason, tail in [
            (SamplingParams(max_tokens=30), ids, "length", ""),
            (SamplingParams(max_tokens=30, stop=(text[10:13],)), ids[:13], "stop", ""),
            (SamplingParams(max_tokens=30, stop=(text[29] + "\n",)), ids, "length", text[29]),
        ]:
            end = await ending(await engine.submit(request(sampling=sampling, resume_token_ids=resumed)))
            assert isinstance(end, Finished)
            assert (end.finish_reason, end.text, end.usage.completion_tokens) == (reason, tail, len(resumed))
        await trio.sleep(1)
        assert len(worker.plans) == steps
        assert engine.status().waiting == engine.status().running == 0


async def test_status_tells_the_work_there_is(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0, max_batch_size=1, max_queue_requests=2)) as (engine, _):
        idle = engine.status()
        assert (idle.state, idle.max_batch_size, idle.step_ms, idle.queue_ms) == ("ready", 1, 0.0, 0.0)
        running = await engine.submit(request(tokens=10))
        await trio.sleep(0.012 + 2 * 0.011 + 0.005)  # its prompt and two steps; the third is in flight
        for _ in range(2):
            await engine.submit(request(tokens=6, prompt="x" * 20))
        await trio.sleep(0.004)
        status = engine.status()
        assert (status.waiting, status.running, status.queued_tokens, status.running_tokens) == (2, 1, 52, 7)
        assert (status.queue_ms, status.step_ms) == (pytest.approx(4), pytest.approx(9))
        assert status.retry_after_ms is not None
        assert running.started
        await trio.sleep(5)
        assert engine.status() == idle


async def test_two_engines_do_not_share_metrics(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_wait_ms=0.0)) as (one, _), open_virtual_engine(config()) as (two, _):
        await ending(await one.submit(request()))
        name = "wsbatch_generation_tokens_total"
        assert one.metrics.registry.get_sample_value(name) == 4
        assert two.metrics.registry.get_sample_value(name) == 0


@pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])
async def test_long_prompts_on_a_slow_machine_do_not_look_like_a_stall(
    autojump_clock: MockClock, scheduler: str
) -> None:
    """A prompt token takes 60 ms: 2,048 in one step, or the eight prompts of one batch, would take over 120 s."""
    chosen = config(scheduler=scheduler, max_batch_size=8, max_wait_ms=0.0, queue_timeout_ms=3_600_000)
    async with open_virtual_engine(chosen, replace(DEFAULT_COSTS, beta_s=0.060)) as (engine, worker):
        lengths = [4000, *[900] * 6] if scheduler == "continuous" else [300] * 12
        prompts = [chr(65 + n) * length for n, length in enumerate(lengths)]
        for stream in [await engine.submit(request(tokens=20, prompt=prompt)) for prompt in prompts]:
            assert isinstance(await ending(stream), Finished)
        assert engine.state == "ready"
        longest_s = max(worker.model.step_s(plan) for _, plan in worker.plans)
        # A padded prompt cannot be cut: it goes alone. The first step is sized without knowing what it will cost.
        assert longest_s <= (0.060 * 240 if scheduler == "continuous" else 0.060 * 300) + 0.1
