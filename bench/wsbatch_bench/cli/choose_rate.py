"""`wsbatch-bench choose --rate`: the cheapest setting that carries a stated rate within an SLO."""

import argparse
import json
from collections.abc import Sequence
from math import ceil

from wsbatch.cli.parsing import FAILED, Parser, ending_with
from wsbatch.cli.streams import INTERRUPTED
from wsbatch.model.conversion import cache_dir
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.cli.flags import add_model_flags, add_request_timeout, add_workload, span
from wsbatch_bench.cli.plan import read_workload
from wsbatch_bench.cli.scaling import measure_model
from wsbatch_bench.numbers import RATE, Number
from wsbatch_bench.plan.planner import Workload
from wsbatch_bench.sweep.cell import Cell
from wsbatch_bench.sweep.cheapest import Search, Trial
from wsbatch_bench.sweep.grid import Sweep, real_run_s
from wsbatch_bench.sweep.setting import (
    Costs,
    Setting,
    check_costs,
    costs_json,
    default_grid,
    parse_costs,
    same_for_both,
    setting_flag,
)
from wsbatch_bench.sweep.slo import Slo
from wsbatch_bench.sweep.stage import RealStage, serve_command
from wsbatch_bench.trio_run import Unreachable

NONE, UNDECIDED = 4, 5
_SIZES = (1, 4, 16)  # of batches, whose steps tell the costs
_LONGEST_PROMPT = 512  # tokens; longer ones tell the costs no better, and take longer


def add_rate_flags(parser: Parser) -> None:
    """Add what choosing for a rate needs."""
    parser.add_argument("--rate", type=RATE.flag, metavar="R", help="requests a second that must be carried")
    parser.add_argument(
        "--setting",
        action="append",
        type=setting_flag,
        metavar="SPEC",
        help="try this setting instead of the whole grid; may be repeated",
    )
    parser.add_argument(
        "--confirm",
        type=Number(1, 1_000_000, whole=True).flag,
        metavar="N",
        help="put N requests at this rate on `wsbatch serve` with the chosen setting, on this machine",
    )
    add_request_timeout(parser)
    add_model_flags(parser, scheduler=None)
    add_workload(parser, measured=1000)


def run_rate(arguments: argparse.Namespace, slo: Slo) -> int:
    """Search, and confirm where asked; the exit status. Raises ValueError or OSError for what cannot be searched."""
    settings = arguments.setting or default_grid()
    workload = read_workload(arguments)
    try:
        costs = _costs(arguments, settings, workload)
        search = Search(costs, slo, workload, arguments.rate, arguments.num_prompts, arguments.seed)
        print("\n".join(_head(search, settings)), flush=True)
        trials = []
        for trial in search.run(settings):
            print(_line(trial), flush=True)
            trials.append(trial)
    except KeyboardInterrupt:
        return INTERRUPTED
    chosen = trials[-1] if trials[-1].again and trials[-1].verdict == "pass" else None
    undecided = _undecided(trials)
    print("\n".join(["", *_answer(arguments, slo, chosen, undecided)]), flush=True)
    if chosen is None and not undecided:
        print(_what_is_carried(search, settings), flush=True)
    if chosen is None:
        return UNDECIDED if undecided else NONE
    return 0 if arguments.confirm is None else _confirm(arguments, search, chosen)


def _costs(arguments: argparse.Namespace, settings: Sequence[Setting], workload: Workload) -> Costs:
    """Those that are given; else they are measured now, and kept. Raises ValueError or OSError."""
    if arguments.costs:
        given = parse_costs(arguments.costs)
        check_costs(given, settings, name=arguments.costs)
        return given
    if arguments.model == "simulated":
        return same_for_both(DEFAULT_COSTS)
    schedulers = sorted({setting.scheduler for setting in settings})
    print(f"measuring the step costs of {arguments.model}, {' and '.join(schedulers)}: about a minute", flush=True)
    prompt_tokens = min(_LONGEST_PROMPT, round(workload.prompts.mean))
    costs = {}
    for scheduler in schedulers:
        _, (scaling,) = measure_model(
            arguments, scheduler, DEFAULT_COSTS, sizes=_SIZES, prompt_tokens=prompt_tokens, output_tokens=12, rounds=1
        )
        costs[scheduler] = scaling.fit.costs
    path = cache_dir() / "bench-costs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(costs_json(costs), indent=1) + "\n")
    print(f"kept in {path}: --costs {path} does without measuring them again\n", flush=True)
    return costs


def _head(search: Search, settings: Sequence[Setting]) -> list[str]:
    workload = search.workload
    arrivals = "a trace, replayed" if workload.arrivals is None else workload.arrivals.spec
    lines = [
        f"load       {search.rate:g} requests/s ({arrivals}); prompts of {workload.prompts.mean:.0f} and outputs of "
        f"{workload.outputs.mean:.0f} tokens on average",
        f"SLO        {search.slo.text}",
    ]
    for scheduler in sorted({setting.scheduler for setting in settings}):
        each = search.costs[scheduler]
        lines.append(
            f"costs      {scheduler}: a step takes {1000 * each.tau_s:.3g} ms + {1000 * each.alpha_s:.3g} ms a decode "
            f"row + {1000 * each.beta_s:.3g} ms a prompt token"
        )
    lines += search.slo.lacking(search.measured)
    once_s, longest_s = search.estimate_s(settings)
    lines.append(
        f"time       about {span(once_s)} where each of {len(settings)} settings is tried once, at most "
        f"{span(longest_s)} where they are hard to tell apart"
    )
    return [*lines, "", f"{'setting':32} {'requests':>8}  {'TTFT p95, s':22} {'end to end p95, s':22} verdict"]


def _line(trial: Trial) -> str:
    cell = trial.cell
    verdict = f"{trial.verdict}{' (unstable)' if cell.verdict == 'unstable' else ''}"
    return (
        f"{trial.setting.label:32} {cell.sent:8}  "
        f"{_bounded(cell.ttft_p95_s, cell.ttft_p95_low_s, cell.ttft_p95_high_s):22} "
        f"{_bounded(cell.e2e_p95_s, cell.e2e_p95_low_s, cell.e2e_p95_high_s):22} "
        f"{verdict}{', on another trace' if trial.again else ''}"
    )


def _bounded(value: float, low: float, high: float) -> str:
    return f"{value:.3g} ({low:.3g} … {high:.3g})"


def _undecided(trials: Sequence[Trial]) -> list[Trial]:
    """The last word on each setting that neither certainly meets the SLO nor certainly misses it."""
    last = {trial.setting: trial for trial in trials}
    return [trial for trial in last.values() if trial.verdict == "undecided"]


def _answer(arguments: argparse.Namespace, slo: Slo, chosen: Trial | None, undecided: Sequence[Trial]) -> list[str]:
    rate = arguments.rate
    lines = [f"undecided  {trial.setting.label}: more requests tell more (--num-prompts)" for trial in undecided]
    if chosen is None:
        return [*lines, f"chosen     none: no setting certainly meets the SLO at {rate:g} requests/s"]
    return [
        *lines,
        f"chosen     {chosen.setting.label}: no smaller batch certainly meets the SLO at {rate:g} requests/s; this one "
        "does on two traces",
        *(f"           {bound.explain(chosen.cell)}" for bound in slo.bounds),
        f"serve it   {serve_command(arguments.model, chosen.setting, _flags(arguments))}",
        f'check it   wsbatch-bench load ws://HOST:PORT --request-rate {rate:g} --slo "{slo.text}"',
    ]


def _what_is_carried(search: Search, settings: Sequence[Setting]) -> str:
    """How far away it is: the rate within the SLO of the setting that may do most."""
    strongest, pool = search.strongest(settings)
    what = f"at most {pool.passed:.4g} requests/s" if pool.passed else "at no rate that was tried"
    return f"           {strongest.label}, the one that could do most, certainly meets it {what}"


def _flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Of `wsbatch serve`, as the costs were measured."""
    dtype = () if arguments.dtype == "auto" else ("--dtype", arguments.dtype)
    threads = () if arguments.threads is None else ("--threads", str(arguments.threads))
    return (*dtype, *threads)


def _confirm(arguments: argparse.Namespace, search: Search, chosen: Trial) -> int:
    """The same on the real engine; the exit status."""
    measured, rate = arguments.confirm, search.rate
    warmup = ceil(measured / 5) if arguments.num_warmups is None else arguments.num_warmups
    trace = search.workload.trace(search.seed + 2, 2 * (warmup + measured))
    takes_s = real_run_s((warmup + measured) / rate, search.workload.outputs.values[-1])
    print(f"\nconfirming on a server of this setting: about {span(takes_s)}", flush=True)
    for line in search.slo.lacking(measured):
        print(line, flush=True)
    stage = RealStage(arguments.model, _flags(arguments))
    sweep = Sweep(stage, trace, warmup, measured, request_timeout_s=arguments.request_timeout_s)
    try:
        with ending_with(FAILED, *Unreachable, RuntimeError):
            cell = sweep.measure(Cell(chosen.setting, 1.0, rate))
    except KeyboardInterrupt:
        return INTERRUPTED
    verdict = search.slo.judge(cell)
    print(f"confirmed  {verdict}: p95 end to end {cell.e2e_p95_s:.3g} s, predicted {chosen.cell.e2e_p95_s:.3g} s")
    print("\n".join(f"           {bound.explain(cell)}" for bound in search.slo.bounds))
    if cell.invalid:
        print(f"INVALID    {cell.invalid}")
    return {"pass": 0, "fail": NONE, "undecided": UNDECIDED}[verdict]
