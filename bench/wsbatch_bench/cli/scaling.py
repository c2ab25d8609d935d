"""`wsbatch-bench scaling`: a step's time against the batch size."""

import argparse
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wsbatch.batching.costs import CostModel
from wsbatch.cli.parsing import BAD_USAGE, Commands, add_parser, ending_with
from wsbatch.engine.open import make_scheduler
from wsbatch.messages import SamplingParams
from wsbatch_bench.cli.flags import (
    add_model_flags,
    add_overwrite,
    add_sampling,
    engine_config,
    prepare_files,
    read_costs,
    read_sampling,
    sizes,
)
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.numbers import TOKENS, Number
from wsbatch_bench.sampling import GREEDY, shown
from wsbatch_bench.steps.bare_loop import load_bare
from wsbatch_bench.steps.engine_run import run_engine
from wsbatch_bench.steps.scaling import Scaling, batch_requests, draw_scaling, measure_scaling
from wsbatch_bench.sweep.setting import Setting, check_costs, parse_costs

_LARGEST_CHUNK = 4096

_DESCRIPTION = """\
Measure how long a decode step takes at each batch size, in this process: tokens a second,
speed-up, efficiency, the knee, and the line tau + alpha * rows + beta * prompt tokens with its
95 % intervals; greedy and, in turn with it, sampled. The largest batch is run through the
server's own loop, too, and its tokens are compared. --out keeps a file of step costs for
`sweep --costs`; running both schedulers into one directory puts both into it.
"""

_EPILOG = """\
examples:
  wsbatch-bench scaling --model demo --out scaling
  wsbatch-bench scaling --model demo --scheduler continuous --prompt-tokens 300 --out scaling
  wsbatch-bench scaling --model simulated --costs tau_ms=10,alpha_ms=1,beta_ms=0.5
"""


def add_command(commands: Commands) -> None:
    """Add `scaling` to the command line."""
    parser = add_parser(
        commands, "scaling", help="a step's time against the batch size", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_model_flags(parser, scheduler="dynamic")
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=(1, 2, 4, 8, 16, 32),
        metavar="N,N",
        help="batch sizes to measure (default: 1,2,4,8,16,32)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=TOKENS.flag,
        default=200,
        metavar="N",
        help="tokens in each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens",
        type=TOKENS.flag,
        default=24,
        metavar="N",
        help="tokens that each row generates (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=Number(1, 10_000, whole=True).flag,
        default=3,
        metavar="N",
        help="how often each size is measured (default: %(default)s)",
    )
    parser.add_argument(
        "--efficiency",
        type=Number(0, 1, above=True).flag,
        default=0.5,
        metavar="X",
        help="efficiency below which a batch size is past the knee (default: 0.5)",
    )
    add_sampling(parser, beside=True)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time steps by the CPU that all threads use: other work on the machine moves it less",
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not run the server's loop")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write CSV, costs and the chart there")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 3 where the server's loop gives other tokens."""
    sizes: tuple[int, ...] = arguments.sizes
    prompt_tokens, output_tokens = arguments.prompt_tokens, arguments.output_tokens
    with ending_with(BAD_USAGE, ValueError, OSError):
        prepare_files(arguments, f"scaling-{arguments.scheduler}.csv")
        known = _known_costs(arguments.out)
        own = read_costs(arguments)
        check_costs(own, [Setting(arguments.scheduler, 1)], name=arguments.costs)
        costs = own[arguments.scheduler]
        if arguments.cpu_time and arguments.model == "simulated":
            raise ValueError("--cpu-time with the simulated model: its steps take no CPU")
        sampling = read_sampling(arguments)
        description, scalings = measure_model(
            arguments,
            arguments.scheduler,
            costs,
            sizes=sizes,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rounds=arguments.rounds,
            samplings=[GREEDY] if sampling == GREEDY else [GREEDY, sampling],
            cpu_time=arguments.cpu_time,
        )
    scaling, beside = scalings[0], scalings[1] if len(scalings) > 1 else None
    print("\n".join([description, "", *_lines(scaling, arguments.efficiency)]))
    if beside is not None:
        print("\n".join(["", *_beside_lines(scaling, beside, shown(sampling))]))
    if arguments.out is not None:
        _save(arguments, scalings, sampling, description, known)
    if not arguments.check:
        return 0
    largest = max(sizes)
    requests = batch_requests(largest, prompt_tokens, output_tokens, draw_trace(1).prompt_ids)
    served = run_engine(engine_config(arguments, max_batch_size=largest), [requests], costs=costs)[0]
    same = sum(ours == theirs for ours, theirs in zip(scaling.outputs[largest], served.outputs, strict=True))
    print(f"\nthe server's loop gives the same tokens in {same} of {largest} rows")
    return 0 if same == largest else 3


def measure_model(
    arguments: argparse.Namespace,
    scheduler: str,
    costs: CostModel,
    *,
    sizes: tuple[int, ...],
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    samplings: Sequence[SamplingParams] = (GREEDY,),
    cpu_time: bool = False,
) -> tuple[str, list[Scaling]]:
    """Load the model that the flags name, and measure it under this scheduler: its description, and a curve for each.

    `costs` are the simulated model's. Raises ValueError or OSError.
    """
    largest = max(sizes)
    # Rows of the largest batch must fit a paged pool all at once.
    config = engine_config(
        arguments,
        scheduler=scheduler,
        max_batch_size=largest,
        max_batch_total_tokens=max(32_768, 2 * largest * (2 * prompt_tokens + output_tokens)),
        # Rows must not end before the last of them decodes: prompts go in few steps, of a size that memory holds.
        prefill_chunk_tokens=_LARGEST_CHUNK,
        max_batch_prefill_tokens=_LARGEST_CHUNK,
    )
    bare = load_bare(config, costs=costs)
    scalings = measure_scaling(
        bare.model,
        lambda size: make_scheduler(replace(config, max_batch_size=size), now_s=0.0),
        sizes=sizes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        clock=time.process_time if cpu_time else bare.clock,
        make_prompt=draw_trace(1).prompt_ids,
        samplings=samplings,
    )
    return f"{bare.description}{', seconds of CPU' if cpu_time else ''}", scalings


def _lines(scaling: Scaling, efficiency: float) -> list[str]:
    lines = [f"{'batch':>6} {'step ms':>9} {'fitted':>9} {'tokens/s':>9} {'speed-up':>9} {'efficiency':>11}"]
    lines += [
        f"{point.batch:6} {1000 * point.step_s:9.2f} {1000 * scaling.fit.decode_s(point.batch):9.2f} "
        f"{point.goodput:9.1f} {point.speedup:9.2f} {point.efficiency:11.1%}"
        for point in scaling.points
    ]
    fit = scaling.fit
    lines.append("")
    for name, interval in (("tau", fit.tau_s), ("alpha", fit.alpha_s), ("beta", fit.beta_s)):
        lines.append(
            f"{name:6} {1000 * interval.value:9.3f} ms  (95 %: {1000 * interval.low:.3f} … {1000 * interval.high:.3f})"
        )
    lines.append(f"the line is off by {fit.rms_error:.1%} (root mean square, relative)")
    knee = scaling.knee(efficiency)
    alpha = fit.alpha_s.value
    ratio = f"{fit.tau_s.value / alpha:.0f}" if alpha > 0 else "∞"
    lines.append(f"knee   {knee}: the largest measured size with efficiency ≥ {efficiency:.0%}; tau/alpha = {ratio}")
    return lines


def _beside_lines(greedy: Scaling, beside: Scaling, name: str) -> list[str]:
    """The other curve, each size over greedy's."""
    lines = [f"{name}", f"{'batch':>6} {'step ms':>9} {'to greedy':>9} {'tokens/s':>9} {'efficiency':>11}"]
    lines += [
        f"{point.batch:6} {1000 * point.step_s:9.2f} {point.step_s / first.step_s:8.2f}× {point.goodput:9.1f} "
        f"{point.efficiency:11.1%}"
        for first, point in zip(greedy.points, beside.points, strict=True)
    ]
    costs = zip(("tau", "alpha", "beta"), (beside.fit.tau_s, beside.fit.alpha_s, beside.fit.beta_s), strict=True)
    return [*lines, "", ", ".join(f"{cost} {1000 * interval.value:.3f} ms" for cost, interval in costs)]


def _known_costs(out: Path | None) -> dict[str, Any]:
    """What the folder's file of costs holds, of the other scheduler perhaps. Raises ValueError or OSError."""
    path = None if out is None else out / "costs.json"
    if path is None or not path.exists():
        return {}
    known: dict[str, Any] = json.loads(path.read_text())
    parse_costs(str(path))
    return known


def _save(
    arguments: argparse.Namespace,
    scalings: Sequence[Scaling],
    sampling: SamplingParams,
    description: str,
    known: dict[str, Any],
) -> None:
    scaling = scalings[0]
    out: Path = arguments.out
    name = arguments.scheduler
    with (out / f"scaling-{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sampling", "batch", "step_s", "fitted_s", "goodput", "speedup", "efficiency"])
        for each, how in zip(scalings, (GREEDY, sampling), strict=False):
            for point in each.points:
                values = (point.step_s, each.fit.decode_s(point.batch), point.goodput, point.speedup, point.efficiency)
                writer.writerow([shown(how), point.batch, *(f"{value:.6g}" for value in values)])
    path = out / "costs.json"
    fit = scaling.fit
    known[name] = {key: getattr(fit.costs, key) for key in ("tau_s", "alpha_s", "beta_s")} | {
        "intervals": {key: [getattr(fit, key).low, getattr(fit, key).high] for key in ("tau_s", "alpha_s", "beta_s")},
        "rms_error": fit.rms_error,
        "model": description,
        "prompt_tokens": arguments.prompt_tokens,
    }
    if len(scalings) > 1:
        known[name]["sampled"] = {"temperature": sampling.temperature, "top_p": sampling.top_p} | asdict(
            scalings[1].fit.costs
        )
    path.write_text(json.dumps(known, indent=1) + "\n")
    draw_scaling(
        scaling, [out / f"scaling-{name}.{kind}" for kind in ("png", "svg")], efficiency=arguments.efficiency,
        title=f"{description}: prompts of {arguments.prompt_tokens} tokens",
    )  # fmt: skip
    print(f"\nwritten to {out}: scaling-{name}.csv, .png, .svg; costs.json")
