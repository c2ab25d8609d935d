"""A server process under a mixed, partly rude load for a long time."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import trio

from lab_tools.looks import Sample, raise_descriptor_limit
from lab_tools.script import run_script, script_parser
from lab_tools.soak_load import SoakPlan, SoakRun, left_over, soak, trends
from lab_tools.suspension import Suspension
from wsbatch.cli.parsing import BAD_USAGE, CommandError
from wsbatch.errors import WsbatchError
from wsbatch.nurseries import first_error
from wsbatch_bench.load.http_client import HttpFailed
from wsbatch_bench.load.server import ServerProcess, server_process, wsbatch_command
from wsbatch_bench.quantiles import observed_quantile

NOT_FLAT = 3
_MIN_SECONDS = 6.0

_DESCRIPTION = """\
Start a server and keep it under load: patient streams, clients that cancel, readers that stop, and
clients that vanish (reset, half-close, silence, in mid-frame). The report says whether memory,
descriptors, tasks and latency stayed flat, and whether the server is as it was when all are gone.
"""

_EPILOG = f"""\
examples:
  python bench/lab/soak.py                          three minutes, a thousand vanishing clients
  python bench/lab/soak.py --seconds 86400 --model demo
  python bench/lab/soak.py --seconds 30 --idle 10000 --vanish 0

exit statuses: 0 flat; 2 bad usage or no server; {NOT_FLAT} something grew or was left over, or it was suspended
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("soak", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--seconds", type=float, default=180.0, metavar="S", help="default: %(default)g")
    parser.add_argument(
        "--model", default="simulated:tau_ms=10,alpha_ms=0.1,beta_ms=0.02", metavar="TEXT", help="default: %(default)s"
    )
    parser.add_argument("--scheduler", choices=("dynamic", "continuous"), default="continuous")
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="patient clients (default: %(default)s)")
    parser.add_argument("--cancelling", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--slow", type=int, default=4, metavar="N", help="readers that stop (default: %(default)s)")
    parser.add_argument("--vanish", type=int, default=1000, metavar="N", help="in all (default: %(default)s)")
    parser.add_argument("--idle", type=int, default=0, metavar="N", help="idle connections (default: %(default)s)")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Soak, and print the report; the exit status."""
    if arguments.seconds < _MIN_SECONDS:
        raise CommandError(f"--seconds is {arguments.seconds:g}: must be at least {_MIN_SECONDS:g}", BAD_USAGE)
    plan = SoakPlan(
        duration_s=arguments.seconds,
        streams=arguments.streams,
        vanishing=arguments.vanish,
        cancelling=arguments.cancelling,
        slow=arguments.slow,
        idle=arguments.idle,
    )
    most = raise_descriptor_limit()
    if plan.idle > most - 500:
        raise CommandError(f"--idle is {plan.idle}: this system lets a process open {most} files", BAD_USAGE)
    suspension = Suspension()
    failure: BaseException | None = None
    try:
        with server_process(_command(arguments, plan)) as server:
            done = trio.run(_soak, server, plan, suspension)
    except* (RuntimeError, OSError, WsbatchError, HttpFailed) as group:
        failure = first_error(group)
    if failure is not None:
        raise CommandError("; ".join(filter(None, [str(failure), str(suspension)])), BAD_USAGE)
    lines, good = report(done, suspension)
    print("\n".join(lines))
    return 0 if good else NOT_FLAT


def _command(arguments: argparse.Namespace, plan: SoakPlan) -> list[str]:
    flags = ["--model", arguments.model, "--scheduler", arguments.scheduler]
    flags += ["--send-timeout-s", "2", "--close-timeout-s", "1", "--max-connections", str(plan.idle + 1024)]
    if not plan.idle:  # silence is noticed soon, so that what the silent hold is part of the steady state
        flags += ["--ping-interval-s", "2", "--ping-timeout-s", "5"]
    return wsbatch_command("serve", *flags)


async def _soak(server: ServerProcess, plan: SoakPlan, suspension: Suspension) -> SoakRun:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(suspension.watch)
        run = await soak(server, plan)
        nursery.cancel_scope.cancel()
    return run


def report(run: SoakRun, suspension: Suspension | None = None) -> tuple[list[str], bool]:
    """The report, and whether all is well."""
    plan, good = run.plan, True
    kinds = ", ".join(f"{count} {what}" for what, count in run.count.most_common())
    lines = [f"{plan.duration_s:g} s, {plan.streams} patient streams; {kinds}", ""]
    assert run.before is not None
    if run.idle is not None:
        each = (run.idle.rss_bytes - run.before.rss_bytes) / plan.idle / 1024
        opened = run.idle.values["wsbatch_connections"]
        good = opened == plan.idle
        p99 = partial(observed_quantile, q=0.99)
        alone, beside = p99(run.alone_gaps_s), p99(run.beside_idle_gaps_s)
        lines += [
            f"{opened:.0f} idle connections: {each:.1f} KiB each",
            f"time between tokens, p99: {1000 * alone:.1f} ms without them, {1000 * beside:.1f} ms beside them",
            "",
        ]
    for trend in trends(run):
        good &= trend.flat
        lines.append(
            f"{trend.name:<26}{trend.mean:10.1f} {trend.unit:<4} {trend.growth:+9.2f} over the window, "
            f"{trend.allowed:.1f} allowed: {'flat' if trend.flat else 'NOT FLAT'}"
        )
    lag_s = run.samples[-1].lag_quantile_s(run.samples[0], 0.99)
    lines += [f"{'event loop, lateness p99':<26}  ≤ {1000 * lag_s:g} ms", ""]
    assert run.after is not None
    left = {what: count for what, count in left_over(run.after, run.before).items() if count}
    good &= not left
    sizes = f"{_memory(run.before)} before, {_memory(run.after)} after"
    lines.append(f"when all were gone: {left or 'nothing left over'}; {sizes}")
    failed = {what: count for what, count in run.count.items() if "failed" in what or "lost" in what}
    good &= not failed
    if suspension is not None and suspension.seconds:
        return [*lines, f"verdict: none, {suspension}: run it again"], False
    return [*lines, "verdict: " + ("flat" if good else "NOT FLAT")], good


def _memory(sample: Sample) -> str:
    return f"{sample.rss_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
