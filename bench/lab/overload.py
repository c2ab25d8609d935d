"""Goodput and latency from a fifth of the capacity to five times as much."""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lab_tools.impatient import Manners
from lab_tools.overload_run import LOADS, Overload, Point, measure_all, overload_rows, overload_table, share_of_peak
from lab_tools.script import run_script, script_parser
from wsbatch.cli.parsing import BAD_USAGE, ending_with
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sweep.setting import Setting, parse_costs, parse_setting, same_for_both

BELOW_PEAK = 3
_LEAST_SHARE = 0.9
_SETTING = "continuous:max_batch_size=32,max_queue_requests=64,queue_timeout_ms=4000"
_PROMPTS = "lognormal:median=50,sigma=0.6,min=8,max=256"
_OUTPUTS = "lognormal:median=20,sigma=0.6,max=80"
_ENTRIES = 10_000

_DESCRIPTION = """\
Offer a server less and more than it can do, by clients of several classes that leave when their
answer takes too long. Goodput is what was answered in full and in time; latencies are those of the
requests that were answered. At last a storm: clients that are refused or have given up come back
at once, whatever the server told them.

The whole server runs in virtual time over a simulated model: the same figures every time.
"""

_EPILOG = f"""\
examples:
  python bench/lab/overload.py --out overload --jobs 2
  python bench/lab/overload.py --loads 1,2 --storm 0 --classes 0:1,9:1 --setting continuous:max_batch_size=8

exit statuses: 0; 2 bad usage; {BELOW_PEAK} the storm's goodput is under {_LEAST_SHARE:.0%} of the peak
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("overload", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--setting", default=_SETTING, metavar="SPEC", help="default: %(default)s")
    parser.add_argument("--costs", metavar="COSTS", help="of the simulated model, as of `sweep`")
    parser.add_argument(
        "--loads", type=_loads, default=LOADS, metavar="X,X", help="over the capacity (default: 0.2 to 5 in 12 steps)"
    )
    parser.add_argument(
        "--classes", type=_classes, default="0:1,4:2,9:2", metavar="P:W,…", help="and weights (default: %(default)s)"
    )
    parser.add_argument(
        "--storm", type=float, default=10.0, metavar="X", help="load of clients that come back; 0: none (default: 10)"
    )
    parser.add_argument(
        "--tries", type=int, default=5, metavar="N", help="of a client in the storm (default: %(default)s)"
    )
    parser.add_argument("--patience-s", type=float, default=10.0, metavar="S", help="default: %(default)g")
    parser.add_argument("--warmup-s", type=float, default=15.0, metavar="S", help="of each load (default: %(default)g)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="measured (default: %(default)g)")
    parser.add_argument("--prompt-lengths", default=_PROMPTS, metavar="SPEC", help="default: %(default)s")
    parser.add_argument("--output-lengths", default=_OUTPUTS, metavar="SPEC", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="loads at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write table, CSV and chart there")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        overload = _overload(arguments)
    capacity = overload.capacity()
    title = (
        f"{overload.setting.label}: {capacity:.3g} requests/s at capacity, clients wait {arguments.patience_s:g} s, "
        "in virtual time"
    )
    print(title + "\n")
    points, storm = measure_all(
        overload,
        capacity,
        arguments.loads,
        storm=arguments.storm or None,
        tries=arguments.tries,
        jobs=arguments.jobs,
        on_point=lambda point: print(f"  {point.load:g}×: goodput {point.goodput:.3g}/s", file=sys.stderr),
    )
    table = overload_table(points, storm)
    print("\n".join(table))
    if arguments.out is not None:
        _save(arguments.out, title, table, points, storm, capacity, arguments.patience_s)
    if storm is None:
        return 0
    share = share_of_peak(storm, points)
    print(f"\nthe storm's goodput is {share:.0%} of the peak")
    return 0 if share >= _LEAST_SHARE else BELOW_PEAK


def _overload(arguments: argparse.Namespace) -> Overload:
    setting: Setting = parse_setting(arguments.setting)
    trace = draw_trace(
        _ENTRIES,
        prompts=parse_lengths(arguments.prompt_lengths),
        outputs=parse_lengths(arguments.output_lengths),
        seed=arguments.seed,
    )
    return Overload(
        costs=parse_costs(arguments.costs) if arguments.costs else same_for_both(DEFAULT_COSTS),
        setting=setting,
        trace=trace,
        manners=Manners(arguments.patience_s, classes=arguments.classes),
        warmup_s=arguments.warmup_s,
        measured_s=arguments.seconds,
        seed=arguments.seed,
    )


def _save(
    out: Path,
    title: str,
    table: list[str],
    points: list[Point],
    storm: Point | None,
    capacity: float,
    patience_s: float,
) -> None:
    # Here, because matplotlib takes a second to import.
    from lab_tools.overload_chart import draw_overload

    out.mkdir(parents=True, exist_ok=True)
    (out / "overload.md").write_text("\n".join([title, "", *table]) + "\n")
    rows = overload_rows(points, storm)
    with (out / "overload.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    paths = [out / f"overload.{kind}" for kind in ("png", "svg")]
    draw_overload(points, storm, paths, capacity=capacity, patience_s=patience_s, title=title)
    print(f"\nwritten to {out}: overload.md, .csv, .png, .svg")


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or min(loads) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0, separated by commas")
    return loads


def _classes(text: str) -> tuple[tuple[int, float], ...]:
    try:
        classes = tuple((int(first), float(second)) for first, _, second in (p.partition(":") for p in text.split(",")))
    except ValueError:
        classes = ()
    priorities = [priority for priority, _ in classes]
    good = all(0 <= priority <= 9 and weight > 0 for priority, weight in classes)
    if not good or not 1 <= len(set(priorities)) == len(priorities) <= 6:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be PRIORITY:WEIGHT,…: up to six different priorities of 0 to 9, weights above 0"
        )
    return classes


if __name__ == "__main__":
    main()
