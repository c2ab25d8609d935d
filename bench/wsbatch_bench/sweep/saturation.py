"""What a setting serves when the next batch is always waiting: the capacity that its rates are judged by."""

from dataclasses import replace
from math import inf

from wsbatch_bench.load.generator import LoadPlan
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.stability import MOST_SEGMENTS, BusyTime, Saturation, saturation
from wsbatch_bench.sweep.setting import Setting
from wsbatch_bench.sweep.stage import Stage


def when_full(setting: Setting) -> Setting:
    """The setting whose full batches are the same: nobody waits for company in front of a full queue."""
    options = tuple(option for option in setting.options if option[0] not in ("adaptive_wait", "wait_anchor"))
    return replace(setting, max_wait_ms=0.0, options=options)


def saturate(
    stage: Stage, setting: Setting, trace: Trace, measured: int, *, request_timeout_s: float = inf
) -> Saturation:
    """Measure it with twice as many clients as rows, each with its next request as soon as it has its answer.

    A closed loop has no drain: requests are counted while all clients are there, and after as many as there are have
    been answered.
    """
    size = setting.max_batch_size
    plan = LoadPlan(
        trace=replace(trace.longer(2 * size + measured), arrivals=f"closed:clients={2 * size}"),
        rate=1.0,
        warmup=2 * size,
        measured=measured,
        request_timeout_s=request_timeout_s,
    )
    run = stage.run(setting, plan)
    segments = max(4, min(MOST_SEGMENTS, measured // (2 * size)))
    found = saturation([record.ended_s for record in run.records if record.ok], *run.window_s, segments=segments)
    totals = run.window_totals
    if totals is None:
        return found
    issued, seconds = totals.issued_tokens, run.window_s[1] - run.window_s[0]
    return replace(found, busy=BusyTime(seconds, totals.steps, issued["decode"], issued["prefill"]))
