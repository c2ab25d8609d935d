"""Many requests at once, without sockets: tokens a second, where the time goes, and the limit of the machine."""

import argparse
import json
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any, NoReturn

from lab_tools.limits import ModelSizes, limit_s, measure_machine
from lab_tools.script import run_script, script_parser
from wsbatch.cli.parsing import say_error
from wsbatch.engine.open import make_scheduler
from wsbatch_bench.cli.flags import WORKLOAD_HELP, add_model_flags, add_workload, engine_config, read_costs, read_trace
from wsbatch_bench.load.trace import Trace
from wsbatch_bench.steps.bare_loop import BareModel, LoopRequest, LoopRun, load_bare, run_loop
from wsbatch_bench.steps.engine_run import run_engine

_DESCRIPTION = """\
Run all requests at once, in this process: output tokens a second; where a step's time goes
(linears, attention, the head, the rest of the model; the scheduler; hand-over to the model's thread
and delivery); and the limit that this machine's memory bandwidth and multiplication rate set.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
examples:
  python bench/lab/offline.py --model demo --dtype bfloat16
  python bench/lab/offline.py --model demo --dtype bfloat16 --scheduler dynamic --max-batch-size 32
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("offline", description=_DESCRIPTION, epilog=_EPILOG)
    add_model_flags(parser, scheduler="continuous")
    parser.add_argument("--max-batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefill-chunk-tokens", type=int, metavar="N", help="continuous: default: the server's")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="of the engine; the best counts (default: 2)")
    add_workload(parser, measured=64)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--workload-out", type=Path, metavar="FILE", help="write the prompts as JSON, for other programs"
    )
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    try:
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
        run_loop(bare.model, make_scheduler(config, now_s=0.0), requests[:4], clock=bare.clock)  # to warm up
        bare.breakdown_ms()
        loop = run_loop(bare.model, make_scheduler(config, now_s=0.0), requests, clock=bare.clock)
        parts = {name: ms / 1000 for name, ms in bare.breakdown_ms().items()}
        limit = _limit(bare, loop)
        served = min(run_engine(config, requests, costs=costs, runs=arguments.runs), key=lambda each: each.total_s)
    except (ValueError, OSError) as error:
        say_error("offline.py", error)
        return 2
    figures: dict[str, Any] = {
        "model": bare.description,
        "scheduler": arguments.scheduler,
        "max_batch_size": arguments.max_batch_size,
        "trace_sha256": trace.sha256,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "output_tokens": served.output_tokens,
        "engine_s": served.total_s,
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
        **limit,
    }
    print("\n".join(_lines(figures)))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


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
    steps = figures["steps"]
    lines = [
        figures["model"],
        f"{figures['requests']} requests at once: {figures['prompt_tokens']:,} prompt and {figures['output_tokens']:,} "
        f"output tokens; {figures['scheduler']}, at most {figures['max_batch_size']} rows",
        "",
        f"engine     {figures['engine_tokens_per_s']:7.1f} output tokens/s ({figures['engine_s']:.2f} s)",
        f"bare loop  {figures['bare_loop_tokens_per_s']:7.1f} output tokens/s ({figures['bare_loop_s']:.2f} s)",
    ]
    if "limit_s" in figures:
        lines.append(
            f"limit      {figures['limit_tokens_per_s']:7.1f} output tokens/s, from {figures['read_gb_per_s']:.1f} "
            f"GB/s and {figures['gemm_gflops']:.0f} GFLOP/s measured here: the engine reaches "
            f"{figures['limit_s'] / figures['engine_s']:.0%}"
        )
    lines += [
        "",
        f"steps with prefill  {steps['with_prefill']:5} in {steps['with_prefill_s']:.2f} s, "
        f"{steps['ms_a_prompt_token']:.2f} ms a prompt token (decodes beside it included)",
        f"decode steps        {steps['decode']:5} in {steps['decode_s']:.2f} s",
    ]
    if steps["decode_alone"]:
        lines.append(f"  of them alone     {steps['decode_alone']:5}, {steps['ms_a_step_alone']:.2f} ms each")
    lines.append("")
    for whole, parts, name in (
        ("engine_s", "engine_parts_s", "of the engine's time"),
        ("bare_loop_s", "bare_loop_parts_s", "of the bare loop's"),
    ):
        lines.append(f"{name:36} {figures[whole]:8.2f} s")
        lines += [f"  {part:34} {value:8.2f} s {value / figures[whole]:6.1%}" for part, value in figures[parts].items()]
    return lines


if __name__ == "__main__":
    main()
