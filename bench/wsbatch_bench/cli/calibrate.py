"""`wsbatch-bench calibrate`: what this client can take; `load` refuses to ask for more than half of it."""

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import trio

from wsbatch.cli.parsing import FAILED, Commands, add_parser, ending_with
from wsbatch.model.conversion import cache_dir
from wsbatch_bench.load.generator import LoadPlan, run_load
from wsbatch_bench.load.server import server_process, wsbatch_command
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.load.target import Target
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sweep.stage import open_url_target

_DESCRIPTION = """\
Measure this client's own floor against a server that computes nothing: what a frame costs it, and
the time to first token that is not the model's. `load` refuses to ask for more than half of it.
"""

_EPILOG = """\
example:
  wsbatch-bench calibrate         a few seconds; kept in the user's cache ($WSBATCH_CACHE)
"""

_ECHO = "simulated:tau_ms=0,alpha_ms=0,beta_ms=0"
_STREAMS = 16
SHARE = 0.5
"""The share of its own floor that a client may be asked for."""


def add_command(commands: Commands) -> None:
    """Add `calibrate` to the command line."""
    parser = add_parser(
        commands, "calibrate", help="what this client can take", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Measure, print, keep; the exit status."""
    with ending_with(FAILED, RuntimeError):
        measured = calibrate()
    path = measured.save()
    print(
        f"machine              {measured.machine}\n"
        f"frames of tokens     {measured.frames_per_s:,.0f} a second of this client's CPU, "
        f"{1e6 / measured.frames_per_s:.0f} µs each\n"
        f"TTFT without a model {1000 * measured.ttft_p50_s:.1f} ms p50, {1000 * measured.ttft_p95_s:.1f} ms p95\n"
        f"load is refused from {SHARE * measured.frames_per_s:,.0f} tokens/s on\n"
        f"kept in              {path}"
    )
    return 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """This client's own floor on one machine.

    Attributes:
        frames_per_s: frames of tokens that one core of it can take in, by its CPU time.
        ttft_p50_s, ttft_p95_s: of single requests to a server that computes nothing: what is not the model's.
        machine, date: where and when.
    """

    frames_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    machine: str
    date: str

    def refusal(self, rate: float, mean_tokens: float) -> str | None:
        """Why this load is more than half of what the client can take; None where it is not."""
        asked = rate * mean_tokens
        if asked <= SHARE * self.frames_per_s:
            return None
        return (
            f"{rate:g} requests/s of {mean_tokens:.0f} tokens are {asked:,.0f} tokens/s: at most "
            f"{SHARE * self.frames_per_s:,.0f}, half of what this client can take, are measured; use several machines"
        )

    def save(self) -> Path:
        """Keep it in the user's cache."""
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def load_calibration() -> Calibration | None:
    """The one of this machine; None where there is none."""
    try:
        known = Calibration(**json.loads(_path().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return known if known.machine == _machine() else None


def calibrate() -> Calibration:
    """Start a server that computes nothing and measure this process against it; takes seconds."""

    async def main(url: str) -> Calibration:
        async with open_url_target(url) as target:
            return await measure_client(target)

    flags = ("--model", _ECHO, "--max-batch-size", str(_STREAMS), "--max-wait-ms", "0")
    with server_process(wsbatch_command("serve", *flags)) as server:
        return trio.run(main, server.url)


async def measure_client(target: Target, *, stream_tokens: int = 1500) -> Calibration:
    """Single requests for the latency, then streams at full speed for what a frame costs."""
    one = parse_lengths("fixed:tokens=1")
    singles = draw_trace(60, prompts=one, outputs=one)
    alone = summarise(await run_load(target, LoadPlan(trace=singles, rate=20.0, warmup=10, measured=50)))
    many = draw_trace(_STREAMS, prompts=one, outputs=parse_lengths(f"fixed:tokens={stream_tokens}"))
    before_s = time.process_time()
    run = await run_load(target, LoadPlan(trace=many, rate=float("inf"), warmup=0, measured=_STREAMS))
    spent_s = max(time.process_time() - before_s, 1e-6)
    frames = sum(len(record.arrivals) for record in run.records)
    return Calibration(
        frames_per_s=frames / spent_s,
        ttft_p50_s=alone.ttft.p50,
        ttft_p95_s=alone.ttft.p95.value,
        machine=_machine(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def _machine() -> str:
    return f"{platform.node()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _path() -> Path:
    return cache_dir() / "bench-client.json"
