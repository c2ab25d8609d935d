"""What one sees while a load runs: a panel on a terminal, a line now and then elsewhere. Always on stderr."""

import sys
from math import inf, isfinite

import trio
from rich.console import Console
from rich.live import Live
from rich.table import Table

from wsbatch_bench.load.generator import LoadRun
from wsbatch_bench.quantiles import observed_quantile

_RECENT_S = 5.0
_PANEL_EVERY_S = 0.25
_LINE_EVERY_S = 5.0


async def show_progress(run: LoadRun) -> None:
    """Show the run until cancelled. It costs this client about a millisecond each time."""
    started_s = trio.current_time()
    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            await trio.sleep(_LINE_EVERY_S)
            print(", ".join(f"{k} {v}" for k, v in progress(run, trio.current_time() - started_s)), file=sys.stderr)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            table = Table.grid(padding=(0, 2))
            for name, value in progress(run, trio.current_time() - started_s):
                table.add_row(f"[dim]{name}", value)
            live.update(table, refresh=True)
            await trio.sleep(_PANEL_EVERY_S)


def progress(run: LoadRun, elapsed_s: float) -> list[tuple[str, str]]:
    """Names and values as they stand."""
    records = run.records
    # The newest requests tell how it goes; all of them would cost more with every second.
    recent = [record for record in records[-500:] if record.ended_s < inf and record.ok]
    tokens = sum(
        count
        for record in records[-2000:]
        for at_s, count in reversed(record.arrivals)
        if at_s >= elapsed_s - _RECENT_S
    )
    ended = sum(record.ended_s < inf for record in records)
    failed = sum(record.error is not None for record in records)
    goal = run.plan.warmup + run.plan.measured
    values = [
        ("elapsed", f"{elapsed_s:.0f} s"),
        ("sent", f"{len(records)} of {goal}{'' if len(records) <= goal else ' (cooling down)'}"),
        ("in flight", str(len(records) - ended)),
        ("answered", str(ended - failed)),
        ("failed", str(failed)),
        ("tokens/s", f"{tokens / min(_RECENT_S, max(elapsed_s, 1e-9)):.0f}"),
    ]
    for name, times in (("TTFT", [r.ttft_s for r in recent]), ("end to end", [r.e2e_s for r in recent])):
        p50, p95 = observed_quantile(times, 0.5), observed_quantile(times, 0.95)
        if isfinite(p95):
            values.append((f"{name} p50/p95", f"{p50:.2f}/{p95:.2f} s"))
    values.append(("client lag", f"{run.worst_lag_s * 1000:.0f} ms"))
    return values
