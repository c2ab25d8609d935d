"""How the tokens of a workload are chosen: greedily, or drawn. Lengths are exact either way."""

from dataclasses import replace

from wsbatch.messages import SamplingParams

GREEDY = SamplingParams()

_SEEDS = 2**53


def seeded(sampling: SamplingParams, index: int, *, seed: int = 0) -> SamplingParams:
    """For request `index` of a workload with this seed: the same noise in every run. Greedy needs none."""
    if sampling.temperature == 0:
        return sampling
    return replace(sampling, seed=(seed * 1_000_003 + index) % _SEEDS)


def shown(sampling: SamplingParams) -> str:
    """For a report: `greedy`, or the numbers."""
    return shown_numbers(sampling.temperature, sampling.top_p)


def shown_numbers(temperature: float, top_p: float) -> str:
    """The same of the two numbers alone."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}, top_p {top_p:g}"
