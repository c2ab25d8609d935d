"""`wsbatch-bench plan`: how many replicas a rate needs."""

import argparse

from wsbatch.cli.parsing import BAD_USAGE, Commands, add_parser, ending_with
from wsbatch_bench.cli.flags import JOBS, WORKLOAD_HELP, add_workload, read_trace, sizes
from wsbatch_bench.load.specs import lengths_of, parse_arrivals, parse_lengths
from wsbatch_bench.numbers import RATE, Number
from wsbatch_bench.plan.planner import (
    FRONT_END_TOKENS_PER_S,
    MAX_LOAD,
    ROUTER_TOKENS_PER_S,
    Answer,
    Planner,
    PoolCapacity,
    Workload,
    by_rule,
    capacities,
    find,
    routers_for,
)
from wsbatch_bench.sweep.cell import CellResult
from wsbatch_bench.sweep.setting import check_costs, parse_costs, parse_setting
from wsbatch_bench.sweep.slo import parse_slo

NONE = 4

_DESCRIPTION = """\
How many replicas does a rate need within an SLO? By simulation in virtual time: the scheduler of
each replica and the placing of each router as they are, a model that only takes the time of its
steps. First the SLO capacity of small pools, which shows what pooling gains and placing loses;
then the whole pool at the whole rate, around the number that the largest of them points to.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
A rate or a number of replicas counts where the SLO certainly holds, by the lower or upper bounds of
what was simulated (95 %). Not in it: the time of frames on the network, the CPU time of servers and
routers (stated beside it), replicas that are lost (one to spare is added), prefix caches.

examples:
  wsbatch-bench plan --rate 20 --slo "ttft_p95<=1s,e2e_p95<=20s,success>=99%" --cost-model scaling/costs.json
  wsbatch-bench plan --rate 2000 --slo "ttft_p95<=1s,e2e_p95<=20s" --cost-model tau_ms=8,alpha_ms=0.05,beta_ms=0.04 \\
      --setting continuous:max_batch_size=64,max_batch_total_tokens=131072 --jobs 2

exit statuses: 0 a number was found; 2 bad usage; {NONE} no number of replicas meets the SLO
"""


def add_command(commands: Commands) -> None:
    """Add `plan` to the command line."""
    parser = add_parser(
        commands, "plan", help="how many replicas a rate needs within an SLO", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument(
        "--rate", type=RATE.flag, required=True, metavar="R", help="requests a second of all clients together"
    )
    parser.add_argument(
        "--slo", required=True, metavar="SLO", help="conditions that the pool must meet, as `choose` takes them"
    )
    parser.add_argument(
        "--cost-model",
        required=True,
        metavar="COSTS",
        help="step costs of a replica: tau_ms=…,alpha_ms=…,beta_ms=…, or a file that `scaling --out` wrote",
    )
    parser.add_argument(
        "--setting",
        default="continuous:max_batch_size=32",
        metavar="SPEC",
        help="scheduler and settings of each replica (default: %(default)s)",
    )
    parser.add_argument("--model", default="MODEL", metavar="TEXT", help="model name in the commands that are printed")
    parser.add_argument(
        "--pools",
        type=sizes,
        default=(1, 2, 4, 8),
        metavar="N,N",
        help="pool sizes whose capacity is found first (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--whole-tokens",
        type=Number(1, 1e12).flag,
        default=50e6,
        metavar="N",
        help="simulate the whole pool where that takes at most so many output tokens, about 6 µs each; else as much of "
        "it as that allows, with its share of the rate (default: 50 million)",
    )
    parser.add_argument(
        "--jobs",
        type=JOBS.flag,
        default=1,
        metavar="N",
        help="number of small pools that are simulated at once (default: 1)",
    )
    # Of one replica near its limit fewer do not show where the queue ends.
    add_workload(parser, measured=4000)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        planner = _planner(arguments)
        print("\n".join(_head(planner, arguments.rate)), flush=True)
        pools = []
        for pool in capacities(planner, arguments.pools, jobs=arguments.jobs):
            for cell in pool.cells:
                _print_cell(planner, pool.replicas, cell)
            pools.append(pool)
        print("\n".join(["", *_pool_lines(pools)]), flush=True)
        if not pools[-1].share:
            print(f"answer     none: {pools[-1].replicas} replicas meet the SLO at no rate that was tried")
            return NONE
        first = by_rule(pools[-1], arguments.rate)
        print(f"\n{_COLUMNS}")
        answer = find(
            planner,
            arguments.rate,
            first,
            most_tokens=arguments.whole_tokens,
            on_cell=lambda replicas, cell: _print_cell(planner, replicas, cell),
        )
    if answer is None:
        print(f"\nanswer     none: the SLO certainly holds with no number of replicas near {first}")
        return NONE
    print("\n".join(["", *_answer_lines(planner, arguments, pools[-1], answer)]))
    return 0


def _planner(arguments: argparse.Namespace) -> Planner:
    """Raises ValueError or OSError."""
    setting = parse_setting(arguments.setting)
    costs = parse_costs(arguments.cost_model)
    check_costs(costs, [setting], name=arguments.cost_model)
    workload = read_workload(arguments)
    return Planner(costs, setting, parse_slo(arguments.slo), workload, arguments.num_prompts, arguments.seed)


def read_workload(arguments: argparse.Namespace) -> Workload:
    """What is asked at any rate, as the flags say. Raises ValueError or OSError."""
    trace = read_trace(arguments)
    if trace.closed is not None:
        raise ValueError(f"--arrivals is {trace.arrivals}: a rate needs an open loop")
    if arguments.trace is None:
        lengths = parse_lengths(trace.prompts), parse_lengths(trace.outputs)
        return Workload(parse_arrivals(trace.arrivals), *lengths)
    lengths = (
        lengths_of(trace.prompts, [entry.prompt_tokens for entry in trace.entries]),
        lengths_of(trace.outputs, [entry.output_tokens for entry in trace.entries]),
    )
    return Workload(None, *lengths, replay=trace)


_COLUMNS = (
    f"{'replicas':>8} {'requests/s':>10}  {'TTFT p95, s':<21} {'end to end p95, s':<21} {'answered':>8} "
    f"{'rows/step':>9}  verdict"
)


def _head(planner: Planner, rate: float) -> list[str]:
    costs, workload = planner.costs[planner.setting.scheduler], planner.workload
    prompts, outputs = workload.prompts.mean, workload.outputs.mean
    arrivals = "a trace, replayed" if workload.arrivals is None else workload.arrivals.spec
    return [
        f"load       {rate:g} requests/s ({arrivals}); prompts of {prompts:.0f} and outputs of {outputs:.0f} tokens on "
        f"average: {rate * outputs:,.0f} output tokens/s",
        f"replica    {planner.setting.label}; a step takes {1000 * costs.tau_s:g} ms + {1000 * costs.alpha_s:g} ms a "
        f"decode row + {1000 * costs.beta_s:g} ms a prompt token: never more than {planner.most:.3g} requests/s",
        f"SLO        {planner.slo.text}",
        *(f"           {line}" for line in planner.slo.lacking(planner.measured)),
        "",
        _COLUMNS,
    ]


def _print_cell(planner: Planner, replicas: int, cell: CellResult) -> None:
    verdict = planner.slo.judge(cell)
    if cell.verdict == "unstable":
        verdict += " (unstable)"
    print(
        f"{replicas:8} {cell.rate:10.5g}  {_bounded(cell.ttft_p95_s, cell.ttft_p95_low_s, cell.ttft_p95_high_s):<21} "
        f"{_bounded(cell.e2e_p95_s, cell.e2e_p95_low_s, cell.e2e_p95_high_s):<21} {cell.success:8.1%} "
        f"{cell.mean_rows:9.1f}  {verdict}",
        flush=True,
    )


def _bounded(value: float, low: float, high: float) -> str:
    return f"{value:.3g} ({low:.3g} … {high:.3g})"


def _pool_lines(pools: list[PoolCapacity]) -> list[str]:
    lines = ["SLO capacity of a pool, requests/s"]
    alone = pools[0].share
    for pool in pools:
        against = f", {pool.share / alone:.2f} of {pools[0].replicas}'s" if alone else ""
        lines.append(
            f"{pool.replicas:8}  {pool.passed:.4g}, not certainly {pool.missed:.4g}: "
            f"{pool.share:.3g} a replica{against}"
        )
    return lines


def _answer_lines(planner: Planner, arguments: argparse.Namespace, largest: PoolCapacity, answer: Answer) -> list[str]:
    rate, spare = arguments.rate, answer.replicas + 1
    seen = "on two traces" if answer.confirmed else "on the trace"
    if answer.simulated == answer.replicas:
        how = f"seen {seen}" + (f"; {answer.too_few} do not certainly" if answer.too_few else "")
    else:
        how = (
            f"extrapolated: a pool of {answer.simulated} with its share of the rate was seen to meet it {seen}; the "
            f"whole pool takes {planner.tokens(rate) / 1e6:.0f} million tokens to simulate"
        )
    flags = " ".join(planner.setting.flags())
    return [
        f"answer     {answer.replicas} replicas meet the SLO at {rate:g} requests/s ({how})",
        f"           {spare} with one to spare, for one that is lost or being replaced",
        f"rule       {largest.replicas} replicas carry {largest.share:.4g} requests/s each (the lower bound); a larger "
        f"pool is taken to carry no less: {by_rule(largest, rate)}",
        *_event_loop_lines(planner, rate, answer),
        f"serve it   wsbatch serve --model {arguments.model} {flags} --ray auto --replicas {spare}",
        f"           or, on each of {spare} machines: wsbatch serve --model {arguments.model} {flags} --host 0.0.0.0 "
        "--max-live-requests 1000",
        f"           and: wsbatch route ws://MACHINE-1:8765 … ws://MACHINE-{spare}:8765",
    ]


def _event_loop_lines(planner: Planner, rate: float, answer: Answer) -> list[str]:
    """What the simulation leaves out, from measured figures: routers, and the replica's own front end."""
    tokens_per_s = rate * planner.workload.outputs.mean
    lines = []
    for tokens, per_s in ROUTER_TOKENS_PER_S.items():
        routers = routers_for(tokens_per_s, tokens)
        label = "routers    " if not lines else "           "
        lines.append(
            f"{label}{routers} at {tokens} token{'s' if tokens > 1 else ''} a frame ({per_s:,} tokens/s each at most, "
            f"kept at {MAX_LOAD:.0%} of it)"
        )
    share = tokens_per_s / answer.replicas / FRONT_END_TOKENS_PER_S
    verdict = "" if share <= MAX_LOAD else f", more than {MAX_LOAD:.0%}: take smaller batches, and more replicas"
    lines.append(
        f"front end  a replica streams {tokens_per_s / answer.replicas:,.0f} tokens/s: {share:.0%} of the "
        f"{FRONT_END_TOKENS_PER_S:,} that its event loop can{verdict}"
    )
    return lines
