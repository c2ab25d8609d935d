"""What a router adds: the same streams directly and through it, from servers whose tokens carry the time."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import trio

from lab_tools.stamped import age_ms, stamped_command
from wsbatch.client import connect
from wsbatch.messages import Tokens
from wsbatch_bench.load.server import server_process, wsbatch_command
from wsbatch_bench.quantiles import observed_quantile

_WARMUP_S = 2.0
_CLOCK_TICKS_S = 0.01  # of /proc/PID/stat


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement.

    Attributes:
        tokens_per_s: received, all streams together.
        tokens_per_frame: the mean.
        p50_ms, p99_ms: from a token's making to its receipt.
        router_cpu: share of one core that the router's process used; None without a router.
    """

    tokens_per_s: float
    tokens_per_frame: float
    p50_ms: float
    p99_ms: float
    router_cpu: float | None


def measure(*, replicas: int, streams: int, interval_ms: float, seconds: float, routed: bool) -> Cost:
    """Streams spread over the replicas' servers, one token each `interval_ms`; directly, or through one router."""
    with ExitStack() as stack:
        servers = [stack.enter_context(server_process(stamped_command(interval_ms))) for _ in range(replicas)]
        urls, pid = [server.url for server in servers], None
        if routed:
            flags = ("--max-live-requests", "100000", "--log-level", "error")
            router = stack.enter_context(server_process(wsbatch_command("route", *flags, *urls)))
            urls, pid = [router.url], router.pid
        return trio.run(_measure, urls, streams, seconds, pid)


async def _measure(urls: list[str], streams: int, seconds: float, pid: int | None) -> Cost:
    ages: list[float] = []
    frames = 0
    begin_s = trio.current_time() + _WARMUP_S
    end_s = begin_s + seconds

    async def read(url: str, count: int) -> None:
        async with connect(url) as client, trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one, client)

    async def one(client: object) -> None:
        nonlocal frames
        async with client.generate("x", max_tokens=1_000_000) as stream:  # type: ignore[attr-defined]
            async for event in stream:
                now_s = trio.current_time()
                if now_s >= end_s:
                    return
                if isinstance(event, Tokens) and now_s >= begin_s:
                    frames += 1
                    ages.extend([age_ms(token_id) for token_id in event.token_ids])

    used_s = 0.0
    async with trio.open_nursery() as nursery:
        for index, url in enumerate(urls):
            nursery.start_soon(read, url, streams // len(urls) + (index < streams % len(urls)))
        await trio.sleep_until(begin_s)
        before_s, at_s = _cpu_s(pid), time.monotonic()
        await trio.sleep_until(end_s)
        used_s = (_cpu_s(pid) - before_s) / (time.monotonic() - at_s)
    return Cost(
        tokens_per_s=len(ages) / seconds,
        tokens_per_frame=len(ages) / max(1, frames),
        p50_ms=observed_quantile(ages, 0.5),
        p99_ms=observed_quantile(ages, 0.99),
        router_cpu=None if pid is None else used_s,
    )


def _cpu_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _CLOCK_TICKS_S
