"""The engine over the continuous scheduler in virtual time, and what both schedulers must agree on."""

from itertools import pairwise

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from wsbatch.config import EngineConfig
from wsbatch.engine.stream import Stream
from wsbatch.errors import ModelError, NeverFits
from wsbatch.messages import Failed, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.steps import PagedStep
from wsbatch.testing import open_virtual_engine


def config(**fields: object) -> EngineConfig:
    values = {
        "model": "simulated",
        "scheduler": "continuous",
        "max_batch_size": 8,
        "prefill_chunk_tokens": 64,
        "max_batch_prefill_tokens": 64,
    }
    return EngineConfig(**(values | fields))  # type: ignore[arg-type]


def request(tokens: int = 4, prompt: str = "abcd", **fields: object) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(max_tokens=tokens), **fields)  # type: ignore[arg-type]


async def ending(stream: Stream) -> Finished | Failed:
    last: object = None
    async for event in stream:
        last = event
    assert isinstance(last, Finished | Failed)
    return last


async def token_times(stream: Stream) -> list[float]:
    """When each token came, in virtual seconds."""
    times: list[float] = []
    async for event in stream:
        if isinstance(event, Tokens):
            times += [trio.current_time()] * len(event.token_ids)
    return times


def pool_at_rest(engine: object) -> bool:
    pool = engine.scheduler.pool  # type: ignore[attr-defined]
    return bool(pool.used == 0 and pool.free + pool.cached == pool.total)


async def test_a_request_joins_at_the_next_step_and_leaves_at_its_own_end(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, _):
        long = await engine.submit(request(tokens=100))
        await trio.sleep(0.2)
        short = await ending(await engine.submit(request(tokens=3, stream=False)))
        assert isinstance(short, Finished)
        # The step in flight (11 ms at most), a step with its prompt (13 ms), two decode steps of two rows (12 ms each).
        assert short.timing.total_ms <= 11 + 13 + 2 * 12 + 0.1
        assert short.batch.hol_delay_ms == 0
        await ending(long)
        assert pool_at_rest(engine)


async def test_a_cancelled_row_frees_its_slot_and_blocks_at_the_next_step(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_batch_size=1, prefix_cache=False)) as (engine, _):
        stream = await engine.submit(request(tokens=1000))
        await trio.sleep(0.1)
        stream.cancel()
        cancelled_s = trio.current_time()
        await ending(await engine.submit(request(tokens=1)))
        assert trio.current_time() - cancelled_s <= 0.012 + 0.013
        assert pool_at_rest(engine)


async def test_streams_do_not_stall_while_a_long_prompt_is_prefilled(autojump_clock: MockClock) -> None:
    """Eight streams, a 4,000-token prompt arrives: no gap beyond one decode step plus one chunk."""
    gaps: dict[int, float] = {}
    for chunk in (64, 4096):
        chosen = config(max_batch_size=16, prefill_chunk_tokens=chunk, max_batch_prefill_tokens=4096)
        times: list[list[float]] = []

        async def read(stream: Stream, times: list[list[float]] = times) -> None:
            times.append(await token_times(stream))

        async with open_virtual_engine(chosen) as (engine, _), trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read, await engine.submit(request(tokens=200)))
            await trio.sleep(0.5)
            await ending(await engine.submit(request(tokens=4, prompt="x" * 4000)))
        assert len(times) == 8
        gaps[chunk] = max(later - sooner for row in times for sooner, later in pairwise(row))
    # tau 10 ms, alpha 1 ms a row, beta 0.5 ms a prompt token: a decode step of nine rows, and a chunk.
    assert gaps[64] <= 0.010 + 9 * 0.001 + 64 * 0.0005 + 1e-9
    assert gaps[4096] > 4000 * 0.0005


async def test_an_itl_goal_chooses_the_chunk(autojump_clock: MockClock) -> None:
    """Steps cost 10 ms + 1 ms a row + 0.5 ms a prompt token: beside eight rows 50 ms leave room for 64 tokens."""
    chosen = config(max_batch_size=16, prefill_chunk_tokens=512, max_batch_prefill_tokens=4096, itl_slo_ms=50.0)
    async with open_virtual_engine(chosen) as (engine, _), trio.open_nursery() as nursery:
        times: list[list[float]] = []

        async def read(stream: Stream) -> None:
            times.append(await token_times(stream))

        for length in (20, 40, 60, 80, 20, 40, 60, 80):
            nursery.start_soon(read, await engine.submit(request(tokens=300, prompt="z" * length)))
        await trio.sleep(1.0)
        tuned_s = trio.current_time()
        await ending(await engine.submit(request(tokens=4, prompt="x" * 2000)))
        assert engine.scheduler.prefill_budget.chunk_tokens in range(56, 66)  # type: ignore[attr-defined]
    gaps = [later - sooner for row in times for sooner, later in pairwise(row) if sooner > tuned_s]
    assert 0.040 < max(gaps) <= 0.051


async def test_a_prefix_seen_before_is_not_computed_again(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, _):
        first = await ending(await engine.submit(request(prompt="y" * 100, stream=False)))
        second = await ending(await engine.submit(request(prompt="y" * 100, stream=False)))
        assert isinstance(first, Finished)
        assert isinstance(second, Finished)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 96)
        assert second.token_ids == first.token_ids
        value = engine.metrics.registry.get_sample_value
        assert value("wsbatch_prefix_cache_queries_total") == 200
        assert value("wsbatch_prefix_cache_hits_total") == 96


async def test_seven_short_rows_beside_a_long_one_waste_nothing(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, _):
        alone = await ending(await engine.submit(request(tokens=4, prompt="solo")))
        assert isinstance(alone, Finished)
        streams = [await engine.submit(request(tokens=4, stream=False)) for _ in range(7)]
        streams.append(await engine.submit(request(tokens=32, stream=False)))
        ends = [await ending(stream) for stream in streams]
        ledger = engine.scheduler.ledger
        assert ledger.decode.waste_fraction == 0
        assert ledger.decode.issued_tokens == ledger.decode.useful_tokens == 52 + 3
        assert all(isinstance(end, Finished) and end.batch.hol_delay_ms == 0 for end in ends)


async def test_what_the_pool_cannot_hold_is_refused(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_batch_total_tokens=256)) as (engine, _):
        with pytest.raises(NeverFits, match="at most 256 fit"):
            await engine.submit(request(tokens=200, prompt="x" * 100))


async def test_running_out_of_blocks_preempts_and_everybody_finishes(autojump_clock: MockClock) -> None:
    roomy, tight = config(), config(max_batch_total_tokens=256, prefix_cache=False)
    texts: list[list[str]] = []
    for chosen in (roomy, tight):
        async with open_virtual_engine(chosen) as (engine, _):
            streams = [await engine.submit(request(tokens=60, prompt=f"{n:04}", stream=False)) for n in range(8)]
            ends = [await ending(stream) for stream in streams]
            texts.append([end.text for end in ends if isinstance(end, Finished)])
            assert pool_at_rest(engine)
            preempted = engine.metrics.registry.get_sample_value("wsbatch_num_preemptions_total")
            assert preempted is not None
            assert (preempted > 0) is (chosen is tight)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8


async def test_a_poisoned_request_ends_alone(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, worker):
        worker.fail = lambda plan: isinstance(plan, PagedStep) and any(66 in row.token_ids for row in plan.rows)
        streams = [await engine.submit(request(prompt="aBa" if n == 3 else "aaa", tokens=1)) for n in range(8)]
        ends = [await ending(stream) for stream in streams]
        assert [isinstance(end, Failed) for end in ends] == [n == 3 for n in range(8)]
        assert isinstance(ends[3], Failed)
        assert ends[3].code == ModelError.code
        assert isinstance(await ending(await engine.submit(request(tokens=1, prompt="ccc"))), Finished)
        assert pool_at_rest(engine)


async def test_a_poisoned_request_may_leave_while_it_is_looked_for(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, worker):
        worker.fail = lambda plan: isinstance(plan, PagedStep) and any(66 in row.token_ids for row in plan.rows)
        first_s = trio.current_time()
        first = await engine.submit(request(tokens=2))
        await trio.sleep(0.005)  # its step runs: the next two join the one after it together
        poisoned = await engine.submit(request(prompt="aBa", tokens=1))
        other = await engine.submit(request(prompt="aaa", tokens=1))
        await trio.sleep_until(first_s + 0.030)  # that step has failed, its halves are being run
        poisoned.cancel()
        assert isinstance(await ending(poisoned), Finished)
        for stream in (first, other):
            assert isinstance(await ending(stream), Finished)
        assert engine.state == "ready"
        assert pool_at_rest(engine)


async def outputs(chosen: EngineConfig, arrivals: list[tuple[float, str, int]]) -> list[tuple[str, tuple[int, ...]]]:
    """Run requests that arrive at these times; each one's text and ids."""
    results: list[tuple[str, tuple[int, ...]] | None] = [None] * len(arrivals)

    async def ask(index: int, at_s: float, prompt: str, tokens: int) -> None:
        await trio.sleep_until(start_s + at_s)
        sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=index)
        stream = await engine.submit(GenerateRequest(prompt=prompt, sampling=sampling, stream=False))
        end = await ending(stream)
        assert isinstance(end, Finished)
        assert end.token_ids is not None
        results[index] = (end.text, end.token_ids)

    async with open_virtual_engine(chosen) as (engine, _):
        start_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for index, arrival in enumerate(arrivals):
                nursery.start_soon(ask, index, *arrival)
        if chosen.scheduler == "continuous":
            assert pool_at_rest(engine)
    return [result for result in results if result is not None]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.text(alphabet="ab", min_size=1, max_size=60), st.integers(1, 40)),
        min_size=1,
        max_size=12,
    )
)
def test_every_request_gets_the_same_tokens_from_either_scheduler(arrivals: list[tuple[float, str, int]]) -> None:
    def run(chosen: EngineConfig) -> list[tuple[str, tuple[int, ...]]]:
        return trio.run(outputs, chosen, arrivals, clock=MockClock(autojump_threshold=0))

    dynamic = run(EngineConfig(model="simulated", scheduler="dynamic", max_batch_size=4, early_compaction=True))
    small = run(config(max_batch_total_tokens=256, prefill_chunk_tokens=7, max_batch_prefill_tokens=16, block_tokens=4))
    assert len(dynamic) == len(arrivals)
    assert small == dynamic
