"""A run's summary as lines for a terminal, and as the JSON that vLLM's `bench serve --save-result` writes."""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite, isinf, isnan
from statistics import fmean, median, pstdev
from typing import Any

from wsbatch_bench.load.generator import LoadPlan, LoadRun
from wsbatch_bench.load.record import TTFT_PARTS
from wsbatch_bench.load.summary import Gaps, Latency, Summary
from wsbatch_bench.load.trace import Offered
from wsbatch_bench.quantiles import observed_quantile
from wsbatch_bench.sampling import shown
from wsbatch_bench.stability import Stability


def ms(seconds: float) -> str:
    """Milliseconds with three significant figures or so; ∞ where too many requests failed."""
    if not isfinite(seconds):
        return "∞" if seconds > 0 else "–"
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"


def summary_lines(run: LoadRun, summary: Summary) -> list[str]:
    """The report of one run."""
    trace = run.plan.trace
    rounds = "" if len(run.records) <= len(trace.entries) else f", {len(run.records)} sent: over and over"
    lines = [
        f"trace                sha256 {trace.sha256[:16]}…, seed {trace.seed}, {len(trace.entries)} requests{rounds}",
        f"sampling             {shown(run.plan.sampling)}",
        f"measured requests    {summary.sent}, answered {summary.completed}"
        + "".join(f", {code} {count}" for code, count in sorted(summary.errors.items())),
        f"offered              {_offered(run.plan, summary.offered)}",
        f"throughput           {summary.request_throughput:.3g} requests/s, {summary.output_throughput:,.1f} output "
        f"tokens/s over {summary.duration_s:.1f} s",
    ]
    if summary.goodput is not None:
        lines.append(f"goodput              {summary.goodput:.3g} requests/s within the bounds")
    lines.append(
        f"served meanwhile     {summary.served_requests_per_s:.3g} requests/s, {summary.served_tokens_per_s:,.1f} "
        "output tokens/s, warm-up and cool-down included"
    )
    lines += [
        "",
        f"{'milliseconds':20} {'p50':>9} {'p95':>9} {'(95 % interval)':>21} {'p99':>9}",
        _latency("TTFT", summary.ttft),
        _latency("  from sending", summary.ttft_sent),
        _latency("end to end", summary.e2e),
        _latency("  from sending", summary.e2e_sent),
        _latency("time per token", summary.tpot, about="~" if summary.tpot_estimated else ""),
        _gaps("between tokens", summary.itl),
        *_notes(summary),
    ]
    if summary.ttft_parts:
        lines += ["", f"{'TTFT is made of':20} " + " ".join(f"{name.replace('_', ' '):>11}" for name in TTFT_PARTS)]
        for name, parts in (("  on average", summary.ttft_parts), ("  of the p95 request", summary.ttft_parts_p95)):
            if parts:
                lines.append(f"{name:20} " + " ".join(f"{ms(parts[part]):>11}" for part in TTFT_PARTS))
    lines += ["", _stability(summary.stability)]
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


def _stability(stability: Stability) -> str:
    if isnan(stability.growth.value):
        return "stability            nothing to say: all requests came at once"
    low, high = max(-1.0, stability.growth.low), min(1.0, stability.growth.high)
    return (
        f"stability            {stability.verdict}: unserved requests grow by {stability.growth.value:.1%} "
        f"({low:.1%} … {high:.1%}) of those that come; {stability.mean_in_system:.1f} in the system; "
        f"λW/L {stability.little_ratio:.2f}"
    )


def _offered(plan: LoadPlan, offered: Offered) -> str:
    """What was asked for, beside what was stated."""
    if isinf(offered.requests_per_s) and not plan.trace.closed:
        return f"all at once: {offered.requests} requests"
    stated = "" if plan.trace.closed else f" (stated: {plan.rate:g})"
    return (
        f"{offered.requests_per_s:.3g} requests/s{stated}, {offered.prompt_tokens_per_s:,.0f} prompt + "
        f"{offered.output_tokens_per_s:,.0f} output tokens/s; {plan.trace.arrivals}"
    )


def _latency(name: str, latency: Latency, *, about: str = "") -> str:
    interval = "" if isnan(latency.p95.value) else f"({ms(latency.p95.low)} … {ms(latency.p95.high)})"
    p50, p95, p99 = (about + ms(value) for value in (latency.p50, latency.p95.value, latency.p99))
    return f"{name:20} {p50:>9} {p95:>9} {interval:>21} {p99:>9}"


def _gaps(name: str, gaps: Gaps) -> str:
    longest = f"longest {ms(gaps.longest)}"
    return f"{name:20} {ms(gaps.p50):>9} {ms(gaps.p95):>9} {longest:>21} {ms(gaps.p99):>9}"


def _notes(summary: Summary) -> list[str]:
    """What must be known to read the latencies."""
    notes = []
    if summary.tpot_undefined:
        notes.append(
            f"  time per token leaves out {summary.tpot_undefined} of {summary.completed} answers, which have none: "
            "of one token, or in one piece"
        )
    if summary.tpot_estimated:
        notes.append(
            f"  ~ {summary.tpot_estimated} answers came in chunks of several tokens, the server does not say how many: "
            "time per token is estimated, gaps are between chunks"
        )
    if summary.cache_hits:
        notes.append(
            f"  prefix cache: {summary.cache_hits} of {summary.completed} answers reused it, "
            f"{summary.cached_share:.0%} of the prompt tokens: TTFT is that of a warm cache"
        )
    return notes


def result_json(run: LoadRun, summary: Summary, *, backend: str, model: str, date: datetime | None = None) -> Any:
    """The result as plain data."""
    measured = run.measured
    first = run.plan.trace.arrivals
    result: dict[str, Any] = {
        "date": (date or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": run.plan.measured,
        "request_rate": "inf" if isinf(run.plan.rate) else run.plan.rate,
        "burstiness": float(first.rpartition("=")[2]) if first.startswith("gamma") else 1.0,
        "max_concurrency": None,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.sent - summary.completed,
        "total_input_tokens": sum(record.prompt_tokens for record in measured if record.ok),
        "total_output_tokens": sum(record.tokens for record in measured if record.ok),
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.output_throughput
        + sum(record.prompt_tokens for record in measured if record.ok) / summary.duration_s,
        "input_lens": [record.prompt_tokens for record in measured],
        "output_lens": [record.tokens for record in measured],
        "ttfts": [record.ttft_s for record in measured],
        "itls": [record.gaps_s for record in measured],
        "start_times": [record.scheduled_s for record in measured],
        "errors": [record.error or "" for record in measured],
    }
    gaps = [gap for record in measured if record.ok for gap in record.gaps_s]
    for name, values in (
        ("ttft", [record.ttft_s for record in measured]),
        ("tpot", [tpot_s for record in measured if not isnan(tpot_s := record.tpot_s)]),
        ("itl", gaps),
        ("e2el", [record.e2e_s for record in measured]),
    ):
        result |= _statistics(name, values)
    result["max_itl_ms"] = summary.itl.longest * 1000
    result["wsbatch"] = asdict(summary) | {
        "trace_sha256": run.plan.trace.sha256,
        "arrivals": run.plan.trace.arrivals,
        "prompts": run.plan.trace.prompts,
        "outputs": run.plan.trace.outputs,
        "seed": run.plan.trace.seed,
        "temperature": run.plan.sampling.temperature,
        "top_p": run.plan.sampling.top_p,
        "warmup": run.plan.warmup,
        "sent_in_all": len(run.records),
        "trace_requests": len(run.plan.trace.entries),
        "machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
    }
    return plain(result)


def plain(value: Any) -> Any:
    """Without what JSON cannot say: infinite and undefined numbers become null, tuples lists."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    """In milliseconds. As in vLLM, mean, median and deviation are those of answered requests; quantiles count all."""
    finite = [value * 1000 for value in values if isfinite(value)] or [float("nan")]
    return {
        f"mean_{name}_ms": fmean(finite),
        f"median_{name}_ms": median(finite),
        f"std_{name}_ms": pstdev(finite) if len(finite) > 1 else 0.0,
    } | {f"p{q}_{name}_ms": observed_quantile(values, q / 100) * 1000 for q in (50, 95, 99)}
