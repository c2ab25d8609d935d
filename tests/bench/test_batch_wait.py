"""The engine tells apart the time behind a running batch and the time that the policy held the request."""

import trio
from trio.testing import MockClock

from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch.messages import Finished, GenerateRequest, SamplingParams, Timing
from wsbatch.testing import open_virtual_engine


async def test_batch_wait_is_the_part_of_the_queue_in_which_the_model_was_free(autojump_clock: MockClock) -> None:
    config = EngineConfig(model="simulated", scheduler="dynamic", max_batch_size=4, max_wait_ms=200.0)
    timings: dict[str, Timing] = {}

    async with open_virtual_engine(config, CostModel(tau_s=0.1, alpha_s=0.0, beta_s=0.0)) as (engine, _):

        async def ask(name: str, at_s: float, tokens: int) -> None:
            await trio.sleep_until(at_s)
            async with engine.generate(
                GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=tokens))
            ) as stream:
                events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
            timings[name] = events[-1].timing

        async with trio.open_nursery() as nursery:
            start_s = trio.current_time()
            nursery.start_soon(ask, "held", start_s, 2)  # held until 0.2, runs until 0.4
            nursery.start_soon(ask, "company", start_s + 0.15, 2)  # comes while it is held
            nursery.start_soon(ask, "behind", start_s + 0.3, 1)  # behind that batch until 0.4, then held until 0.5

    assert (timings["held"].queue_ms, timings["held"].batch_wait_ms) == (200, 200)
    assert (timings["company"].queue_ms, timings["company"].batch_wait_ms) == (50, 50)
    assert (timings["behind"].queue_ms, timings["behind"].batch_wait_ms) == (200, 100)
