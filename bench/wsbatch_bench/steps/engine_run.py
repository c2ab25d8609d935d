"""The same requests through the engine itself, in this process: its tokens, and what the engine adds to the model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import trio

from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.open import open_engine
from wsbatch.engine.stream import Stream
from wsbatch.messages import GenerateRequest, Tokens
from wsbatch.testing import open_virtual_engine
from wsbatch_bench.load.server import parse_totals
from wsbatch_bench.steps.bare_loop import LoopRequest
from wsbatch_bench.sweep.stage import run_virtual

# More than submitting takes (a tenth of a millisecond a request on a busy machine), and less than a batch does.
_HOLD_MS = 10.0
_HOLD_MS_A_REQUEST = 1.0


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Outputs in the order of the requests; seconds in all, of them in the model, and of CPU in all threads."""

    outputs: list[list[int]]
    total_s: float
    model_s: float
    cpu_s: float

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(map(len, self.outputs))


def run_engine(
    config: EngineConfig, workloads: Sequence[Sequence[LoopRequest]], *, costs: CostModel
) -> list[EngineRun]:
    """Of each workload in turn, submit all requests at once and read every stream to its end; all on one engine.

    A dynamic batch is held until all requests are submitted, so that every batch but the last is full. The continuous
    scheduler begins with those that have come and takes the others in at the next step. The simulated model runs in
    virtual time. Raises what loading the model raises.
    """
    if config.scheduler == "dynamic":
        # The last batch may be smaller: it has waited for longer than this behind the ones before it. A batch that is
        # alone is full by definition.
        config = replace(
            config,
            max_batch_size=min(config.max_batch_size, *map(len, workloads)),
            max_wait_ms=_HOLD_MS + _HOLD_MS_A_REQUEST * max(map(len, workloads)),
        )
    if config.model == "simulated":

        async def virtual() -> list[EngineRun]:
            async with open_virtual_engine(config, costs) as (engine, _):
                return [await _run(engine, requests) for requests in workloads]

        return run_virtual(virtual)

    async def real() -> list[EngineRun]:
        async with open_engine(config) as engine:
            return [await _run(engine, requests) for requests in workloads]

    return trio.run(real)


async def _run(engine: BatchEngine, requests: Sequence[LoopRequest]) -> EngineRun:
    model_before_s = parse_totals(engine.metrics.render().decode()).step_seconds
    begin_s, cpu_before_s = trio.current_time(), time.process_time()
    streams = [
        await engine.submit(
            GenerateRequest(
                id=index,
                token_ids=request.prompt_ids,
                sampling=replace(request.sampling, max_tokens=request.output_tokens, ignore_eos=True),
            )
        )
        for index, request in enumerate(requests)
    ]
    outputs: list[list[int]] = [[] for _ in requests]
    async with trio.open_nursery() as nursery:
        for stream, output in zip(streams, outputs, strict=True):
            nursery.start_soon(_read, stream, output)
    total_s, cpu_s = trio.current_time() - begin_s, time.process_time() - cpu_before_s
    model_s = parse_totals(engine.metrics.render().decode()).step_seconds - model_before_s
    return EngineRun(outputs, total_s, model_s, cpu_s)


async def _read(stream: Stream, output: list[int]) -> None:
    async for event in stream:
        if isinstance(event, Tokens):
            output += event.token_ids
