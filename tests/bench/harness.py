"""A short way to put load on the whole server in virtual time."""

from collections.abc import Callable
from dataclasses import replace

import trio

from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch.messages import SamplingParams
from wsbatch.steps import StepPlan, StepResult
from wsbatch.testing import VirtualWorker
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.specs import parse_arrivals, parse_lengths
from wsbatch_bench.load.trace import Trace, draw_trace
from wsbatch_bench.sampling import GREEDY
from wsbatch_bench.sweep.cell import CellResult
from wsbatch_bench.sweep.stage import open_virtual_target, run_virtual

COSTS = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0001)


def short_trace(count: int, arrivals: str = "poisson", *, prompt: int = 20, output: int = 5, seed: int = 1) -> Trace:
    """Fixed lengths, small enough for a test."""
    return draw_trace(
        count,
        parse_arrivals(arrivals),
        prompts=parse_lengths(f"fixed:tokens={prompt}"),
        outputs=parse_lengths(f"fixed:tokens={output}"),
        seed=seed,
    )


def load(
    trace: Trace,
    rate: float,
    *,
    warmup: int = 0,
    measured: int | None = None,
    stop_unstable: bool = False,
    sampling: SamplingParams = GREEDY,
    costs: CostModel = COSTS,
    prepare: Callable[[VirtualWorker], None] = lambda worker: None,
    **config: object,
) -> LoadRun:
    """Run it; `prepare` is given the worker before the load starts."""

    async def main() -> LoadRun:
        fields = {"model": "simulated", "scheduler": "dynamic", "max_batch_size": 4, "max_wait_ms": 0.0} | config
        async with open_virtual_target(EngineConfig(**fields), costs) as (target, worker):  # type: ignore[arg-type]
            prepare(worker)
            plan = LoadPlan(
                trace=trace,
                rate=rate,
                warmup=warmup,
                measured=measured or len(trace.entries) - warmup,
                stop_unstable=stop_unstable,
                sampling=sampling,
            )
            return await run_load(target, plan)

    return run_virtual(main)


def stall_once(worker: VirtualWorker, at_s: float, seconds: float) -> None:
    """The first step after `at_s` takes longer."""
    step = worker.step
    stalled = False

    async def slow(plan: StepPlan) -> StepResult:
        nonlocal stalled
        if not stalled and trio.current_time() >= at_s:
            stalled = True
            await trio.sleep(seconds)
        return await step(plan)

    worker.step = slow  # type: ignore[method-assign]


def cell(size: int = 8, wait_ms: float = 0.0, rate: float = 1.0, **fields: object) -> CellResult:
    """A stable cell well within the SLO."""
    base = CellResult(
        engine="virtual", scheduler="dynamic", max_batch_size=size, max_wait_ms=wait_ms, options="[]",
        label=f"dynamic b{size} w{wait_ms:g}", fraction=rate / 2, rate=rate, sent=300, completed=300,
        request_throughput=rate, output_throughput=100 * rate, ttft_p50_s=0.1, ttft_p95_s=0.5, ttft_p95_low_s=0.4,
        ttft_p95_high_s=0.6, e2e_p50_s=1.0, e2e_p95_s=3.0, e2e_p95_low_s=2.5, e2e_p95_high_s=3.5, tpot_p50_s=0.02,
        tpot_p95_s=0.03, tpot_p95_low_s=0.02, tpot_p95_high_s=0.04, success=1.0, success_low=0.9901, success_high=1.0,
        slot_utilization=0.9, waste_fraction=0.1, mean_rows=4.0, verdict="stable", growth_fraction=0.0,
        little_ratio=1.0, stopped_early=False, worst_lag_s=0.0, invalid="",
    )  # fmt: skip
    return replace(base, **fields)  # type: ignore[arg-type]
