"""A `wsbatch serve` in a process of its own, and what can be seen of it from outside."""

import os
import resource
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from prometheus_client.parser import text_string_to_metric_families

from wsbatch.processes import module_command
from wsbatch_bench.http_client import dial_url, get

_LAG = "wsbatch_event_loop_lag_seconds"
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server.

    Attributes:
        at_s: on this process's clock.
        rss_bytes, descriptors, threads: of the process, from /proc.
        values: its metrics by name, those without labels.
        lag_buckets: how many ticks of its event loop were at most so late, by seconds; cumulative in both respects.
    """

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    values: dict[str, float]
    lag_buckets: dict[float, float]

    def lag_quantile_s(self, earlier: "Sample", q: float) -> float:
        """An upper bound on the event loop's lateness at this quantile between two looks: a bucket's edge."""
        counts = {edge: count - earlier.lag_buckets[edge] for edge, count in self.lag_buckets.items()}
        total = max(counts.values())
        return min((edge for edge, count in counts.items() if count >= q * total), default=float("inf"))


class ServerProcess:
    """A server that listens at `url`."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])

    async def look(self) -> Sample:
        """Take a sample. Raises HttpFailed or OSError."""
        dial, host, _ = dial_url(self.url)
        text = await get(dial, host, "/metrics")
        values: dict[str, float] = {}
        buckets: dict[float, float] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if not sample.labels:
                    values[sample.name] = sample.value
                elif sample.name == f"{_LAG}_bucket":
                    buckets[float(sample.labels["le"])] = sample.value
        proc = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return Sample(
            trio.current_time(),
            int(status["VmRSS"].split()[0]) * 1024,
            len(os.listdir(proc / "fd")),
            int(status["Threads"]),
            values,
            buckets,
        )


@asynccontextmanager
async def serving_process(*flags: str) -> AsyncIterator[ServerProcess]:
    """`wsbatch serve FLAGS` on a free port while the block runs; SIGTERM at its end.

    Raises RuntimeError where it does not start, or ends with another status than 0.
    """
    command = module_command("wsbatch", "serve", "--port", "0", "--log-level", "warning", *flags)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 (a moment, before any load)
    assert process.stdout is not None
    try:
        line = await trio.to_thread.run_sync(process.stdout.readline)
        if not line.startswith("listening on "):
            raise RuntimeError(f"the server did not start: exit status {process.wait()}")
        yield ServerProcess(process, line.split()[-1])
        process.terminate()
        status = await trio.to_thread.run_sync(process.wait, _END_S)
        if status != 0:
            raise RuntimeError(f"the server ended with status {status}")
    finally:
        process.kill()
        process.stdout.close()


def raise_descriptor_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
