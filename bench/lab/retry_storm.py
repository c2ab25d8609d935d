"""A live server under clients that come back: how much of its goodput is left at ten times its capacity.

Run from a clone: `python bench/lab/retry_storm.py [--server CHECKOUT …] [--rounds 3]`. For each round, each server
(this clone, or the checkouts named, in turn) and each load it starts `wsbatch serve` over a simulated model, whose
event loop shares this machine's cores with the clients, and lets clients come at a multiple of the capacity. Who is
refused, or has waited longer than its patience, comes back after half a second on average, whatever the server said,
up to `--tries` times in all. It prints a line a run, and at last the medians and the ratio of each round's heaviest
load to its lightest. Goodput is what was answered in full, in time, per second.
"""

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time

import msgpack
import trio

from lab_tools.impatient import ImpatientTarget, Manners
from lab_tools.looks import look, raise_descriptor_limit
from lab_tools.overload_run import Overload
from wsbatch_bench.load.generator import LoadPlan, run_load
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.server import ServerProcess, server_process, wsbatch_command
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sweep.setting import parse_costs, parse_setting

_TERMINAL = ("finished", "error")


class Full(Exception):
    """The server refused a connection."""


class Link:
    """One WebSocket, for one request at a time: what a client needs, at a tenth of a client's cost."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._data = b""

    async def open(self) -> None:
        await self._stream.send_all(
            b"GET / HTTP/1.1\r\nHost: lab\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        while b"\r\n\r\n" not in self._data:
            self._data += await self._read()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        if b" 101 " not in head:
            await self._stream.aclose()
            raise Full
        await self.receive()

    async def send(self, frame: dict) -> None:
        data = msgpack.packb(frame)
        size = len(data)
        length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        await self._stream.send_all(b"\x82" + length + bytes(4) + data)  # masked with zeros

    async def receive(self) -> dict:
        while True:
            start, size = 2, self._data[1] & 127 if len(self._data) >= 2 else 0
            if size == 126 and len(self._data) >= 4:
                start, size = 4, int.from_bytes(self._data[2:4], "big")
            if 2 <= start + size <= len(self._data) and len(self._data) >= 2 and size != 126:
                frame, self._data = self._data[start : start + size], self._data[start + size :]
                return msgpack.unpackb(frame)
            self._data += await self._read()

    async def _read(self) -> bytes:
        if not (data := await self._stream.receive_some(65_536)):
            raise OSError("the server closed")
        return bytes(data)


@dataclass
class LinkTarget:
    """Implements `Target`. Each live request has a connection of its own."""

    port: int
    nursery: trio.Nursery
    free: list[Link] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    backend = model = "wsbatch"

    async def add(self) -> Link:
        link = Link(await trio.open_tcp_stream("127.0.0.1", self.port))
        await link.open()
        return link

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        record.sent_s = trio.current_time() - start_s
        try:
            link = self.free.pop() if self.free else await self.add()
        except Full:
            record.failed("no_connection", trio.current_time() - start_s)
            return
        await link.send(
            {
                "type": "generate",
                "id": 1,
                "prompt": bytes(prompt_ids).decode(),
                "max_tokens": record.output_tokens,
                "ignore_eos": True,
                "priority": record.priority,
            }
        )
        try:
            while (frame := await link.receive())["type"] not in _TERMINAL:
                pass
        except trio.Cancelled:
            self.nursery.start_soon(self._leave, link)
            raise
        self.free.append(link)
        record.ended_s = trio.current_time() - start_s
        if frame["type"] == "error":
            record.error = frame["code"]
            self.refused_ms.append((record.ended_s - record.sent_s) * 1000)

    async def _leave(self, link: Link) -> None:
        await link.send({"type": "cancel", "id": 1})
        while (await link.receive())["type"] not in _TERMINAL:
            pass
        self.free.append(link)

    async def totals(self) -> None:
        return None


@dataclass(frozen=True)
class Result:
    goodput: float
    attempts: float
    server_cpu: float
    client_cpu: float
    refusal_ms: float
    lag_p99_ms: float
    outcomes: Counter[str]


@contextmanager
def serving(checkout: Path, flags: list[str]) -> Iterator[ServerProcess]:
    os.environ["PYTHONPATH"] = str(checkout)
    with server_process(wsbatch_command("serve", *flags)) as server:
        yield server


def cpu_s(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(checkout: Path, overload: Overload, arguments: argparse.Namespace, rate: float) -> Result:
    costs = arguments.costs
    flags = ["--model", f"simulated:{costs}", "--ping-interval-s", "3600", *overload.setting.measuring_flags()]
    plan = LoadPlan(
        trace=overload.trace,
        rate=rate,
        warmup=round(rate * overload.warmup_s),
        measured=max(1, round(rate * overload.measured_s)),
    )
    with serving(checkout, [*flags, "--max-connections", "8192"]) as server:
        async with trio.open_nursery() as nursery:
            target = LinkTarget(server.port, nursery)
            config = overload.setting.config(model="simulated")
            for _ in range(config.max_batch_size + config.max_queue_requests + 64):
                target.free.append(await target.add())
            before, began_s, server_s, client_s = (
                await look(server),
                trio.current_time(),
                cpu_s(server),
                process_time(),
            )
            clients = ImpatientTarget(target, overload.manners, 0)
            run = await run_load(clients, plan)
            lasted_s = trio.current_time() - began_s
            after = await look(server)
            start_s, end_s = run.window_s
            good = [each for each in run.records if each.ok and start_s <= each.ended_s <= end_s]
            result = Result(
                len(good) / (end_s - start_s),
                clients.outcomes.total() / lasted_s,
                (cpu_s(server) - server_s) / lasted_s,
                (process_time() - client_s) / lasted_s,
                statistics.median(target.refused_ms or [0.0]),
                after.lag_quantile_s(before, 0.99) * 1000,
                clients.outcomes,
            )
            nursery.cancel_scope.cancel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, nargs="+", default=[Path(__file__).resolve().parents[2]])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.1, 10.0], help="over the capacity, lightest first")
    parser.add_argument("--setting", default="continuous:max_batch_size=16,max_queue_requests=32,queue_timeout_ms=4000")
    parser.add_argument("--costs", default="tau_ms=10,alpha_ms=0.5,beta_ms=0.1")
    parser.add_argument("--prompt-lengths", default="lognormal:median=50,sigma=0.6,min=8,max=256")
    parser.add_argument("--output-lengths", default="lognormal:median=20,sigma=0.6,max=80")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--patience-s", type=float, default=5.0)
    parser.add_argument("--warmup-s", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    arguments = parser.parse_args()
    raise_descriptor_limit()
    prompts, outputs = parse_lengths(arguments.prompt_lengths), parse_lengths(arguments.output_lengths)
    overload = Overload(
        costs=parse_costs(arguments.costs),
        setting=parse_setting(arguments.setting),
        trace=draw_trace(10_000, prompts=prompts, outputs=outputs),
        manners=Manners(arguments.patience_s, tries=arguments.tries),
        warmup_s=arguments.warmup_s,
        measured_s=arguments.seconds,
    )
    capacity = overload.capacity()
    print(f"capacity {capacity:.1f} requests/s", flush=True)
    goodput: dict[tuple[Path, float], list[float]] = {}
    for _ in range(arguments.rounds):
        for checkout in arguments.server:
            for load in arguments.loads:
                result = trio.run(measure, checkout, overload, arguments, load * capacity)
                goodput.setdefault((checkout, load), []).append(result.goodput)
                print(
                    f"{checkout.name} {load:g}x: goodput {result.goodput:.1f}/s, {result.attempts:.0f} attempts/s, "
                    f"server {result.server_cpu:.0%} CPU, clients {result.client_cpu:.0%}, refusal "
                    f"{result.refusal_ms:.1f} ms, loop lag p99 {result.lag_p99_ms:g} ms, {dict(result.outcomes)}",
                    flush=True,
                )
    for checkout in arguments.server:
        light, heavy = (goodput[checkout, load] for load in (arguments.loads[0], arguments.loads[-1]))
        ratios = [most / least for least, most in zip(light, heavy, strict=True)]
        print(
            f"{checkout.name}: {statistics.median(light):.1f}/s, {statistics.median(heavy):.1f}/s; ratio "
            f"{statistics.median(ratios):.1%} ({min(ratios):.1%} … {max(ratios):.1%})"
        )


if __name__ == "__main__":
    main()
