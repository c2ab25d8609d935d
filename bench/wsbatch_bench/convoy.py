"""What live connections do to the model's steps and to the event loop: two threads share the GIL."""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from wsbatch.batch_engine import BatchEngine
from wsbatch.config import EngineConfig
from wsbatch.messages import GenerateRequest, SamplingParams
from wsbatch.opening import open_engine
from wsbatch_bench.bare_loop import LoopRequest
from wsbatch_bench.server_process import ServerProcess
from wsbatch_bench.streaming import stream_all


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one run: their mean, and an upper bound on the event loop's lateness at p99 (nan: not measured)."""

    mean_s: float
    lag_p99_s: float


async def steps_with_streams(server: ServerProcess, requests: Sequence[LoopRequest]) -> Steps:
    """Stream every request over a connection of its own, all at once."""
    before = await server.look()
    await stream_all(server.url, requests)
    after = await server.look()
    seconds, count = (
        after.values[name] - before.values[name] for name in ("wsbatch_step_seconds_sum", "wsbatch_step_seconds_count")
    )
    return Steps(seconds / count, after.lag_quantile_s(before, 0.99))


async def steps_alone(config: EngineConfig, requests: Sequence[LoopRequest], *, runs: int) -> list[Steps]:
    """The same in this process, without a server: nobody reads a token before the end."""
    async with open_engine(config) as engine:
        await _run_alone(engine, requests)  # as the server is warmed up
        return [await _run_alone(engine, requests) for _ in range(runs)]


async def _run_alone(engine: BatchEngine, requests: Sequence[LoopRequest]) -> Steps:
    def sums() -> tuple[float, float]:
        value = engine.metrics.registry.get_sample_value
        return value("wsbatch_step_seconds_sum") or 0.0, value("wsbatch_step_seconds_count") or 0.0

    before_s, before_count = sums()
    streams = []
    for index, request in enumerate(requests):
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        ask = GenerateRequest(id=index, token_ids=request.prompt_ids, sampling=sampling, stream=False)
        streams.append(await engine.submit(ask))
    for stream in streams:
        async for _ in stream:
            pass
    after_s, after_count = sums()
    return Steps((after_s - before_s) / (after_count - before_count), float("nan"))


def run_alone(config: EngineConfig, requests: Sequence[LoopRequest], *, runs: int) -> list[Steps]:
    """`steps_alone` in an event loop of its own. Raises what loading the model raises."""
    return trio.run(lambda: steps_alone(config, requests, runs=runs))
