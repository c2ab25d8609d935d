"""The flags of commands that run a model in this process."""

import argparse
from typing import Any

from wsbatch.config import EngineConfig
from wsbatch_bench.costs import DEFAULT_COSTS, Costs, parse_costs, same_for_both


def add_model_flags(parser: argparse.ArgumentParser, *, scheduler: str | None) -> None:
    """Add them; `scheduler` is the default, None leaves that flag out."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default="demo", metavar="TEXT", help="as `wsbatch serve` takes it; or `simulated`")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    group.add_argument("--threads", type=int, metavar="N", help="of the model (default: torch's own choice)")
    group.add_argument(
        "--costs", metavar="COSTS", help="of the simulated model: tau_ms=…,alpha_ms=…,beta_ms=…, or a file of `scaling`"
    )
    if scheduler is not None:
        group.add_argument(
            "--scheduler", choices=("dynamic", "continuous"), default=scheduler, help="default: %(default)s"
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
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers of at least 1, separated by commas")
    return tuple(sorted({int(part) for part in parts}))
