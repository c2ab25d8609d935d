"""Whether a router that is told to end under load loses anybody's last word."""

import argparse
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import trio

from lab_tools.script import run_script, script_parser
from wsbatch.client import Client, connect
from wsbatch.errors import ConnectionLost, RequestError
from wsbatch.messages import Accepted, Finished
from wsbatch_bench.load.server import server_process, wsbatch_command

_DESCRIPTION = """\
Send SIGTERM to `wsbatch route` over two servers while every stream is under way and requests keep
coming, and count how the requests end that it had accepted: each must get its terminal frame before
its socket closes, all its tokens or `shutdown`. The exit status is 3 where one did not.
"""

_EPILOG = """\
examples:
  python bench/lab/route_drain.py                          500 streams, three rounds
  python bench/lab/route_drain.py --busy 4 --drain-s 2     beside four processes that only compute
"""

_LOST = 3


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("route_drain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="routers to end (default: 3)")
    parser.add_argument("--connections", type=int, default=50, metavar="N", help="to the router (default: 50)")
    parser.add_argument("--streams", type=int, default=10, metavar="N", help="on each connection (default: 10)")
    parser.add_argument("--drain-s", type=float, default=4.0, metavar="X", help="the router's grace (default: 4)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that only compute (default: 0)")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Count and print, a line a round; the exit status."""
    lost = 0
    with busy(arguments.busy):
        for number in range(1, arguments.rounds + 1):
            ends, took_s = one_round(arguments)
            accepted = ends.total() - ends["refused"]
            lost += ends["lost"]
            print(f"round {number}: {accepted} accepted, ended {dict(ends)}, in {took_s:.1f} s", flush=True)
    return _LOST if lost else 0


def one_round(arguments: argparse.Namespace) -> tuple[Counter[str], float]:
    """How requests ended, and how long the router took to end."""
    flags = ["--model", "simulated:tau_ms=20,alpha_ms=0,beta_ms=0", "--max-live-requests", "4096"]
    flags += ["--max-batch-size", "1024", "--max-batch-total-tokens", "8000000"]
    with ExitStack() as servers:
        urls = [servers.enter_context(server_process(wsbatch_command("serve", *flags))).url for _ in range(2)]
        with (
            suppress(RuntimeError),  # on a machine that is very busy it leaves without its last tasks
            server_process(wsbatch_command("route", "--drain-s", str(arguments.drain_s), *urls)) as router,
        ):
            load = Load(router.url, arguments.connections, arguments.streams)
            trio.run(load.run, router.pid)
            os.waitid(os.P_PID, router.pid, os.WEXITED | os.WNOWAIT)  # a second signal would end it at once
            ended_s = time.monotonic()
    return load.ends, ended_s - load.terminated_s


class Load:
    """Clients that keep so many streams going until they are turned away.

    Attributes:
        ends: of requests: a finish reason, `refused` before its acceptance, an error's code, or `lost`.
        terminated_s: when the signal was sent.
    """

    def __init__(self, url: str, connections: int, streams: int) -> None:
        self.ends = Counter[str]()
        self.terminated_s = 0.0
        self._url = url
        self._connections = connections
        self._streams = streams
        self._under_way = 0
        self._all_under_way = trio.Event()

    async def run(self, pid: int) -> None:
        """Until every connection has ended."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._connections):
                nursery.start_soon(self._connection)
            await self._all_under_way.wait()
            await trio.sleep(1)
            self.terminated_s = time.monotonic()
            os.kill(pid, signal.SIGTERM)

    async def _connection(self) -> None:
        async with connect(self._url) as client, trio.open_nursery() as nursery:
            for number in range(self._streams):
                nursery.start_soon(self._client, client, number)

    async def _client(self, client: Client, number: int) -> None:
        """One long stream that outlasts the grace, or short ones after each other."""
        tokens = 4000 if number % 2 else 50
        while await self._ask(client, tokens) == "length":
            pass

    async def _ask(self, client: Client, tokens: int) -> str:
        accepted = False
        end = "lost"
        try:
            async with client.generate("x", max_tokens=tokens, ignore_eos=True) as stream:
                async for event in stream:
                    if isinstance(event, Accepted):
                        accepted = True
                        self._began()
                    elif isinstance(event, Finished):
                        end = event.finish_reason
        except ConnectionLost:
            end = "lost" if accepted else "refused"
        except RequestError as error:
            end = error.code if accepted else "refused"
        self.ends[end] += 1
        return end

    def _began(self) -> None:
        self._under_way += 1
        if self._under_way == self._connections * self._streams:
            self._all_under_way.set()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes take what CPU time they get."""
    processes = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
