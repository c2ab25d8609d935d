"""A run as the JSON that vLLM's `bench serve --save-result` writes, so that its readers read this too.

What vLLM has no name for stands under `wsbatch`. Infinite values (failures counted in) are null.
"""

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite, isinf
from statistics import fmean, median, pstdev
from typing import Any

from wsbatch_bench.load import LoadRun
from wsbatch_bench.quantiles import observed_quantile
from wsbatch_bench.summary import Summary


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
    gaps = [gap for record in measured for gap in record.gaps_s]
    for name, values in (
        ("ttft", [record.ttft_s for record in measured]),
        ("tpot", [record.tpot_s for record in measured]),
        ("itl", gaps),
        ("e2el", [record.e2e_s for record in measured]),
    ):
        result |= _statistics(name, values)
    result["wsbatch"] = asdict(summary) | {
        "trace_sha256": run.plan.trace.sha256,
        "arrivals": run.plan.trace.arrivals,
        "prompts": run.plan.trace.prompts,
        "outputs": run.plan.trace.outputs,
        "seed": run.plan.trace.seed,
        "warmup": run.plan.warmup,
        "sent_in_all": len(run.records),
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
