"""Flags that several commands share: of the model and of the workload. Names are vLLM's where vLLM has the flag."""

import argparse
import os
import secrets
from math import inf
from pathlib import Path
from typing import Any

from wsbatch.config import EngineConfig
from wsbatch.messages import SamplingParams
from wsbatch.model.simulated import DEFAULT_COSTS
from wsbatch_bench.load.specs import DEFAULT_OUTPUTS, DEFAULT_PROMPTS, parse_arrivals, parse_lengths
from wsbatch_bench.load.trace import Trace, draw_trace, load_trace
from wsbatch_bench.numbers import BATCH, RATE, SEED, Number, numbers
from wsbatch_bench.sweep.setting import Costs, parse_costs, same_for_both

_MOST_REQUESTS = 1_000_000
_DRAWN_SEEDS = 1_000_000_000  # short enough to be typed again
THREADS = Number(1, 4096, whole=True)
JOBS = Number(1, 1024, whole=True)

LONG_S = 600.0
"""A command that takes longer says beforehand what would shorten it."""

WORKLOAD_HELP = """\
arrivals:
  poisson | constant | gamma:burstiness=0.5 | bursts:k=4,spread_ms=10 | on-off:requests=20,duty=0.25
  closed:clients=8,think_ms=0        no schedule: each client sends when its last answer has come
lengths:
  lognormal:median=100,sigma=0.9,min=1,max=1000 | fixed:tokens=128 | empirical:FILE (a number a line)
"""


def add_model_flags(parser: argparse.ArgumentParser, *, scheduler: str | None) -> None:
    """Add them; `scheduler` is the default, None leaves that flag out."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="demo",
        metavar="TEXT",
        help="model to run, as `wsbatch serve` takes it, or `simulated` (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="number type that the model computes in (default: %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=THREADS.flag,
        metavar="N",
        help="CPU threads that the model uses (default: torch's own choice)",
    )
    group.add_argument(
        "--costs",
        metavar="COSTS",
        help="step costs of the simulated model: tau_ms=…,alpha_ms=…,beta_ms=…, or a file that `scaling --out` wrote",
    )
    if scheduler is not None:
        group.add_argument(
            "--scheduler",
            choices=("dynamic", "continuous"),
            default=scheduler,
            help="scheduler that decides the steps (default: %(default)s)",
        )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add what says whether rates are measured in virtual time or on a real server, and against which rate."""
    parser.add_argument(
        "--engine",
        choices=("virtual", "real"),
        default="virtual",
        help="run the server in virtual time, or start `wsbatch serve` (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        default="demo",
        metavar="TEXT",
        help="with --engine real: model to serve, as `wsbatch serve` takes it (default: %(default)s)",
    )
    parser.add_argument(
        "--serve-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="with --engine real: one more flag for `wsbatch serve`; may be repeated",
    )
    parser.add_argument(
        "--capacity",
        type=RATE.flag,
        metavar="R",
        help="requests a second that the offered rates are fractions of (default: it is measured first)",
    )


def engine_config(arguments: argparse.Namespace, **fields: Any) -> EngineConfig:
    """The configuration that the flags ask for. Raises ValueError."""
    own = {"model": arguments.model, "dtype": arguments.dtype, "threads": arguments.threads, "max_wait_ms": 0.0}
    if hasattr(arguments, "scheduler"):
        own["scheduler"] = arguments.scheduler
    # With room for slow steps the first ones are as large as any other, although nothing is known of their costs.
    return EngineConfig(**(own | {"prefix_cache": False, "step_stall_s": 3600.0} | fields))


def read_costs(arguments: argparse.Namespace) -> Costs:
    """The simulated model's costs. Raises ValueError or OSError."""
    return parse_costs(arguments.costs) if arguments.costs else same_for_both(DEFAULT_COSTS)


def sizes(text: str) -> tuple[int, ...]:
    """An argparse type: batch sizes, separated by commas."""
    return tuple(sorted({int(size) for size in numbers(BATCH)(text)}))


class _Given(argparse.Action):
    """Stores the value, and that the flag was given: `--trace` contradicts it."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = [*getattr(namespace, "given", []), option_string]


def add_workload(
    parser: argparse.ArgumentParser, *, measured: int | None, shown: str = "%(default)s", seed: int | None = 0
) -> None:
    """Add the flags of one workload; see `add_requests`. `seed` is the default; None draws one for each run."""
    group = add_requests(parser, measured=measured, shown=shown, seed=seed)
    group.add_argument(
        "--arrivals",
        action=_Given,
        default="poisson",
        metavar="SPEC",
        help="when requests arrive; see arrivals below (default: %(default)s)",
    )
    group.add_argument(
        "--burstiness",
        action=_Given,
        metavar="X",
        help="shape of gamma arrivals, short for --arrivals gamma:burstiness=X; 1 is Poisson, less is burstier",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay the requests of this JSONL file instead of drawing them; from its beginning once it ends",
    )


def add_requests(
    parser: argparse.ArgumentParser, *, measured: int | None, shown: str = "%(default)s", seed: int | None = 0
) -> argparse._ArgumentGroup:
    """Add the flags that say what the requests are, and how many, but not when they come.

    `measured` is the default number of requests, and `shown` what the help says of it.
    """
    group = parser.add_argument_group("workload")
    for name, default in (("--prompt-lengths", DEFAULT_PROMPTS), ("--output-lengths", DEFAULT_OUTPUTS)):
        kind = name.removeprefix("--").removesuffix("-lengths")
        shown_help = f"how {kind} lengths are drawn, in tokens; see lengths below (default: %(default)s)"
        group.add_argument(name, action=_Given, default=default, metavar="SPEC", help=shown_help)
    group.add_argument(
        "--num-prompts",
        type=Number(1, _MOST_REQUESTS, whole=True).flag,
        default=measured,
        metavar="N",
        help=f"number of measured requests (default: {shown})",
    )
    group.add_argument(
        "--num-warmups",
        type=Number(0, _MOST_REQUESTS, whole=True).flag,
        metavar="N",
        help="number of unmeasured requests before the measured ones, under the same load (default: a fifth of those; "
        "0 where all come at once)",
    )
    drawn = "drawn for each run, and printed, so that no server knows its prompts"
    group.add_argument(
        "--seed", action=_Given, type=SEED.flag, default=seed, metavar="N",
        help=f"seed of the random draws (default: {drawn if seed is None else seed})",
    )  # fmt: skip
    return group


def add_sampling(parser: argparse.ArgumentParser, *, beside: bool) -> None:
    """Add the flags that say how tokens are chosen; `beside` a greedy measurement, or instead of it."""
    group = parser.add_argument_group("sampling")
    temperature, top_p = (0.7, 0.9) if beside else (0.0, 1.0)
    what = (
        "temperature of a measurement beside the greedy one, in its own column; 0: greedy alone"
        if beside
        else "temperature of every request; 0 is greedy"
    )
    group.add_argument(
        "--temperature",
        type=Number(0, 100).flag,
        default=temperature,
        metavar="X",
        help=f"{what} (default: {temperature:g})",
    )
    group.add_argument(
        "--top-p",
        type=Number(0, 1, above=True).flag,
        default=top_p,
        metavar="X",
        help="at a temperature above 0: draw from the likeliest tokens of this total probability "
        "(default: %(default)g)",
    )


def read_sampling(arguments: argparse.Namespace) -> SamplingParams:
    """What the flags ask for."""
    return SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p if arguments.temperature else 1.0)


def add_request_timeout(group: argparse._ActionsContainer) -> None:
    """Add the bound on a single request."""
    group.add_argument(
        "--request-timeout-s",
        type=Number(0, 86_400, above=True).flag,
        default=600.0,
        metavar="S",
        help="a request that takes longer is given up, and failed (default: 600)",
    )


def add_overwrite(group: argparse._ActionsContainer) -> None:
    """Add the flag without which nothing is lost."""
    group.add_argument("--overwrite", action="store_true", help="replace results that are already there")


def prepare_files(arguments: argparse.Namespace, *names: str) -> None:
    """Make the folder `--out` before the work, and see that none of these is in it already.

    Raises ValueError where one is, unless `--overwrite` is given, and OSError where no file can be made there.
    """
    out: Path | None = arguments.out
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out}: cannot be written to")
    if not arguments.overwrite and (found := [name for name in names if (out / name).exists()]):
        raise ValueError(f"{out / found[0]} exists: give another --out, or --overwrite")


def span(seconds: float) -> str:
    """In words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 48 * 3600 else f"{seconds / 86_400:,.0f} days"


def read_trace(arguments: argparse.Namespace, *, rescaled: bool = True) -> Trace:
    """The trace that the flags ask for; `rescaled` where it is to be sent at rates of its reader's.

    Raises ValueError, also for flags that contradict each other, or OSError.
    """
    given = getattr(arguments, "given", [])
    if arguments.trace is not None:
        if given:
            raise ValueError(f"--trace with {', '.join(given)}: the trace says that already")
        trace = load_trace(arguments.trace)
        if rescaled and trace.at_once:
            raise ValueError(f"{arguments.trace}: all times are equal: it comes at once and has no rate to change")
        return trace
    arrivals = arguments.arrivals
    if arguments.burstiness is not None:
        if "--arrivals" in given:
            raise ValueError("--burstiness with --arrivals: it is one")
        arrivals = f"gamma:burstiness={arguments.burstiness}"
    return draw_trace(
        # Some more than measured: the cool-down uses them before the trace begins anew.
        2 * (arguments.num_prompts + read_warmups(arguments, 1.0)),
        parse_arrivals(arrivals),
        prompts=parse_lengths(arguments.prompt_lengths),
        outputs=parse_lengths(arguments.output_lengths),
        seed=secrets.randbelow(_DRAWN_SEEDS) if arguments.seed is None else arguments.seed,
    )


def read_warmups(arguments: argparse.Namespace, rate: float) -> int:
    """The number of warm-up requests."""
    if arguments.num_warmups is not None:
        return int(arguments.num_warmups)
    return 0 if rate == inf else int(arguments.num_prompts) // 5
