"""How often the verdicts are right: intervals of queues whose truth is known, and a choice repeated over seeds."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log
from statistics import fmean
from typing import NoReturn

import numpy as np

from lab_tools.script import run_script, script_parser
from wsbatch.batching.costs import CostModel
from wsbatch_bench.load.generator import LoadPlan, LoadRun
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import Trace, draw_trace
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.quantiles import Interval, mean_interval, observed_quantile, quantile_interval
from wsbatch_bench.stability import Saturation
from wsbatch_bench.sweep.choose import REFINED, Capacity, choose, settle
from wsbatch_bench.sweep.grid import LEAST_VIRTUAL, MOST_VIRTUAL, Sweep, grid
from wsbatch_bench.sweep.saturation import saturate
from wsbatch_bench.sweep.setting import Setting, same_for_both
from wsbatch_bench.sweep.slo import parse_slo
from wsbatch_bench.sweep.stage import Stage

_COSTS = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)
_STAGE = PoolStage(same_for_both(_COSTS))
_PROMPTS, _OUTPUTS = parse_lengths("fixed:tokens=8"), parse_lengths("lognormal:median=4,sigma=0.8,max=24")
_SETTINGS = (Setting("dynamic", 8), Setting("continuous", 4))
_CLOCKWORK = Saturation(Interval(1.0, 1.0, 1.0), 0.0)  # a server that takes 1 s for each request
_LIMITS_S = {"single server": 0.15, "schedulers": 0.35}  # of p95 end to end; at some eight tenths of the capacity
_TRUTH = 6  # runs whose p95 stands for the truth

_DESCRIPTION = """\
Intervals: of M/D/1 queues and of both schedulers in virtual time, at several shares of their
capacity, how often the 95 % intervals of p95 and mean hold the true value, where a run is as long
as a sweep makes it. The choice: a sweep with an SLO, repeated with other seeds; how often what was
chosen misses the SLO in truth, and by how much the chosen rates differ.
"""

_EPILOG = """\
examples:
  python bench/lab/verdicts.py                         everything, about 40 minutes of CPU
  python bench/lab/verdicts.py --runs 20 --scheduler-seeds 0
"""


@dataclass(frozen=True)
class Coverage:
    """Of the runs of one queue: the shares whose intervals hold the truth, and whose p95 has an upper bound."""

    queue: str
    utilisation: float
    requests: int
    runs: int
    p95: float
    mean: float
    bounded: float
    half_width: float

    @property
    def row(self) -> str:
        """Of a table in Markdown."""
        return (
            f"| {self.queue} | {self.utilisation:g} | {self.requests:,} | {self.runs} | {self.p95:.1%} "
            f"| {self.mean:.1%} | {self.bounded:.0%} | ±{self.half_width:.0%} |"
        )


def md1_times(utilisation: float, requests: int, seed: int) -> list[float]:
    """Times in an M/D/1 queue with a service time of 1, by Lindley's recursion; the first ones are left out."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(1 - rng.exponential(1 / utilisation, requests + requests // 5))
    times = walk - np.minimum.accumulate(np.minimum(walk, 0.0)) + 1
    return [float(each) for each in times[-requests:]]


def engine_times(stage: Stage, setting: Setting, rate: float, requests: int, seed: int) -> list[float]:
    """End to end, in virtual time."""
    warmup = requests // 5
    plan = LoadPlan(trace=_trace(warmup + requests, seed), rate=rate, warmup=warmup, measured=requests)
    return [record.e2e_s for record in stage.run(setting, plan).measured]


def coverage(queue: str, utilisation: float, runs: Sequence[list[float]]) -> Coverage:
    """The truth is that of all runs together, of which each is a small part."""
    together = [each for run in runs for each in run]
    p95, mean = observed_quantile(together, 0.95), fmean(together)
    quantiles = [quantile_interval(run, 0.95) for run in runs]
    means = [mean_interval(run) for run in runs]
    bounded = [each for each in quantiles if each.high < inf]
    return Coverage(
        queue,
        utilisation,
        len(runs[0]),
        len(runs),
        _share(quantiles, p95),
        _share(means, mean),
        len(bounded) / len(runs),
        fmean((each.high - each.low) / 2 / p95 for each in bounded) if bounded else inf,
    )


def cover_queues(utilisations: Sequence[float], runs: int) -> Iterator[Coverage]:
    """M/D/1 at each utilisation with four times as many runs, which cost little; then both schedulers."""
    for utilisation in utilisations:
        requests = _requests(_CLOCKWORK, utilisation)
        yield coverage("M/D/1", utilisation, [md1_times(utilisation, requests, seed) for seed in range(4 * runs)])
    for setting in _SETTINGS:
        capacity = saturate(_STAGE, setting, _trace(MOST_VIRTUAL, 0), MOST_VIRTUAL)
        most = capacity.rate.value
        for utilisation in utilisations:
            rate = utilisation * most
            requests = _requests(replace(capacity, rate=Interval(most, most, most)), rate)
            times = [engine_times(_STAGE, setting, rate, min(requests, MOST_VIRTUAL), 1 + seed) for seed in range(runs)]
            yield coverage(setting.label, utilisation, times)


@dataclass(frozen=True)
class SingleServerStage:
    """A server that takes one request after the other, by Lindley's recursion: a hundred times as fast as a scheduler.

    Of a setting only the batch size counts: a token takes tau / size + alpha, as in full steps.
    """

    name = "virtual"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. In a closed loop somebody is always waiting."""
        count = plan.warmup + plan.measured
        due = [planned for planned, _ in zip(plan.trace.schedule(plan.rate), range(count), strict=False)]
        tokens = np.array([each.output_tokens for each in due])
        took = tokens * (_COSTS.tau_s / setting.max_batch_size + _COSTS.alpha_s)
        came = np.array([each.at_s for each in due]) if plan.trace.closed is None else np.zeros(count)
        # Each ends its own time after the later of its coming and the end of the one before.
        done = np.cumsum(took)
        ended = done + np.maximum.accumulate(came - (done - took))
        run = LoadRun(plan)
        for each, came_s, ended_s in zip(due, came.tolist(), ended.tolist(), strict=True):
            record = Record(each.index, each.prompt_tokens, each.output_tokens, came_s, came_s)
            record.arrivals = [(ended_s, each.output_tokens)]
            record.ended_s, record.reported_tokens = ended_s, each.output_tokens
            run.records.append(record)
        first_s = run.records[plan.warmup].scheduled_s if plan.trace.closed is None else ended[plan.warmup - 1]
        run.window_s = (float(first_s), float(ended.max()))
        return run


def choose_once(stage: Stage, limit_s: float, seed: int) -> Capacity | None:
    """What `sweep --slo` does, from half the capacity on."""
    trace = _trace(LEAST_VIRTUAL + MOST_VIRTUAL, seed)
    sweep = Sweep(stage, trace, LEAST_VIRTUAL // 5, LEAST_VIRTUAL, most=MOST_VIRTUAL)
    slo = parse_slo(f"e2e_p95<={limit_s}s")
    cells = [
        sweep.measure(cell) for each in _SETTINGS for cell in grid([each], sweep.saturation(each).rate.value, (0.5,))
    ]
    closer = sweep.closer()
    again = closer.again()
    assert again is not None
    return choose(settle(cells, slo, closer.measure, again.measure, rounds=REFINED), slo).chosen


def true_limit(stage: Stage, setting: Setting, limit_s: float, low: float, high: float) -> float:
    """The rate at which p95 is truly the SLO's limit: between two that are measured long, by interpolation of logs."""
    found = []
    for rate in (low, high):
        runs = [engine_times(stage, setting, rate, MOST_VIRTUAL, 10_000_000 + seed) for seed in range(_TRUTH)]
        found.append(log(observed_quantile([each for run in runs for each in run], 0.95)))
    return low + (log(limit_s) - found[0]) / (found[1] - found[0]) * (high - low)


def _trace(requests: int, seed: int) -> Trace:
    return draw_trace(requests, prompts=_PROMPTS, outputs=_OUTPUTS, seed=seed)


def _requests(capacity: Saturation, rate: float) -> int:
    """As many as a sweep measures, if it measures as many as it takes."""
    return max(LEAST_VIRTUAL, ceil(capacity.run_length(rate, 1.0)))


def _share(intervals: Sequence[Interval], truth: float) -> float:
    return fmean(each.low <= truth <= each.high for each in intervals)


def _print_choices(name: str, stage: Stage, seeds: int) -> None:
    limit_s = _LIMITS_S[name]
    print(f"\n| seed | {name}: chosen for e2e_p95<={limit_s}s | requests/s | confirmed |")
    print("|--:|---|--:|---|", flush=True)
    chosen: list[Capacity] = []
    for seed in range(seeds):
        best = choose_once(stage, limit_s, 1000 * seed)
        if best is None:
            print(f"| {seed} | none | | |", flush=True)
            continue
        chosen.append(best)
        print(f"| {seed} | {best.setting.label} | {best.passed:.4g} | {best.confirmed} |", flush=True)
    rates = [each.passed for each in chosen]
    print(f"\nrates from {min(rates):.4g} to {max(rates):.4g}: {max(rates) / min(rates) - 1:.1%} apart")
    for setting in sorted({each.setting for each in chosen}, key=lambda each: each.label):
        own = [each.passed for each in chosen if each.setting == setting]
        limit = true_limit(stage, setting, limit_s, min(own), 1.02 * max(own))
        missed = sum(rate > limit for rate in own)
        print(f"{setting.label}: in truth {limit:.4g}; chosen {len(own)} times, missed {missed}", flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Print both tables; the exit status."""
    if arguments.seeds:
        _print_choices("single server", SingleServerStage(), arguments.seeds)
    if arguments.scheduler_seeds:
        _print_choices("schedulers", _STAGE, arguments.scheduler_seeds)
    if arguments.runs:
        print("\n| queue | of capacity | requests | runs | p95 held | mean held | bounded | half width of p95 |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
        for each in cover_queues(arguments.utilisations, arguments.runs):
            print(each.row, flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the script."""
    parser = script_parser("verdicts", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--runs", type=int, default=100, metavar="N", help="of each scheduler's queue (default: 100)")
    parser.add_argument("--seeds", type=int, default=60, metavar="N", help="of a single server (default: 60)")
    parser.add_argument("--scheduler-seeds", type=int, default=60, metavar="N", help="of both schedulers (default: 60)")
    parser.add_argument(
        "--utilisations",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[0.5, 0.7, 0.8, 0.9, 0.95],
        metavar="X,X",
        help="default: 0.5,0.7,0.8,0.9,0.95",
    )
    run_script(parser, run, argv)


if __name__ == "__main__":
    main()
