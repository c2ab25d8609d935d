"""Is the plan right? Real servers in processes of their own behind a real router, beside the same load predicted."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import trio

from wsbatch.client import connect
from wsbatch_bench.cell import Cell, CellResult
from wsbatch_bench.costs import Costs
from wsbatch_bench.http_client import dial_url
from wsbatch_bench.load import LoadPlan, LoadRun, run_load
from wsbatch_bench.plan import Planner, capacity
from wsbatch_bench.pool_sim import PoolStage
from wsbatch_bench.router_cost import module_process
from wsbatch_bench.setting import Setting
from wsbatch_bench.slo import Slo, Verdict
from wsbatch_bench.sweep import Sweep
from wsbatch_bench.target import open_websocket_target

_QUIET = ("--port", "0", "--log-level", "error")


@dataclass(frozen=True)
class RealPoolStage:
    """So many `wsbatch serve` over the simulated model, which sleeps for its steps, and a `wsbatch route`; started anew
    for each run. Everything runs on this machine and shares its cores with the load."""

    costs: Costs
    replicas: int
    name = "real"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. Raises RuntimeError where a process does not start."""
        costs = self.costs[setting.scheduler]
        model = f"simulated:tau_ms={1000 * costs.tau_s},alpha_ms={1000 * costs.alpha_s},beta_ms={1000 * costs.beta_s}"
        serve = (
            "wsbatch",
            "serve",
            "--model",
            model,
            "--max-live-requests",
            "1000",
            *setting.measuring_flags(),
            *_QUIET,
        )
        with ExitStack() as stack:
            servers = [stack.enter_context(module_process(*serve)) for _ in range(self.replicas)]
            urls = [url for _, url in servers]
            _, url = stack.enter_context(module_process("wsbatch", "route", *_QUIET, *urls))
            return trio.run(_load, url, plan)


async def _load(url: str, plan: LoadPlan) -> LoadRun:
    dial, host, _ = dial_url(url)
    async with open_websocket_target(partial(connect, url), dial=dial, host=host, connections=16) as target:
        return await run_load(target, plan)


@dataclass(frozen=True)
class Compared:
    """One pool at one rate: the same trace, predicted and measured."""

    replicas: int
    rate: float
    predicted: CellResult
    measured: CellResult

    @property
    def e2e_error(self) -> float:
        """p95 end to end: the prediction over the measurement, minus one."""
        return self.predicted.e2e_p95_s / self.measured.e2e_p95_s - 1

    @property
    def throughput_error(self) -> float:
        """Requests a second: likewise."""
        return self.predicted.request_throughput / self.measured.request_throughput - 1

    def verdicts(self, slo: Slo) -> tuple[Verdict, Verdict]:
        """Predicted, measured."""
        return slo.judge(self.predicted), slo.judge(self.measured)


def compare(
    planner: Planner, sizes: Sequence[int], fractions: Sequence[float], *, warmup: int, measured: int
) -> Iterator[Compared]:
    """Each pool at fractions of the SLO capacity predicted for it; `warmup` and `measured`: requests of each run."""
    trace = planner.workload.trace(planner.seed, 2 * (warmup + measured))
    for replicas in sizes:
        carries = capacity(planner, replicas).passed
        for fraction in fractions:
            cell = Cell(planner.setting, fraction, float(f"{fraction * carries:.4g}"))
            predicted, real = (
                Sweep(stage, trace, warmup, measured).measure(cell)
                for stage in (PoolStage(planner.costs, replicas), RealPoolStage(planner.costs, replicas))
            )
            yield Compared(replicas, cell.rate, predicted, real)
