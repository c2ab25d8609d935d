"""`wsbatch-bench static`: what a batch run to completion costs."""

import argparse
import csv
import json
import re
from dataclasses import asdict
from pathlib import Path

from wsbatch.cli.parsing import BAD_USAGE, Commands, add_parser, ending_with
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
from wsbatch_bench.load.specs import DEFAULT_OUTPUTS, Lengths, parse_lengths
from wsbatch_bench.load.trace import Trace, draw_trace
from wsbatch_bench.numbers import BATCH, COUNT, SEED, TOKENS
from wsbatch_bench.sampling import GREEDY
from wsbatch_bench.steps.bare_loop import BareModel, LoopRequest, load_bare, sampled
from wsbatch_bench.steps.static_batch import BatchCost, draw_timeline, draw_waste, measure_batches, pooled_waste
from wsbatch_bench.sweep.setting import Setting, check_costs

_DESCRIPTION = """\
Account for batches that run to completion, in this process: decode slots issued and useful, and
for each row how long its slot, and a whole answer, were held after its own end. First a stated
batch (by default seven rows of 4 tokens behind one of 32), under both schedulers; then batches of
drawn lengths, against the theory 1 - E[L] / E[max of b L]. Rows stop on a step budget, so that
sampling changes times and not slots: the stated batch is run greedy and sampled, in turn.
"""

_EPILOG = """\
examples:
  wsbatch-bench static --model demo --out static
  wsbatch-bench static --model demo --output-lengths lognormal:median=20,sigma=0.9,max=200 --out static
  wsbatch-bench static --model simulated --rows 15x10,1x500
"""


def add_command(commands: Commands) -> None:
    """Add `static` to the command line."""
    parser = add_parser(
        commands, "static", help="what a batch run to completion costs", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_model_flags(parser, scheduler=None)
    parser.add_argument(
        "--rows",
        type=_rows,
        default=_rows("7x4,1x32"),
        metavar="NxL,…",
        help="rows of the stated batch, as number x output tokens (default: 7x4,1x32)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=TOKENS.flag,
        default=32,
        metavar="N",
        help="tokens in the prompt of every row (default: 32)",
    )
    parser.add_argument(
        "--output-lengths",
        type=_lengths,
        default=DEFAULT_OUTPUTS,
        metavar="SPEC",
        help="how the output lengths of the drawn batches are drawn, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=(2, 4, 8, 16, 32),
        metavar="N,N",
        help="sizes of the drawn batches (default: 2,4,8,16,32)",
    )
    parser.add_argument(
        "--requests",
        type=COUNT.flag,
        default=128,
        metavar="N",
        help="number of requests drawn for each size (default: 128)",
    )
    parser.add_argument("--seed", type=SEED.flag, default=0, metavar="N", help="seed of the random draws (default: 0)")
    add_sampling(parser, beside=True)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write CSV, JSON and charts there")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    sampling = read_sampling(arguments)
    with ending_with(BAD_USAGE, ValueError, OSError):
        prepare_files(arguments, "static.csv", "static.json")
        costs = read_costs(arguments)
        check_costs(costs, [Setting(name, 1) for name in ("dynamic", "continuous")], name=arguments.costs)
        config = engine_config(arguments, scheduler="dynamic")
        bare = load_bare(config, costs=costs["dynamic"])
        prompts = draw_trace(1, seed=arguments.seed)
        rows = _requests(prompts, arguments.rows, arguments.prompt_tokens)
        print(f"{bare.description}\n")
        dynamic, beside = _stated(bare, rows, "dynamic", sampling)
        print("\n".join(_batch_lines("dynamic", dynamic, beside)))
        drawn = _drawn(arguments, prompts)
        measured = {
            size: measure_batches(bare.model, drawn, Setting("dynamic", size), clock=bare.clock)
            for size in arguments.sizes
        }
        paged = load_bare(engine_config(arguments, scheduler="continuous"), costs=costs["continuous"])
        continuous, beside = _stated(paged, rows, "continuous", sampling)
    print("\n".join(_batch_lines("continuous", continuous, beside)))
    print("\n".join(_size_lines(measured, arguments.output_lengths)))
    if arguments.out is not None:
        _save(arguments, bare.description, {"dynamic": dynamic, "continuous": continuous}, measured)
    return 0


def _drawn(arguments: argparse.Namespace, prompts: Trace) -> list[LoopRequest]:
    # Whole batches only, of every size.
    count = max(arguments.sizes) * max(1, arguments.requests // max(arguments.sizes))
    lengths = draw_trace(count, outputs=arguments.output_lengths, seed=arguments.seed).entries
    return _requests(prompts, [entry.output_tokens for entry in lengths], arguments.prompt_tokens)


def _requests(prompts: Trace, outputs: list[int], prompt_tokens: int) -> list[LoopRequest]:
    return [LoopRequest(prompts.prompt_ids(index, prompt_tokens), tokens) for index, tokens in enumerate(outputs)]


def _stated(
    bare: BareModel, rows: list[LoopRequest], scheduler: str, sampling: SamplingParams
) -> tuple[BatchCost, BatchCost | None]:
    """The stated batch, greedy and sampled; each has run once before, to warm up."""
    choices = [GREEDY] if sampling == GREEDY else [GREEDY, sampling]
    setting = Setting(scheduler, len(rows))
    for _ in range(2):
        costs = [measure_batches(bare.model, sampled(rows, each), setting, clock=bare.clock)[0] for each in choices]
    return costs[0], costs[1] if len(costs) > 1 else None


def _batch_lines(name: str, batch: BatchCost, beside: BatchCost | None) -> list[str]:
    lines = [
        f"{name}: {len(batch.rows)} rows, {batch.seconds:.3f} s, of them prefill {batch.prefill_s:.3f} s",
    ]
    if beside is not None:
        lines.append(
            f"  sampled            {beside.seconds:.3f} s, of them prefill {beside.prefill_s:.3f} s; "
            f"max_hol_inflation {beside.max_hol_inflation:.2f}×"
        )
    lines += [
        f"  decode slots       {batch.issued_slots} issued, {batch.useful_slots} useful: "
        f"{batch.waste_fraction:.1%} wasted",
        f"  {'row':>5} {'tokens':>7} {'own end':>9} {'hol_delay_s':>12} {'hol_inflation':>14}",
    ]
    lines += [
        f"  {index:5} {row.output_tokens:7} {row.ended_s:7.3f} s {row.hol_delay_s:12.3f} {row.hol_inflation:13.2f}×"
        for index, row in enumerate(batch.rows)
    ]
    return [*lines, f"  max_hol_inflation  {batch.max_hol_inflation:.2f}×", ""]


def _size_lines(measured: dict[int, list[BatchCost]], lengths: Lengths) -> list[str]:
    lines = [
        f"drawn outputs: {lengths.spec}",
        f"{'batch':>6} {'issued':>8} {'useful':>8} {'waste':>7} {'theory':>7}   {'hol_inflation p50/p95/max':>26}   "
        f"{'hol_delay_s p50/p95/max':>24}",
    ]
    for size, batches in measured.items():
        issued, useful = (sum(getattr(batch, name) for batch in batches) for name in ("issued_slots", "useful_slots"))
        pooled = BatchCost(tuple(row for batch in batches for row in batch.rows), 0.0, 0.0, issued, useful, 0, 0)
        inflation = "/".join(f"{pooled.inflation(q):.2f}" for q in (0.5, 0.95, 1.0))
        delay = "/".join(f"{pooled.delay_s(q):.2f}" for q in (0.5, 0.95, 1.0))
        lines.append(
            f"{size:6} {issued:8} {useful:8} {pooled_waste(batches):7.1%} {lengths.padded_waste(size):7.1%}   "
            f"{inflation:>26}   {delay:>24}"
        )
    return lines


def _save(
    arguments: argparse.Namespace, description: str, stated: dict[str, BatchCost], measured: dict[int, list[BatchCost]]
) -> None:
    out: Path = arguments.out
    with (out / "static.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["size", "batch", "output_tokens", "ended_s", "hol_delay_s", "hol_inflation", "waste_fraction"])
        for size, batches in measured.items():
            for number, batch in enumerate(batches):
                for row in batch.rows:
                    values = (row.ended_s, row.hol_delay_s, row.hol_inflation, batch.waste_fraction)
                    writer.writerow([size, number, row.output_tokens, *(f"{value:.6g}" for value in values)])
    (out / "static.json").write_text(
        json.dumps(
            {"model": description, "outputs": arguments.output_lengths.spec}
            | {name: asdict(batch) for name, batch in stated.items()},
            indent=1,
        )
        + "\n"
    )
    for name, batch in stated.items():
        paths = [out / f"timeline-{name}.{kind}" for kind in ("png", "svg")]
        draw_timeline(batch, paths, title=f"{name} ({description.split(',')[0]})")
    draw_waste(
        measured,
        {size: arguments.output_lengths.padded_waste(size) for size in measured},
        [out / f"waste.{kind}" for kind in ("png", "svg")],
        title=f"outputs {arguments.output_lengths.spec}",
    )
    print(f"\nwritten to {out}: static.csv, static.json, timeline-dynamic, timeline-continuous, waste (.png, .svg)")


def _rows(text: str) -> list[int]:
    rows: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)x(\w+)", part.strip())
        if found is None:
            raise argparse.ArgumentTypeError(f"{part[:60]!r} must be ROWSxTOKENS, such as 7x4")
        rows += [int(TOKENS.flag(found[2]))] * int(BATCH.flag(found[1]))
    return rows


def _lengths(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
