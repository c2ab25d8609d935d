"""`wsbatch-bench study`: when does waiting help?"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from wsbatch.cli.parsing import Commands, add_parser, say_error
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.cli.flags import add_requests, read_warmups
from wsbatch_bench.load.results import plain
from wsbatch_bench.load.specs import parse_arrivals, parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.numbers import BATCH, RATE
from wsbatch_bench.sweep.grid import Sweep
from wsbatch_bench.sweep.setting import Setting, parse_costs, same_for_both
from wsbatch_bench.sweep.stage import RealStage, Stage, VirtualStage
from wsbatch_bench.sweep.study import Scenario, StudyRow, draw_study, run_study, studies, study_table

_DESCRIPTION = """\
Compare settings request by request on the same trace:
  waiting      four waits and continuous batching, under Poisson arrivals, fan-out bursts, a closed loop
  anchors      where the wait's clock starts: the oldest arrival, the idle server, the last arrival
  refinements  length buckets (the quartiles of the prompts), adaptive wait, early compaction
A change is certain where its 95 % interval does not hold zero.
"""

_EPILOG = """\
examples:
  wsbatch-bench study waiting --out study
  wsbatch-bench study anchors --engine real --model demo --costs costs.json --num-prompts 60
"""


def add_command(commands: Commands) -> None:
    """Add `study` to the command line."""
    parser = add_parser(commands, "study", help="when does waiting help?", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("study", choices=tuple(studies()))
    parser.add_argument("--engine", choices=("virtual", "real"), default="virtual", help="default: %(default)s")
    parser.add_argument("--costs", metavar="COSTS", help="as of `sweep`; real: predict each row, too")
    parser.add_argument("--model", default="demo", metavar="TEXT", help="real: as `wsbatch serve` takes it")
    parser.add_argument("--serve-flag", action="append", default=[], metavar="FLAG", help="real: one more flag of it")
    parser.add_argument("--max-batch-size", type=BATCH.flag, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--capacity", type=RATE.flag, metavar="R", help="the reference rate, requests/s (default: it is measured first)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write table, JSON and chart there")
    add_requests(parser, measured=1000).add_argument(
        "--arrivals", metavar="SPEC", help="these alone, instead of the study's own; as of `load`"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the study; the exit status."""
    try:
        costs = parse_costs(arguments.costs) if arguments.costs else None
        prompts, outputs = parse_lengths(arguments.prompt_lengths), parse_lengths(arguments.output_lengths)
        if arguments.arrivals is not None:
            parse_arrivals(arguments.arrivals)
    except (ValueError, OSError) as error:
        say_error("wsbatch-bench study", error)
        return 2
    stage: Stage = VirtualStage(costs or same_for_both(DEFAULT_COSTS))
    predictor: Stage | None = None
    if arguments.engine == "real":
        stage, predictor = RealStage(arguments.model, tuple(arguments.serve_flag)), stage if costs else None
    warmup = read_warmups(arguments, 1.0)
    capacity = arguments.capacity
    if capacity is None:
        trace = draw_trace(2 * arguments.num_prompts, prompts=prompts, outputs=outputs, seed=arguments.seed)
        reference = Setting("dynamic", arguments.max_batch_size)
        capacity = Sweep(stage, trace, warmup, arguments.num_prompts).capacity(reference)
    print(f"reference rate: {capacity:.4g} requests/s, of dynamic b{arguments.max_batch_size} with full batches\n")
    buckets = tuple(sorted({prompts.quantile(q) for q in (0.25, 0.5, 0.75)}))
    study = studies(arguments.max_batch_size, buckets=buckets)[arguments.study]
    if arguments.arrivals is not None:
        study = replace(study, scenarios=(Scenario(arguments.arrivals, arguments.arrivals),))
    rows = run_study(
        study,
        stage,
        capacity=capacity,
        prompts=prompts,
        outputs=outputs,
        warmup=warmup,
        measured=arguments.num_prompts,
        seed=arguments.seed,
        predictor=predictor,
        on_row=lambda row: print(f"  {row.scenario}: {row.setting.label}: {row.change.value:+.1%}", file=sys.stderr),
    )
    table = "\n".join(study_table(rows))
    print(table)
    if arguments.out is not None:
        _save(arguments, rows, table, study.title)
    return 0


def _save(arguments: argparse.Namespace, rows: list[StudyRow], table: str, title: str) -> None:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    name = arguments.study
    (out / f"{name}.md").write_text(table + "\n")
    data = plain([asdict(row) for row in rows])
    (out / f"{name}.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    draw_study(rows, [out / f"{name}.{kind}" for kind in ("png", "svg")], title=title)
    print(f"\nwritten to {out}: {name}.md, .json, .png, .svg")
