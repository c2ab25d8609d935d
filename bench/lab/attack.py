"""A live server under the shapes of hostile input: what each does to the event loop, to a neighbour, and to memory.

Run from a clone: `python bench/lab/attack.py [--only REGEX]`. For each shape it starts a server (`wsbatch serve` over a
simulated model, 2 ms a step) in a child process, streams to a neighbour, asks /livez twenty times a second, and lets a
second child attack. It prints, as a Markdown table:

hold: the longest that the server's event loop went without looking at its sockets, ms; in brackets the longest in CPU
    time of its thread: where that is much less, another process had the core.
gap p50, p99, max: between a neighbour's frames, ms.
livez: the longest answer, ms, and how many were not answered.
before, peak, after: resident memory of the server, MiB; after is 15 s after the attacker has left.
"""

import argparse
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

from attack_shapes import SHAPES, Attacker, Shape
from wsbatch.messages import Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.testing import BareClient
from wsbatch_bench.quantiles import observed_quantile

_SETTLE_S = 15.0
_LONGEST_S = 60.0
_MIB = 2**20


def attack(name: str, port: int) -> None:
    """Do it, when told to on stdin; keep the connections until told again."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    attacker = Attacker(port)
    shape.run(attacker)
    print("done", flush=True)
    sys.stdin.readline()
    attacker.close()


class Neighbour:
    """Reads one stream after the other, and asks /livez; keeps what it saw."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.gaps_s: list[float] = []
        self.livez_s: list[float] = []
        self.failed = 0

    async def read(self) -> None:
        """Stream until cancelled."""
        client = BareClient(await trio.open_tcp_stream("127.0.0.1", self._port))
        await client.open()
        sampling = SamplingParams(max_tokens=8000, ignore_eos=True)
        await client.receive()
        while True:
            await client.send(GenerateRequest(id=1, prompt="x", sampling=sampling))
            last_s: float | None = None
            while not isinstance(frame := await client.receive(), Finished):
                if isinstance(frame, Tokens):
                    now_s = time.perf_counter()
                    if last_s is not None:
                        self.gaps_s.append(now_s - last_s)
                    last_s = now_s

    async def ask(self) -> None:
        """GET /livez until cancelled."""
        while True:
            asked_s = time.perf_counter()
            try:
                with trio.fail_after(10):
                    stream = await trio.open_tcp_stream("127.0.0.1", self._port)
                    async with stream:
                        await stream.send_all(b"GET /livez HTTP/1.1\r\nHost: lab\r\n\r\n")
                        answer = await stream.receive_some()
                if not answer.startswith(b"HTTP/1.1 200 "):
                    raise OSError
            except (OSError, trio.BrokenResourceError, trio.TooSlowError):
                self.failed += 1
            else:
                self.livez_s.append(time.perf_counter() - asked_s)
            await trio.sleep(0.05)


def memory_mib(pid: int, key: str) -> float:
    """VmRSS or VmHWM."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"{key}:\s+(\d+)", status)
    assert match is not None
    return int(match[1]) * 1024 / _MIB


def start_high_water_mark(pid: int) -> None:
    """From here on VmHWM counts anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def child(script: str, *args: str) -> "subprocess.Popen[str]":
    """A script from beside this one; it imports from there, not from the working directory."""
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, "-P", here / script, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(here)},
    )


async def measure(shape: Shape) -> str:
    """One row of the table."""
    with tempfile.NamedTemporaryFile() as shared:
        shared.write(bytes(16))
        shared.flush()
        flags = ["--model", "simulated:tau_ms=2,alpha_ms=0,beta_ms=0", "--port", "0", "--log-level", "error"]
        server = child("watched_server.py", shared.name, *flags, *shape.flags)
        try:
            assert server.stdout is not None
            port = int((await trio.to_thread.run_sync(server.stdout.readline)).rpartition(":")[2])
            holds = mmap.mmap(shared.fileno(), 16)
            return await under_attack(shape, server.pid, port, holds)
        finally:
            server.kill()
            server.wait()


async def under_attack(shape: Shape, pid: int, port: int, holds: mmap.mmap) -> str:
    neighbour = Neighbour(port)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(neighbour.read)
        nursery.start_soon(neighbour.ask)
        await trio.sleep(1)
        before = memory_mib(pid, "VmRSS")
        start_high_water_mark(pid)
        neighbour.gaps_s.clear()
        neighbour.livez_s.clear()
        holds[:] = bytes(16)
        attacker = child("attack.py", "--attack", shape.name, str(port))
        assert attacker.stdout is not None
        try:
            with trio.move_on_after(_LONGEST_S) as patience:
                await trio.to_thread.run_sync(attacker.stdout.readline, abandon_on_cancel=True)
            held_s, cpu_s = struct.unpack("dd", holds[:])
        finally:
            attacker.kill()
            attacker.wait()
        await trio.sleep(_SETTLE_S)
        nursery.cancel_scope.cancel()
    peak, after = memory_mib(pid, "VmHWM"), memory_mib(pid, "VmRSS")
    gaps = sorted(neighbour.gaps_s) or [float("nan")]
    p50, p99 = (observed_quantile(gaps, q) * 1000 for q in (0.5, 0.99))
    livez = f"{max(neighbour.livez_s, default=0) * 1000:.0f}, {neighbour.failed}"
    note = " (not over after a minute)" if patience.cancelled_caught else ""
    return (
        f"| {shape.name}{note} | {held_s * 1000:.0f} ({cpu_s * 1000:.0f}) | {p50:.0f} | {p99:.0f} "
        f"| {gaps[-1] * 1000:.0f} | {livez} | {before:.0f} | {peak:.0f} | {after:.0f} |"
    )


async def main(pattern: str) -> None:
    """The whole table."""
    print("| shape | hold | gap p50 | p99 | max | livez: longest, failed | before | peak | after |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for shape in SHAPES:
        if re.search(pattern, shape.name):
            print(await measure(shape), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", default="", metavar="REGEX", help="shapes to run; default: all")
        trio.run(main, parser.parse_args().only)
