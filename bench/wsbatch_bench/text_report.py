"""A run's summary as lines for a terminal."""

from math import isfinite

from wsbatch_bench.record import TTFT_PARTS
from wsbatch_bench.summary import Latency, Summary


def ms(seconds: float) -> str:
    """Milliseconds with three significant figures or so; ∞ where too many requests failed."""
    if not isfinite(seconds):
        return "∞" if seconds > 0 else "–"
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"


def summary_lines(summary: Summary, *, offered: str) -> list[str]:
    """The report of one run."""
    lines = [
        f"measured requests    {summary.sent}, answered {summary.completed}"
        + "".join(f", {code} {count}" for code, count in sorted(summary.errors.items())),
        f"offered              {offered}",
        f"throughput           {summary.request_throughput:.3g} requests/s, {summary.output_throughput:,.1f} output "
        f"tokens/s over {summary.duration_s:.1f} s",
    ]
    if summary.goodput is not None:
        lines.append(f"goodput              {summary.goodput:.3g} requests/s within the bounds")
    lines += [
        "",
        f"{'milliseconds':20} {'p50':>9} {'p95':>9} {'(95 % interval)':>21} {'p99':>9}",
        _latency("TTFT", summary.ttft),
        _latency("  from sending", summary.ttft_sent),
        _latency("end to end", summary.e2e),
        _latency("  from sending", summary.e2e_sent),
        _latency("time per token", summary.tpot),
    ]
    if summary.ttft_parts:
        lines += ["", f"{'TTFT is made of':20} " + " ".join(f"{name.replace('_', ' '):>11}" for name in TTFT_PARTS)]
        for name, parts in (("  on average", summary.ttft_parts), ("  of the p95 request", summary.ttft_parts_p95)):
            if parts:
                lines.append(f"{name:20} " + " ".join(f"{ms(parts[part]):>11}" for part in TTFT_PARTS))
    stability = summary.stability
    lines += [
        "",
        f"stability            {stability.verdict}: unserved requests grow by {stability.growth_fraction:.1%} of those "
        f"that come; {stability.mean_in_system:.1f} in the system; λW/L {stability.little_ratio:.2f}",
    ]
    if isfinite(summary.slot_utilization):
        lines.append(
            f"decode slots         {summary.slot_utilization:.1%} used, {summary.mean_rows:.1f} rows a step; waste of "
            f"all slots {summary.waste_fraction:.1%}"
        )
    counted = "not told by the server" if summary.server_tokens is None else f"{summary.server_tokens:,} by the server"
    lines += [
        f"output tokens        {summary.client_tokens:,} counted here, {counted}",
        f"client lag           {ms(summary.worst_lag_s)} ms at worst",
        *(f"INVALID              {reason}" for reason in summary.invalid),
    ]
    return lines


def _latency(name: str, latency: Latency) -> str:
    interval = f"({ms(latency.p95.low)} … {ms(latency.p95.high)})"
    return f"{name:20} {ms(latency.p50):>9} {ms(latency.p95.value):>9} {interval:>21} {ms(latency.p99):>9}"
