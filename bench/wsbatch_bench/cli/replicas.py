"""`wsbatch-bench replicas`: what `plan` predicts for a few replicas, beside what real ones do."""

import argparse
from collections.abc import Sequence

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch_bench.arrivals import parse_arrivals
from wsbatch_bench.cli.model_flags import sizes
from wsbatch_bench.costs import parse_costs
from wsbatch_bench.lengths import parse_lengths
from wsbatch_bench.plan import Planner, Workload
from wsbatch_bench.replicas import Compared, compare
from wsbatch_bench.setting import parse_setting
from wsbatch_bench.slo import Slo, parse_slo

INVALID = 3

_DESCRIPTION = """\
Check `plan` on this machine: start 1, 2, 3 servers over a model that sleeps for its steps, and a
router before them, each in a process of its own; put Poisson load on the router at rates around the
SLO capacity that is predicted for so many; and print for each rate what the simulation says of the
very same trace, and what was measured. The default costs leave two cores mostly idle.
"""

_EPILOG = f"""\
examples:
  wsbatch-bench replicas                                     nine runs, about seven minutes
  wsbatch-bench replicas --replicas 1,3 --fractions 0.9 1.1 --num-prompts 500

exit statuses: 0 all runs are valid; 2 bad usage or no server; {INVALID} one is not to be believed (it says why)
"""


def add_command(commands: Commands) -> None:
    """Add `replicas` to the command line."""
    parser = add_parser(
        commands, "replicas", help="check `plan` against real servers", description=_DESCRIPTION, epilog=_EPILOG
    )
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; the exit status."""
    done: list[Compared] = []
    try:
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
    except (ValueError, OSError, RuntimeError) as error:
        say_error("wsbatch-bench replicas", error)
        return 2
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
