"""One way to run the server, which a sweep varies and `choose` picks from; and the step costs of a simulated model."""

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch_bench.load.specs import Kinds, parse_spec
from wsbatch_bench.numbers import MILLISECONDS, Number

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
WAITS_MS = (0.0, 5.0, 20.0, 50.0)

_STEP_S = 3600.0  # at most
_SECONDS = Number(0, _STEP_S)
_COSTS: Kinds = {"costs": dict.fromkeys(("tau_ms", "alpha_ms", "beta_ms"), Number(0, 1000 * _STEP_S))}

# A bench decides for itself what waits and what is too late; prompts must not find each other in a cache; and the first
# steps are to be as large as any other, although nothing is known of their costs.
_MEASURING: dict[str, Any] = {
    "queue_timeout_ms": 86_400_000,
    "max_queue_requests": 1024,
    "prefix_cache": False,
    "step_stall_s": 3600.0,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A scheduler and its knobs.

    Attributes:
        scheduler: dynamic or continuous.
        max_batch_size: rows.
        max_wait_ms: of the dynamic scheduler; 0 for continuous, which has none.
        options: further fields of EngineConfig, as (name, value).
    """

    scheduler: str
    max_batch_size: int
    max_wait_ms: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """Short and unique: `dynamic b8 w20`."""
        wait = f" w{self.max_wait_ms:g}" if self.scheduler == "dynamic" else ""
        more = "".join(f" {name}={_word(value)}" for name, value in self.options)
        return f"{self.scheduler} b{self.max_batch_size}{wait}{more}"

    def config(self, **fields: Any) -> EngineConfig:
        """The engine's configuration while it is measured. Raises ValueError for a value out of bounds."""
        own = {"max_batch_size": self.max_batch_size, "max_wait_ms": self.max_wait_ms} | dict(self.options)
        return EngineConfig(**(_MEASURING | {"scheduler": self.scheduler} | own | fields))

    def flags(self) -> list[str]:
        """The flags of `wsbatch serve` that make a server of this setting."""
        flags = ["--scheduler", self.scheduler, "--max-batch-size", str(self.max_batch_size)]
        if self.scheduler == "dynamic":
            flags += ["--max-wait-ms", f"{self.max_wait_ms:g}"]
        return flags + _flags(dict(self.options))

    def measuring_flags(self) -> list[str]:
        """The same for a server that is to be measured."""
        return self.flags() + _flags(
            {name: value for name, value in _MEASURING.items() if name not in dict(self.options)}
        )


def default_grid() -> list[Setting]:
    """Dynamic over batch sizes and waits, continuous over batch sizes."""
    dynamic = [Setting("dynamic", size, wait_ms) for size in BATCH_SIZES for wait_ms in WAITS_MS]
    return dynamic + [Setting("continuous", size) for size in BATCH_SIZES]


def parse_setting(text: str) -> Setting:
    """`dynamic:max_batch_size=8,max_wait_ms=20,length_buckets=64+256,adaptive_wait=true`. Raises ValueError."""
    scheduler, _, rest = text.partition(":")
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"setting {text!r}: {item!r} must be name=value")
        values[name] = tuple(map(_value, value.split("+"))) if name == "length_buckets" else _value(value)
    size = values.pop("max_batch_size", None)
    if type(size) is not int:
        raise ValueError(f"setting {text!r}: max_batch_size is required, a whole number")
    try:
        wait_ms = MILLISECONDS.check("max_wait_ms", values.pop("max_wait_ms", 0))
        setting = Setting(scheduler, size, float(wait_ms), tuple(sorted(values.items())))
        setting.config()
    except (TypeError, ValueError) as error:
        raise ValueError(f"setting {text!r}: {error}") from None
    return setting


def setting_flag(text: str) -> Setting:
    """The same as an argparse type."""
    try:
        return parse_setting(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flags(values: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [flag, ",".join(map(str, value))]
        else:
            flags += [flag, str(value)]
    return flags


Costs = dict[str, CostModel]
"""By scheduler: each runs a model of its own, with its own costs."""


def same_for_both(costs: CostModel) -> Costs:
    """One model under both schedulers: what differs is then the scheduling alone."""
    return {"dynamic": costs, "continuous": costs}


def parse_costs(text: str) -> Costs:
    """`tau_ms=10,alpha_ms=1,beta_ms=0.5` for both schedulers, or the name of a file that `scaling` wrote.

    Raises ValueError or OSError.
    """
    if "=" not in text:
        try:
            return parse_costs_json(json.loads(Path(text).read_text()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{text}: not a file of step costs ({type(error).__name__}: {error})") from None
    _, values = parse_spec(f"costs:{text}", _COSTS, what="costs")
    return same_for_both(_some_cost(CostModel(**{f"{name[:-3]}_s": value / 1000 for name, value in values.items()})))


def parse_costs_json(fits: dict[str, dict[str, float]]) -> Costs:
    """The inverse of `costs_json`; what else a fit says of itself is left aside.

    Raises ValueError for a number out of bounds; KeyError, TypeError or AttributeError for what are no fits.
    """
    return {
        name: _some_cost(CostModel(**{key: _SECONDS.check(f"{name}.{key}", fit[key]) for key in CostModel.__slots__}))
        for name, fit in fits.items()
    }


def _some_cost(costs: CostModel) -> CostModel:
    # Where a decode step takes no time, an answer has no time per token, and a server no capacity.
    if costs.tau_s + costs.alpha_s == 0:
        raise ValueError("costs: tau_ms and alpha_ms are 0: a decode step must take some time")
    return costs


def check_costs(costs: Costs, settings: Iterable[Setting], *, name: str) -> None:
    """Raise ValueError where a setting's scheduler has no costs; `name` is what they were read from."""
    for scheduler in sorted({setting.scheduler for setting in settings}):
        if scheduler not in costs:
            raise ValueError(f"{name} has no costs of the {scheduler} scheduler")


def costs_json(costs: Costs) -> dict[str, Any]:
    """As plain data, as `parse_costs` reads it from a file."""
    return {name: asdict(each) for name, each in costs.items()}
