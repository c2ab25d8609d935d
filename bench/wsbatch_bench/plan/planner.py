"""How many replicas a rate needs within an SLO: pools of a few, the rule that scales them up, and the whole pool."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import ceil, inf

from wsbatch_bench.load.specs import Arrivals, Lengths
from wsbatch_bench.load.trace import Trace, draw_trace
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.stability import Saturation
from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.grid import Sweep
from wsbatch_bench.sweep.saturation import saturate, when_full
from wsbatch_bench.sweep.setting import Costs, Setting
from wsbatch_bench.sweep.slo import Slo

# Tokens a second: of one router's core, at one and at four tokens a frame; of one replica's front end. Measured:
# docs/replicas.md, "What the router costs", and docs/benchmarks.md, "The front end alone".
ROUTER_TOKENS_PER_S = {1: 13_000, 4: 50_000}
FRONT_END_TOKENS_PER_S = 17_000
MAX_LOAD = 0.5
"""Of both: an event loop that is busy all the time is late, and real sockets come on top of what was measured."""

_GAP = 1.03  # between what passes and what does not, where the search ends
_ROUNDS = 8
_WIDER = 1.02  # replicas, where a pool does not pass
_TAIL = 0.99
_MORE = 5  # times as many requests of a cell, where a pool is so busy that fewer do not show its queue


@dataclass(frozen=True)
class Workload:
    """What is asked: an arrival process and lengths; or a trace of such lengths, replayed over and over at any rate."""

    arrivals: Arrivals | None
    prompts: Lengths
    outputs: Lengths
    replay: Trace | None = None

    def trace(self, seed: int, count: int) -> Trace:
        """So many requests."""
        if self.replay is not None:
            return self.replay
        return draw_trace(count, self.arrivals, prompts=self.prompts, outputs=self.outputs, seed=seed)


@dataclass(frozen=True)
class Planner:
    """Measures pools of replicas.

    Attributes:
        costs, setting: of a replica.
        slo: what must hold.
        workload: what is asked.
        measured: requests of a cell at least.
        seed: of the traces.
        saturations: those of single replicas that are known already.
    """

    costs: Costs
    setting: Setting
    slo: Slo
    workload: Workload
    measured: int
    seed: int = 0
    saturations: dict[Setting, Saturation] = field(default_factory=dict, repr=False, compare=False)

    @property
    def most(self) -> float:
        """Requests a second that no replica can exceed: every step full, prompts in as few steps as there may be."""
        costs, size = self.costs[self.setting.scheduler], self.setting.max_batch_size
        token_s = costs.step_s(decode_rows=size, prefill_tokens=0) / size
        return 1 / ((self.workload.outputs.mean - 1) * token_s + self.workload.prompts.mean * costs.beta_s)

    @property
    def span_s(self) -> float:
        """How long the longest of 100 outputs takes in full steps: a pool needs that to forget how it began."""
        costs, config = self.costs[self.setting.scheduler], self.setting.config(model="simulated")
        chunk = config.prefill_chunk_tokens if self.setting.scheduler == "continuous" else 0
        step_s = costs.step_s(decode_rows=self.setting.max_batch_size, prefill_tokens=chunk)
        return self.workload.outputs.quantile(_TAIL) * step_s

    def routers(self, rate: float) -> int:
        """How many it takes at one token a frame."""
        return routers_for(rate * self.workload.outputs.mean, 1)

    def tokens(self, rate: float) -> float:
        """Output tokens to be simulated for a cell: warm-up, the measured requests, and until the last has ended."""
        return (2 * self.span_s * rate + self._measured(rate)) * self.workload.outputs.mean

    def measure(self, replicas: int, rate: float, *, another: bool = False) -> CellResult:
        """A pool under load; `another` draws another trace."""
        warmup, measured = ceil(self.span_s * rate), self._measured(rate)
        sweep = Sweep(
            PoolStage(self.costs, replicas, self.routers(rate)),
            self.workload.trace(self.seed + another, 2 * warmup + measured),
            warmup,
            measured,
            most=_MORE * self.measured,
            saturations={when_full(self.setting): self.saturation.times(replicas)},
        )
        return sweep.measure(Cell(self.setting, rate / (replicas * self.most), rate))

    @property
    def saturation(self) -> Saturation:
        """What one replica does when the next batch is always waiting; measured once."""
        full = when_full(self.setting)
        if full not in self.saturations:
            trace = self.workload.trace(self.seed, 2 * self.measured)
            self.saturations[full] = saturate(PoolStage(self.costs), full, trace, self.measured)
        return self.saturations[full]

    def passes(self, cell: CellResult) -> bool:
        """Whether it certainly meets the SLO."""
        return self.slo.judge(cell) == "pass"

    def _measured(self, rate: float) -> int:
        return max(self.measured, ceil(self.span_s * rate))


@dataclass(frozen=True)
class PoolCapacity:
    """What a pool carries within the SLO.

    Attributes:
        replicas: in the pool.
        cells: measured, in the order of the search.
        passed: the highest rate at which it certainly meets the SLO; 0 for none.
        missed: the lowest rate above that at which it does not certainly do so.
        at: the cell at `passed`.
    """

    replicas: int
    cells: tuple[CellResult, ...]
    passed: float
    missed: float
    at: CellResult | None

    @property
    def share(self) -> float:
        """Requests a second of each replica."""
        return self.passed / self.replicas


def capacity(planner: Planner, replicas: int) -> PoolCapacity:
    """The highest rate within the SLO, by bisection below what no pool can exceed."""
    low, high = 0.0, planner.most * replicas
    cells: list[CellResult] = []
    at: CellResult | None = None
    for _ in range(_ROUNDS):
        if high <= _GAP * low:
            break
        rate = float(f"{(low + high) / 2:.4g}")
        cells.append(planner.measure(replicas, rate))
        if planner.passes(cells[-1]):
            low, at = rate, cells[-1]
        else:
            high = rate
    return PoolCapacity(replicas, tuple(cells), low, high, at)


def capacities(planner: Planner, sizes: Sequence[int], *, jobs: int = 1) -> Iterator[PoolCapacity]:
    """Of pools of these sizes, in this order; `jobs` at once."""
    if jobs == 1:
        yield from (capacity(planner, size) for size in sizes)
        return
    with ProcessPoolExecutor(jobs) as executor:
        # The largest takes longest: it begins first.
        futures = {size: executor.submit(capacity, planner, size) for size in sorted(sizes, reverse=True)}
        for size in sizes:
            yield futures[size].result()


@dataclass(frozen=True)
class Answer:
    """How many replicas.

    Attributes:
        replicas: that certainly meet the SLO at the rate.
        too_few: the most that were simulated and do not certainly meet it; 0 for none.
        by_rule: what the pools of a few say alone.
        simulated: replicas of the largest pool in which the answer was seen to hold: all of them, or fewer with their
            share of the rate.
        confirmed: whether it held on a second trace.
    """

    replicas: int
    too_few: int
    by_rule: int
    simulated: int
    confirmed: bool


def by_rule(largest: PoolCapacity, rate: float) -> int:
    """Replicas for a rate, if a larger pool carries at least as much for each replica as the largest one measured."""
    return ceil(rate / largest.share - 1e-9)


def find(
    planner: Planner,
    rate: float,
    first: int,
    *,
    most_tokens: float = inf,
    on_cell: Callable[[int, CellResult], None] = lambda replicas, cell: None,
) -> Answer | None:
    """The fewest replicas that meet the SLO at this rate, from the guess `first` on; None where no number near it does.

    Where the whole pool would take more than `most_tokens` to simulate, one with its share of the rate stands in for
    it, as large as that allows, and fewer than `first` are not tried.
    """
    share = min(1.0, most_tokens / planner.tokens(rate))

    def measure(replicas: int, *, another: bool = False) -> bool:
        some = max(1, int(share * replicas))
        cell = planner.measure(some, float(f"{rate * some / replicas:.6g}"), another=another)
        on_cell(some, cell)
        return planner.passes(cell)

    least = ceil(rate / planner.most)  # fewer cannot keep up
    replicas, failed = max(first, least), least - 1
    for _ in range(_ROUNDS):
        if measure(replicas):
            break
        failed = replicas
        replicas = max(replicas + 1, ceil(_WIDER * replicas))
    else:
        return None
    while share == 1 and replicas - failed > 1:
        middle = (replicas + failed) // 2
        if measure(middle):
            replicas = middle
        else:
            failed = middle
    confirmed = planner.workload.replay is None
    if confirmed:
        for _ in range(_ROUNDS):
            if measure(replicas, another=True):
                break
            failed, replicas = replicas, replicas + 1
        else:
            return None
    too_few = failed if failed >= least else 0
    return Answer(replicas, too_few, first, max(1, int(share * replicas)), confirmed)


def routers_for(tokens_per_s: float, tokens_per_frame: int) -> int:
    """Router processes for a token rate, each kept at `MAX_LOAD` of a core."""
    return ceil(tokens_per_s / (MAX_LOAD * ROUTER_TOKENS_PER_S[tokens_per_frame]))
