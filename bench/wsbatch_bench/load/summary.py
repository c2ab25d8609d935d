"""What a run showed: latencies with failures as infinite, throughput under steady load, and whether to believe it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from statistics import fmean

from wsbatch_bench.load.generator import TIMED_OUT, LoadRun
from wsbatch_bench.load.record import TTFT_PARTS, Record
from wsbatch_bench.load.trace import Offered, Planned, offered_by
from wsbatch_bench.quantiles import Interval, observed_quantile, quantile_interval, share_bounds
from wsbatch_bench.stability import Stability, judge

MAX_LAG_S = 0.1
"""A client that once came later than this has not measured the server."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles in seconds, each an actual observation; infinite where too many requests failed. `p95` has bounds."""

    p50: float
    p95: Interval
    p99: float
    mean: float  # of the requests that were answered

    @classmethod
    def of(cls, values: Sequence[float]) -> "Latency":
        """From the values in schedule order."""
        finite = [value for value in values if isfinite(value)]
        return cls(
            observed_quantile(values, 0.5),
            quantile_interval(values, 0.95),
            observed_quantile(values, 0.99),
            fmean(finite) if finite else nan,
        )


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between frames of tokens (ITL) over all answers, in seconds: quantiles and the longest; nan without any."""

    p50: float
    p95: float
    p99: float
    longest: float

    @classmethod
    def of(cls, gaps_s: Sequence[float]) -> "Gaps":
        """From the gaps in any order."""
        return cls(*(observed_quantile(gaps_s, q) for q in (0.5, 0.95, 0.99)), max(gaps_s, default=nan))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run's figures. Times in seconds, rates per second.

    Attributes:
        offered: what the measured requests asked for, from the schedule as it was; in a closed loop as it came about.
        sent: measured requests; `completed` of them were answered, `errors` says what became of the others.
        duration_s: of the window, from the first measured request's scheduled time to the end of the last one.
        request_throughput, output_throughput: answered ones of the measured, and their tokens, over `duration_s`.
        goodput: those within all of the stated bounds, over `duration_s`, too; None without bounds.
        served_requests_per_s, served_tokens_per_s: what was served in the window, whoever's it was: warm-up and
            cool-down requests share it. This is what the server does under steady load.
        ttft, e2e: from the scheduled time. `ttft_sent`, `e2e_sent`: from sending.
        tpot: of answers that have one; `tpot_undefined` of the others, `tpot_estimated` of those whose frames held
            several tokens, nobody knows how many.
        itl: between frames of the answered requests.
        cache_hits: answers that reused the server's prefix cache; `cached_share` of all their prompt tokens.
        ttft_parts: the mean of each part over the answered requests, and the parts of the request that is p95.
        success: the share answered, with one-sided 95 % bounds.
        server_tokens: output tokens of the whole run by the server's accounting; None where it has none.
        client_tokens: the same as counted here.
        invalid: reasons not to believe the run; empty for a valid one.
    """

    offered: Offered
    sent: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    request_throughput: float
    output_throughput: float
    goodput: float | None
    served_requests_per_s: float
    served_tokens_per_s: float
    ttft: Latency
    ttft_sent: Latency
    e2e: Latency
    e2e_sent: Latency
    tpot: Latency
    tpot_undefined: int
    tpot_estimated: int
    itl: Gaps
    cache_hits: int
    cached_share: float
    ttft_parts: dict[str, float]
    ttft_parts_p95: dict[str, float]
    success: Interval
    stability: Stability
    worst_lag_s: float
    client_tokens: int
    server_tokens: int | None
    slot_utilization: float
    waste_fraction: float
    mean_rows: float
    stopped_early: bool
    invalid: tuple[str, ...]


def summarise(run: LoadRun, *, goodput: dict[str, float] | None = None, max_lag_s: float = MAX_LAG_S) -> Summary:
    """Add a run up. `goodput` bounds `ttft`, `tpot` and `e2el`, in seconds, for each single request."""
    measured = run.measured
    start_s, end_s = run.window_s
    duration_s = max(end_s - start_s, 1e-9)
    answered = [record for record in measured if record.ok]
    served_tokens = sum(count for record in run.records for at_s, count in record.arrivals if start_s <= at_s <= end_s)
    served = sum(record.ok and start_s <= record.ended_s <= end_s for record in run.records)
    tpots_s = _tpots_s(measured)
    cached_tokens = sum(record.cached_tokens for record in answered)
    good = None if goodput is None else sum(_meets(record, goodput) for record in measured) / duration_s
    finished = [record for record in run.records if record.reported_tokens is not None]
    client_tokens = sum(record.tokens for record in finished)
    window = run.window_totals
    last_scheduled_s = end_s if run.stopped_early else max((record.scheduled_s for record in measured), default=end_s)
    return Summary(
        offered=_offered(run),
        sent=len(measured),
        completed=len(answered),
        errors=dict(Counter(record.error for record in measured if record.error is not None)),
        duration_s=duration_s,
        request_throughput=len(answered) / duration_s,
        output_throughput=sum(record.tokens for record in answered) / duration_s,
        goodput=good,
        served_requests_per_s=served / duration_s,
        served_tokens_per_s=served_tokens / duration_s,
        ttft=Latency.of([record.ttft_s for record in measured]),
        ttft_sent=Latency.of([record.ttft_s - record.lag_s for record in measured]),
        e2e=Latency.of([record.e2e_s for record in measured]),
        e2e_sent=Latency.of([record.e2e_s - record.lag_s for record in measured]),
        tpot=Latency.of(tpots_s),
        tpot_undefined=sum(isnan(record.tpot_s) for record in answered),
        tpot_estimated=sum(not record.sizes_told for record in answered),
        itl=Gaps.of([gap_s for record in answered for gap_s in record.gaps_s]),
        cache_hits=sum(record.cached_tokens > 0 for record in answered),
        cached_share=cached_tokens / max(1, sum(record.prompt_tokens for record in answered)),
        ttft_parts=_mean_parts(answered),
        ttft_parts_p95=_parts_at(measured, 0.95),
        success=share_bounds(len(answered), len(measured)),
        stability=judge(run.sojourns, start_s, max(last_scheduled_s, start_s + 1e-9)),
        worst_lag_s=run.worst_lag_s,
        client_tokens=client_tokens,
        server_tokens=None if run.totals is None else round(run.totals.generation_tokens),
        slot_utilization=nan if window is None else window.slot_utilization,
        waste_fraction=nan if window is None else window.waste_fraction,
        mean_rows=nan if window is None else window.mean_rows,
        stopped_early=run.stopped_early,
        invalid=tuple(_doubts(run, client_tokens, max_lag_s)),
    )


def _offered(run: LoadRun) -> Offered:
    plan, count = run.plan, len(run.measured)
    if count and plan.trace.closed is None:
        return plan.trace.offered(plan.rate, plan.warmup, count)
    sent = sorted((each for each in run.records if each.index >= plan.warmup), key=lambda each: each.scheduled_s)
    planned = [Planned(each.index, each.scheduled_s, each.prompt_tokens, each.output_tokens) for each in sent]
    return offered_by(planned[: count + 1])


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50 e2el:5000`, in milliseconds, as bounds in seconds. Raises ValueError."""
    bounds: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in _GOODPUT:
            raise ValueError(f"goodput {pair!r}: {name!r} is none of {', '.join(_GOODPUT)}")
        try:
            bounds[name] = float(value) / 1000
        except ValueError:
            raise ValueError(f"goodput {pair!r}: must be {name}:MILLISECONDS") from None
        if not bounds[name] > 0:
            raise ValueError(f"goodput {pair!r}: must be above 0")
    return bounds


_GOODPUT: dict[str, Callable[[Record], float]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: _tpot_bounded_s(record),
    "e2el": lambda record: record.e2e_s,
}


def _tpot_bounded_s(record: Record) -> float:
    """What a bound on TPOT looks at. After an answer of one token nothing can be late: it is within any bound.

    An answer of several tokens in one piece has not shown its pace: it is within none.
    """
    tpot_s = record.tpot_s
    return (0.0 if record.tokens == 1 else inf) if isnan(tpot_s) else tpot_s


def _tpots_s(measured: Sequence[Record]) -> list[float]:
    """Those that are defined, failures as infinite; none where no answer has one."""
    defined = [tpot_s for record in measured if not isnan(tpot_s := record.tpot_s)]
    none = any(record.ok for record in measured) and not any(map(isfinite, defined))
    return [] if none else defined


def _meets(record: Record, bounds: dict[str, float]) -> bool:
    return record.ok and all(_GOODPUT[name](record) <= bound for name, bound in bounds.items())


def _mean_parts(answered: Sequence[Record]) -> dict[str, float]:
    parts = [each for record in answered if (each := record.ttft_parts_s()) is not None]
    return {name: fmean(each[name] for each in parts) for name in TTFT_PARTS} if parts else {}


def _parts_at(measured: Sequence[Record], q: float) -> dict[str, float]:
    """The parts of the very request whose time to first token is the quantile: they sum to it."""
    value = observed_quantile([record.ttft_s for record in measured], q)
    if not isfinite(value):
        return {}
    return next(record for record in measured if record.ttft_s == value).ttft_parts_s() or {}


def _doubts(run: LoadRun, client_tokens: int, max_lag_s: float) -> list[str]:
    doubts = []
    if run.worst_lag_s > max_lag_s:
        doubts.append(
            f"this client was up to {run.worst_lag_s * 1000:.0f} ms late: at most {max_lag_s * 1000:.0f} ms is allowed"
        )
    if run.interrupted:
        doubts.append(f"interrupted: {len(run.measured)} of {run.plan.measured} measured requests had been sent")
    if run.lost:
        doubts.append(f"the server was lost: {run.lost}")
    # A request that was given up may have got tokens that nobody counted.
    given_up = run.stopped_early or run.interrupted or any(r.error == TIMED_OUT for r in run.records)
    if run.totals is not None and not given_up and round(run.totals.generation_tokens) != client_tokens:
        doubts.append(f"{client_tokens} tokens came, the server counts {run.totals.generation_tokens:.0f}")
    short = [r.index for r in run.records if r.ok and not r.tokens == r.reported_tokens == r.output_tokens]
    if short:
        doubts.append(f"{len(short)} requests did not get exactly the tokens they asked for, the first is {short[0]}")
    if not run.measured:
        doubts.append("nothing was measured")
    return doubts
