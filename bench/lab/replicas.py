"""Is the plan right? Real servers in processes of their own behind a real router, beside the same load predicted."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

import trio

from lab_tools.script import run_script, script_parser
from wsbatch.cli.parsing import BAD_USAGE, ending_with
from wsbatch_bench.cli.flags import sizes
from wsbatch_bench.load.generator import LoadPlan, LoadRun
from wsbatch_bench.load.server import server_process, wsbatch_command
from wsbatch_bench.load.specs import parse_arrivals, parse_lengths
from wsbatch_bench.plan.planner import Planner, Workload, capacity
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.sweep.cell import Cell, CellResult
from wsbatch_bench.sweep.grid import Sweep
from wsbatch_bench.sweep.setting import Costs, Setting, parse_costs, parse_setting
from wsbatch_bench.sweep.slo import Slo, Verdict, parse_slo
from wsbatch_bench.sweep.stage import load_url

_FLAGS = ("--max-live-requests", "1000", "--log-level", "error")

INVALID = 3

_DESCRIPTION = """\
Check `plan` on this machine: start 1, 2, 3 servers over a model that sleeps for its steps, and a
router before them, each in a process of its own; put Poisson load on the router at rates around the
SLO capacity that is predicted for so many; and print for each rate what the simulation says of the
very same trace, and what was measured. The default costs leave two cores mostly idle.
"""

_EPILOG = f"""\
examples:
  python bench/lab/replicas.py                                     nine runs, about seven minutes
  python bench/lab/replicas.py --replicas 1,3 --fractions 0.9 1.1 --num-prompts 500

exit statuses: 0 all runs are valid; 2 bad usage or no server; {INVALID} one is not to be believed (it says why)
"""


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
        serve = wsbatch_command("serve", "--model", model, *_FLAGS, *setting.measuring_flags())
        with ExitStack() as stack:
            urls = [stack.enter_context(server_process(serve)).url for _ in range(self.replicas)]
            router = stack.enter_context(server_process(wsbatch_command("route", "--log-level", "error", *urls)))
            return trio.run(load_url, router.url, plan)


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


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("replicas", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--replicas", type=sizes, default=(1, 2, 3), metavar="N,N", help="default: 1,2,3")
    parser.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        default=(0.8, 1.0, 1.2),
        metavar="X",
        help="of the predicted capacity (default: 0.8 1 1.2)",
    )
    parser.add_argument("--slo", default="ttft_p95<=500ms,e2e_p95<=4s", metavar="SLO", help="default: %(default)s")
    parser.add_argument(
        "--cost-model", default="tau_ms=20,alpha_ms=5,beta_ms=0.5", metavar="COSTS", help="default: %(default)s"
    )
    parser.add_argument("--setting", default="continuous:max_batch_size=8", metavar="SPEC", help="default: %(default)s")
    parser.add_argument("--prompt-lengths", default="lognormal:median=32,sigma=0.6,max=128", metavar="SPEC",
                        help="default: %(default)s")  # fmt: skip
    parser.add_argument("--output-lengths", default="lognormal:median=16,sigma=0.6,max=64", metavar="SPEC",
                        help="default: %(default)s")  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=200, metavar="N", help="of a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the exit status."""
    done: list[Compared] = []
    with ending_with(BAD_USAGE, ValueError, OSError, RuntimeError):
        planner = Planner(
            parse_costs(arguments.cost_model),
            parse_setting(arguments.setting),
            parse_slo(arguments.slo),
            Workload(
                parse_arrivals("poisson"),
                parse_lengths(arguments.prompt_lengths),
                parse_lengths(arguments.output_lengths),
            ),
            measured=4000,
            seed=arguments.seed,
        )
        print(f"SLO {planner.slo.text}; each pair: predicted, measured\n")
        print("| replicas | requests/s | TTFT p95, s | | end to end p95, s | | | requests/s done | | | verdict | |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|", flush=True)
        count = arguments.num_prompts
        for each in compare(planner, arguments.replicas, arguments.fractions, warmup=count // 5, measured=count):
            done.append(each)
            print(_row(planner, each), flush=True)
    print()
    for replicas in arguments.replicas:
        print(capacity_line(planner.slo, [each for each in done if each.replicas == replicas]))
    invalid = [each for each in done if each.measured.invalid]
    for each in invalid:
        print(f"INVALID    {each.replicas} at {each.rate:g}: {each.measured.invalid}")
    return INVALID if invalid else 0


def _row(planner: Planner, each: Compared) -> str:
    predicted, measured = each.predicted, each.measured
    cells = [
        str(each.replicas),
        f"{each.rate:.4g}",
        f"{predicted.ttft_p95_s:.3f}",
        f"{measured.ttft_p95_s:.3f}",
        f"{predicted.e2e_p95_s:.2f}",
        f"{measured.e2e_p95_s:.2f}",
        f"{each.e2e_error:+.1%}",
        f"{predicted.request_throughput:.2f}",
        f"{measured.request_throughput:.2f}",
        f"{each.throughput_error:+.1%}",
        *each.verdicts(planner.slo),
    ]
    return "| " + " | ".join(cells) + " |"


def capacity_line(slo: Slo, done: Sequence[Compared]) -> str:
    """Between which rates the SLO capacity of one pool lies, predicted and measured, by these short runs."""
    words = []
    for index, name in enumerate(("predicted", "measured")):
        passed = max((each.rate for each in done if each.verdicts(slo)[index] == "pass"), default=0.0)
        missed = [each.rate for each in done if each.verdicts(slo)[index] != "pass" and each.rate > passed]
        words.append(f"{name} {passed:.4g} … " + (f"{min(missed):.4g}" if missed else "more"))
    return f"{done[0].replicas} replicas carry " + ", ".join(words) + " requests/s"


if __name__ == "__main__":
    main()
