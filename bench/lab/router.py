"""What a router costs."""

import argparse
from collections.abc import Sequence
from itertools import product
from typing import NoReturn

from lab_tools.router_cost import Cost, measure
from lab_tools.router_cpu import cpu_us_per_frame
from lab_tools.script import run_script, script_parser

_DESCRIPTION = """\
Measure what `wsbatch route` adds: the same streams directly from servers and through one router
process, side by side. The servers make no text but tokens that carry the time, so that a token's
age is known where it is received. Everything runs on this machine and shares its cores.
"""

_EPILOG = """\
examples:
  python bench/lab/router.py                                    64 streams, a token every 20 ms each
  python bench/lab/router.py --streams 64 512 --interval-ms 10  two loads
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("router", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--replicas", type=int, default=3, metavar="N", help="servers (default: 3)")
    parser.add_argument("--streams", type=int, nargs="+", default=[64], metavar="N", help="at once (default: 64)")
    parser.add_argument(
        "--interval-ms", type=float, nargs="+", default=[20.0], metavar="X", help="between tokens (default: 20)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="X", help="of each measurement (default: 10)")
    parser.add_argument(
        "--cpu", action="store_true", help="instead: CPU time for each frame, which a busy machine hardly changes"
    )
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print a table in Markdown; the exit status."""
    if arguments.cpu:
        _print_cpu()
        return 0
    print("| streams | interval ms | way | tokens/s | tokens a frame | p50 ms | p99 ms | router, cores |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for streams, interval_ms in product(arguments.streams, arguments.interval_ms):
        costs = {}
        for way in ("direct", "routed"):
            costs[way] = measure(
                replicas=arguments.replicas,
                streams=streams,
                interval_ms=interval_ms,
                seconds=arguments.seconds,
                routed=way == "routed",
            )
            print(_row(streams, interval_ms, way, costs[way]), flush=True)
        added = [getattr(costs["routed"], name) - getattr(costs["direct"], name) for name in ("p50_ms", "p99_ms")]
        print(f"| {streams} | {interval_ms:g} | added | | | {added[0]:.2f} | {added[1]:.2f} | |", flush=True)
    return 0


def _print_cpu() -> None:
    print("| tokens a frame | direct, µs a frame | routed | router alone | tokens/s of one core |", flush=True)
    print("|---|---|---|---|---|", flush=True)
    for tokens in (1, 4, 16):
        direct, routed = (
            min(cpu_us_per_frame(tokens_per_frame=tokens, frames=6400, routed=way) for _ in range(3))
            for way in (False, True)
        )
        added = routed - direct
        print(f"| {tokens} | {direct:.0f} | {routed:.0f} | {added:.0f} | {tokens / added * 1e6:,.0f} |", flush=True)


def _row(streams: int, interval_ms: float, way: str, cost: Cost) -> str:
    cpu = "" if cost.router_cpu is None else f"{cost.router_cpu:.2f}"
    return (
        f"| {streams} | {interval_ms:g} | {way} | {cost.tokens_per_s:,.0f} | {cost.tokens_per_frame:.1f} | "
        f"{cost.p50_ms:.2f} | {cost.p99_ms:.2f} | {cpu} |"
    )


if __name__ == "__main__":
    main()
