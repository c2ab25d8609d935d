"""Step costs: what the simulated model is told about the real one. Read from flags or from a fit's JSON."""

import json
from pathlib import Path
from typing import Any

from wsbatch.model.simulated import StepCosts
from wsbatch_bench.spec import parse_spec

DEFAULT_COSTS = StepCosts(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)

Costs = dict[str, StepCosts]
"""By scheduler: each runs a model of its own, with its own costs."""


def same_for_both(costs: StepCosts) -> Costs:
    """One model under both schedulers: what differs is then the scheduling alone."""
    return {"dynamic": costs, "continuous": costs}


def parse_costs(text: str) -> Costs:
    """`tau_ms=10,alpha_ms=1,beta_ms=0.5` for both schedulers, or the name of a file that `scaling` wrote.

    Raises ValueError or OSError.
    """
    if "=" not in text:
        try:
            return parse_costs_json(json.loads(Path(text).read_text()))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{text}: not a file of step costs ({error!r})") from None
    kinds: dict[str, dict[str, float | None]] = {"costs": {"tau_ms": None, "alpha_ms": None, "beta_ms": None}}
    _, values = parse_spec(f"costs:{text}", kinds, what="costs")
    return same_for_both(StepCosts(**{f"{name[:-3]}_s": value / 1000 for name, value in values.items()}))


def parse_costs_json(fits: dict[str, dict[str, float]]) -> Costs:
    """The inverse of `costs_json`; what else a fit says of itself is left aside."""
    return {name: StepCosts(**{key: fit[key] for key in StepCosts.__slots__}) for name, fit in fits.items()}


def costs_json(costs: Costs) -> dict[str, Any]:
    """As plain data, as `parse_costs` reads it from a file."""
    return {name: {key: getattr(each, key) for key in StepCosts.__slots__} for name, each in costs.items()}
