"""The storm of `retry_storm.py` with server and clients in one process, on a clock that runs with its CPU time.

Run from a clone: `python bench/lab/retry_storm_cpu.py`; for another checkout, put it and its `bench` first on
`PYTHONPATH`. Where everybody waits, the clock jumps to the next deadline; else it shows how much CPU time was used. So
the event loop is held up by what server and clients do, and by nothing else on the machine: the figures of a busy
machine are those of a quiet one. Streams are in memory, so the kernel's part is left out, and the model takes no CPU
time.
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf

import trio

from lab_tools.impatient import ImpatientTarget, Manners
from lab_tools.overload_run import Overload
from retry_storm import Link, LinkTarget
from wsbatch.config import ServerConfig
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener, open_virtual_engine
from wsbatch_bench.load.generator import LoadPlan, run_load
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sweep.setting import parse_costs, parse_setting


class CpuClock(trio.abc.Clock):
    """CPU time of this process, and the time in which everybody waited."""

    def __init__(self) -> None:
        self.jumped_s = 0.0

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.jumped_s + time.process_time()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline < inf:
            self.jumped_s += max(0.0, deadline - self.current_time())
        return 0.0


@dataclass
class MemoryTarget(LinkTarget):
    listener: MemoryListener = field(default_factory=MemoryListener)

    async def add(self) -> Link:
        link = Link(await self.listener.connect())
        await link.open()
        return link


async def measure(overload: Overload, rate: float, tries: int, clock: CpuClock) -> tuple[float, float, Counter[str]]:
    """Goodput, the event loop's share of busy time, and how attempts ended."""
    config = overload.setting.config(model="simulated")
    plan = LoadPlan(
        trace=overload.trace,
        rate=rate,
        warmup=round(rate * overload.warmup_s),
        measured=max(1, round(rate * overload.measured_s)),
    )
    costs = overload.costs[overload.setting.scheduler]
    async with open_virtual_engine(config, costs) as (engine, _), trio.open_nursery() as nursery:
        target = MemoryTarget(0, nursery)
        server = Server(engine, ServerConfig(max_connections=65_536), addresses=[("127.0.0.1", 1)])
        await nursery.start(server.run, [target.listener])
        for _ in range(config.max_batch_size + config.max_queue_requests + 64):
            target.free.append(await target.add())
        began_s, jumped_s = trio.current_time(), clock.jumped_s
        clients = ImpatientTarget(target, Manners(overload.manners.patience_s, tries=tries), 0)
        run = await run_load(clients, plan)
        busy = 1 - (clock.jumped_s - jumped_s) / (trio.current_time() - began_s)
        start_s, end_s = run.window_s
        good = [each for each in run.records if each.ok and start_s <= each.ended_s <= end_s]
        nursery.cancel_scope.cancel()
    return len(good) / (end_s - start_s), busy, clients.outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.1, 10.0], help="over the capacity, lightest first")
    parser.add_argument("--setting", default="continuous:max_batch_size=16,max_queue_requests=32,queue_timeout_ms=4000")
    parser.add_argument("--costs", default="tau_ms=8,alpha_ms=0.3,beta_ms=0.02")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    overload = Overload(
        costs=parse_costs(arguments.costs),
        setting=parse_setting(arguments.setting),
        trace=draw_trace(
            10_000,
            prompts=parse_lengths("lognormal:median=50,sigma=0.6,min=8,max=256"),
            outputs=parse_lengths("lognormal:median=20,sigma=0.6,max=80"),
        ),
        manners=Manners(5.0),
        warmup_s=3.0,
        measured_s=arguments.seconds,
    )
    capacity = overload.capacity()
    print(f"capacity {capacity:.1f} requests/s", flush=True)
    goodputs = []
    for load in arguments.loads:
        clock = CpuClock()
        goodput, busy, outcomes = trio.run(measure, overload, load * capacity, arguments.tries, clock, clock=clock)
        goodputs.append(goodput)
        print(f"{load:g}x: goodput {goodput:.1f}/s, event loop {busy:.0%} busy, {dict(outcomes)}", flush=True)
    print(f"ratio {goodputs[-1] / goodputs[0]:.1%}")


if __name__ == "__main__":
    main()
