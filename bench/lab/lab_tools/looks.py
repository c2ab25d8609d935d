"""What can be seen of a server process from outside: its memory, descriptors and threads, and its metrics."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import trio

from wsbatch_bench.load.http_client import dial_url, get
from wsbatch_bench.load.server import ServerProcess, parse_metrics

_LAG = "wsbatch_event_loop_lag_seconds"


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


async def look(server: ServerProcess) -> Sample:
    """Take a sample. Raises HttpFailed or OSError."""
    dial, host, _ = dial_url(server.url)
    metrics = parse_metrics((await get(dial, host, "/metrics")).decode())
    proc = Path(f"/proc/{server.pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return Sample(
        trio.current_time(),
        int(status["VmRSS"].split()[0]) * 1024,
        len(os.listdir(proc / "fd")),
        int(status["Threads"]),
        {name: value for (name, label), value in metrics.items() if not label},
        {float(label): value for (name, label), value in metrics.items() if name == f"{_LAG}_bucket"},
    )


def raise_descriptor_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
