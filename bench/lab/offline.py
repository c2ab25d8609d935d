"""Many requests at once, without sockets: tokens a second, where the time goes, and the limit of the machine."""

import argparse
import json
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, NoReturn

from lab_tools.limits import ModelSizes, limit_s, measure_machine
from lab_tools.script import run_script, script_parser
from wsbatch.cli.parsing import BAD_USAGE, ending_with
from wsbatch.engine.open import make_scheduler
from wsbatch_bench.cli.flags import (
    WORKLOAD_HELP,
    add_model_flags,
    add_sampling,
    add_workload,
    engine_config,
    read_costs,
    read_sampling,
    read_trace,
)
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.sampling import GREEDY, shown
from wsbatch_bench.steps.bare_loop import BareModel, LoopRequest, LoopRun, load_bare, run_loop, sampled
from wsbatch_bench.steps.engine_run import EngineRun, run_engine

_DESCRIPTION = """\
Run all requests at once, in this process, greedy and sampled in turn: output tokens a second; where a step's time goes
(linears, attention, the head, the rest of the model; the scheduler; hand-over to the model's thread
and delivery); and the limit that this machine's memory bandwidth and multiplication rate set.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
examples:
  python bench/lab/offline.py --model demo --dtype bfloat16
  python bench/lab/offline.py --model demo --dtype bfloat16 --scheduler dynamic --max-batch-size 32
"""

_STEP_FIGURES = {
    "with_prefill": "steps with prefill",
    "with_prefill_s": "  seconds, decodes beside it included",
    "ms_a_prompt_token": "  ms a prompt token",
    "decode": "decode steps",
    "decode_s": "  seconds",
    "decode_alone": "  of one row",
    "ms_a_step_alone": "  ms each",
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("offline", description=_DESCRIPTION, epilog=_EPILOG)
    add_model_flags(parser, scheduler="continuous")
    parser.add_argument("--max-batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefill-chunk-tokens", type=int, metavar="N", help="continuous: default: the server's")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="of the engine; the best counts (default: 2)")
    add_workload(parser, measured=64)
    add_sampling(parser, beside=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--workload-out", type=Path, metavar="FILE", help="write the prompts as JSON, for other programs"
    )
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        trace = read_trace(arguments, rescaled=False)
        requests = _requests(trace, arguments.num_prompts)
        if arguments.workload_out is not None:
            workload = [{"prompt_ids": r.prompt_ids, "max_tokens": r.output_tokens} for r in requests]
            arguments.workload_out.write_text(json.dumps(workload) + "\n")
        costs = read_costs(arguments)[arguments.scheduler]
        chunk = (
            {} if arguments.prefill_chunk_tokens is None else {"prefill_chunk_tokens": arguments.prefill_chunk_tokens}
        )
        config = engine_config(
            arguments,
            max_batch_size=arguments.max_batch_size,
            max_queue_requests=len(requests),
            max_queue_tokens=sum(len(request.prompt_ids) for request in requests),
            queue_timeout_ms=86_400_000,
            **chunk,
        )
        bare = load_bare(config, costs=costs)
        sampling = read_sampling(arguments)
        workloads = {"greedy": requests} | (
            {} if sampling == GREEDY else {shown(sampling): sampled(requests, sampling)}
        )
        loops = {}
        for name, workload in workloads.items():
            run_loop(bare.model, make_scheduler(config, now_s=0.0), workload[:4], clock=bare.clock)  # to warm up
            bare.breakdown_ms()
            loop = run_loop(bare.model, make_scheduler(config, now_s=0.0), workload, clock=bare.clock)
            loops[name] = loop, {part: ms / 1000 for part, ms in bare.breakdown_ms().items()}
        limit = _limit(bare, loops["greedy"][0])
        runs = run_engine(config, [*workloads.values()] * arguments.runs, costs=costs)
    figures: dict[str, Any] = {
        "model": bare.description,
        "scheduler": arguments.scheduler,
        "max_batch_size": arguments.max_batch_size,
        "trace_sha256": trace.sha256,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "columns": {
            name: _column(min(runs[index :: len(workloads)], key=lambda each: each.total_s), *loops[name])
            for index, name in enumerate(workloads)
        },
        **limit,
    }
    print("\n".join(_lines(figures)))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _column(served: EngineRun, loop: LoopRun, parts: dict[str, float]) -> dict[str, Any]:
    """The figures of one way to choose tokens."""
    return {
        "engine_s": served.total_s,
        "engine_cpu_s": served.cpu_s,
        "engine_tokens_per_s": served.output_tokens / served.total_s,
        "bare_loop_s": loop.total_s,
        "bare_loop_tokens_per_s": loop.output_tokens / loop.total_s,
        "bare_loop_parts_s": {
            **parts,
            "model, not told apart": max(0.0, loop.model_s - sum(parts.values())),
            "scheduler": max(0.0, loop.total_s - loop.model_s),
        },
        "engine_parts_s": {
            "model": served.model_s,
            "scheduler, hand-over and delivery": max(0.0, served.total_s - served.model_s),
        },
        "steps": _steps(loop),
    }


def _requests(trace: Trace, count: int) -> list[LoopRequest]:
    entries = trace.entries[:count]
    return [
        LoopRequest(trace.prompt_ids(index, entry.prompt_tokens), entry.output_tokens)
        for index, entry in enumerate(entries)
    ]


def _limit(bare: BareModel, loop: LoopRun) -> dict[str, float]:
    if bare.module is None:
        return {}
    rates = measure_machine(str(bare.module.dtype).removeprefix("torch."))
    seconds = limit_s(loop, ModelSizes.of(bare.module), rates)
    return {
        "read_gb_per_s": rates.read_bytes_per_s / 1e9,
        "gemm_gflops": rates.gemm_flops_per_s / 1e9,
        "limit_s": seconds,
        "limit_tokens_per_s": loop.output_tokens / seconds,
    }


def _steps(loop: LoopRun) -> dict[str, float]:
    prefill = [step.end_s - step.start_s for step in loop.steps if step.cost.prefill_tokens]
    decode = [step.end_s - step.start_s for step in loop.steps if not step.cost.prefill_tokens]
    alone = [step.end_s - step.start_s for step in loop.steps if step.cost.decode_slots == step.cost.rows == 1]
    prompt = sum(step.cost.prefill_tokens for step in loop.steps)
    return {
        "with_prefill": len(prefill),
        "with_prefill_s": sum(prefill),
        "ms_a_prompt_token": 1000 * sum(prefill) / prompt if prompt else nan,
        "decode": len(decode),
        "decode_s": sum(decode),
        "decode_alone": len(alone),
        "ms_a_step_alone": 1000 * sum(alone) / len(alone) if alone else nan,
    }


def _lines(figures: dict[str, Any]) -> list[str]:
    columns: dict[str, dict[str, Any]] = figures["columns"]
    greedy = columns["greedy"]
    lines = [
        figures["model"],
        f"{figures['requests']} requests at once: {figures['prompt_tokens']:,} prompt and {figures['output_tokens']:,} "
        f"output tokens; {figures['scheduler']}, at most {figures['max_batch_size']} rows",
        "",
        _row("", list(columns)),
        _row("engine, output tokens/s", [f"{each['engine_tokens_per_s']:.1f}" for each in columns.values()]),
        _row("bare loop, output tokens/s", [f"{each['bare_loop_tokens_per_s']:.1f}" for each in columns.values()]),
        _row("engine, to greedy", [f"{greedy['engine_s'] / each['engine_s']:.2f}" for each in columns.values()]),
        _row("engine, seconds of CPU", [f"{each['engine_cpu_s']:.2f}" for each in columns.values()]),
    ]
    if "limit_s" in figures:
        lines.append(
            f"limit {figures['limit_tokens_per_s']:.1f} output tokens/s, from {figures['read_gb_per_s']:.1f} "
            f"GB/s and {figures['gemm_gflops']:.0f} GFLOP/s measured here: the engine reaches "
            f"{figures['limit_s'] / greedy['engine_s']:.0%}, greedy"
        )
    lines.append("")
    for name, unit in _STEP_FIGURES.items():
        values = [each["steps"][name] for each in columns.values()]
        if not any(map(isnan, values)):
            lines.append(_row(unit, [f"{value:,}" if isinstance(value, int) else f"{value:.2f}" for value in values]))
    for whole, parts, name in (
        ("engine_s", "engine_parts_s", "of the engine's time"),
        ("bare_loop_s", "bare_loop_parts_s", "of the bare loop's"),
    ):
        lines += ["", _row(name, [f"{each[whole]:.2f} s" for each in columns.values()])]
        for part in greedy[parts]:
            shares = [(each[parts][part], each[parts][part] / each[whole]) for each in columns.values()]
            lines.append(_row(f"  {part}", [f"{seconds:.2f} s {share:6.1%}" for seconds, share in shares]))
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:36}" + "".join(f"{cell:>28}" for cell in cells)


if __name__ == "__main__":
    main()
