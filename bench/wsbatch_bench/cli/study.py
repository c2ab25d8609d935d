"""`wsbatch-bench study`: when does waiting help?"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from wsbatch.cli.parsing import BAD_USAGE, FAILED, Commands, add_parser, ending_with, say_error
from wsbatch.cli.streams import INTERRUPTED
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.cli.flags import (
    LONG_S,
    WORKLOAD_HELP,
    add_engine_flags,
    add_overwrite,
    add_request_timeout,
    add_requests,
    prepare_files,
    read_warmups,
    span,
)
from wsbatch_bench.load.results import plain
from wsbatch_bench.load.specs import Lengths, parse_arrivals, parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.numbers import BATCH
from wsbatch_bench.sweep.grid import Sweep
from wsbatch_bench.sweep.setting import Setting, check_costs, parse_costs, same_for_both
from wsbatch_bench.sweep.stage import RealStage, Stage, VirtualStage
from wsbatch_bench.sweep.study import (
    Scenario,
    Study,
    StudyRow,
    draw_study,
    run_study,
    studies,
    study_estimate_s,
    study_table,
)
from wsbatch_bench.trio_run import Unreachable

_DESCRIPTION = """\
Compare settings request by request on the same trace:
  waiting      four waits and continuous batching, under Poisson arrivals, fan-out bursts, a closed loop
  anchors      where the wait's clock starts: the oldest arrival, the idle server, the last arrival
  refinements  length buckets (the quartiles of the prompts), adaptive wait, early compaction
A change is certain where its 95 % interval does not hold zero.
"""

_EPILOG = f"""\
{WORKLOAD_HELP}
examples:
  wsbatch-bench study waiting --out study
  wsbatch-bench study anchors --engine real --model demo --costs costs.json --num-prompts 60
"""


def add_command(commands: Commands) -> None:
    """Add `study` to the command line."""
    parser = add_parser(commands, "study", help="when does waiting help?", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("study", choices=tuple(studies()), help="what to compare; see above")
    add_engine_flags(parser)
    parser.add_argument(
        "--costs",
        metavar="COSTS",
        help="step costs, as `sweep` takes them; with --engine real: predict each row in virtual time, too",
    )
    parser.add_argument(
        "--max-batch-size", type=BATCH.flag, default=8, metavar="N", help="most rows in a batch (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write table, JSON and chart there")
    add_overwrite(parser)
    add_request_timeout(parser)
    add_requests(parser, measured=1000).add_argument(
        "--arrivals", metavar="SPEC", help="use only these arrivals instead of the study's own; see arrivals below"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Job:
    """What the flags ask for, checked."""

    study: Study
    stage: Stage
    predictor: Stage | None
    prompts: Lengths
    outputs: Lengths
    warmup: int
    request_timeout_s: float


def run(arguments: argparse.Namespace) -> int:
    """Run the study; the exit status."""
    with ending_with(BAD_USAGE, ValueError, OSError):
        job = _read(arguments)
    rows: list[StudyRow] = []
    status = 0
    try:
        for row in _measure(arguments, job):
            rows.append(row)
            print(f"  {row.scenario}: {row.setting.label}: {row.change.value:+.1%}", file=sys.stderr)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (*Unreachable, RuntimeError) as error:
        say_error("wsbatch-bench study", error)
        status = FAILED
    if not rows:
        return status
    table = "\n".join(study_table(rows))
    print(table)
    if arguments.out is not None:
        _save(arguments, rows, table, job.study.title)
    return status


def _read(arguments: argparse.Namespace) -> _Job:
    """Raises ValueError or OSError."""
    size = arguments.max_batch_size
    costs = parse_costs(arguments.costs) if arguments.costs else None
    prompts, outputs = parse_lengths(arguments.prompt_lengths), parse_lengths(arguments.output_lengths)
    buckets = tuple(sorted({prompts.quantile(q) for q in (0.25, 0.5, 0.75)}))
    study = studies(size, buckets=buckets)[arguments.study]
    if arguments.arrivals is not None:
        parse_arrivals(arguments.arrivals)
        study = replace(study, scenarios=(Scenario(arguments.arrivals, arguments.arrivals),))
    if costs is not None:
        check_costs(costs, study.settings, name=arguments.costs)
    prepare_files(arguments, *_files(arguments.study))
    simulated = VirtualStage(costs or same_for_both(DEFAULT_COSTS))
    warmup = read_warmups(arguments, 1.0)
    if arguments.engine == "virtual":
        return _Job(study, simulated, None, prompts, outputs, warmup, inf)
    stage = RealStage(arguments.model, tuple(arguments.serve_flag))
    predictor = simulated if costs else None
    return _Job(study, stage, predictor, prompts, outputs, warmup, arguments.request_timeout_s)


def _measure(arguments: argparse.Namespace, job: _Job) -> Iterator[StudyRow]:
    capacity, measured, size = arguments.capacity, arguments.num_prompts, arguments.max_batch_size
    if capacity is None:
        trace = draw_trace(2 * measured, prompts=job.prompts, outputs=job.outputs, seed=arguments.seed)
        reference = Sweep(job.stage, trace, job.warmup, measured, request_timeout_s=job.request_timeout_s)
        capacity = reference.capacity(Setting("dynamic", size))
    takes_s = study_estimate_s(
        job.study,
        job.stage,
        capacity=capacity,
        outputs=job.outputs,
        requests=job.warmup + measured,
        predicted=job.predictor is not None,
    )
    runs = len(job.study.scenarios) * len(job.study.settings)
    print(f"reference rate: {capacity:.4g} requests/s, of dynamic b{size} with full batches")
    print(f"{runs} runs of {job.warmup + measured} requests: about {span(takes_s)}")
    if takes_s > LONG_S:
        fewer = max(1, int(measured * LONG_S / takes_s))
        print(f"shorter: --num-prompts {fewer}, or one --arrivals; Ctrl-C keeps what is measured")
    print(flush=True)
    yield from run_study(
        job.study,
        job.stage,
        capacity=capacity,
        prompts=job.prompts,
        outputs=job.outputs,
        warmup=job.warmup,
        measured=measured,
        seed=arguments.seed,
        predictor=job.predictor,
        request_timeout_s=job.request_timeout_s,
    )


def _files(study: str) -> list[str]:
    return [f"{study}.{kind}" for kind in ("md", "json", "png", "svg")]


def _save(arguments: argparse.Namespace, rows: list[StudyRow], table: str, title: str) -> None:
    out: Path = arguments.out
    name = arguments.study
    (out / f"{name}.md").write_text(table + "\n")
    data = plain([asdict(row) for row in rows])
    (out / f"{name}.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    draw_study(rows, [out / f"{name}.{kind}" for kind in ("png", "svg")], title=title)
    print(f"\nwritten to {out}: {name}.md, .json, .png, .svg")
