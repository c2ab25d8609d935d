"""How many tokens a prompt or an output has: distributions, parsed from specs, with their exact moments."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import erf, exp, log, sqrt
from pathlib import Path

from wsbatch_bench.spec import check_least, parse_spec

DEFAULT_PROMPTS = "lognormal:median=200,sigma=0.6,min=8,max=1024"
DEFAULT_OUTPUTS = "lognormal:median=100,sigma=0.9,max=1000"

_KINDS: dict[str, dict[str, float | None]] = {
    "lognormal": {"median": None, "sigma": None, "min": 1, "max": 1_000_000},
    "fixed": {"tokens": None},
}


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers.

    Attributes:
        spec: as it was given.
        values: what can come, ascending.
        cumulative: the probability of at most each of `values`; the last one is 1.
    """

    spec: str
    values: tuple[int, ...]
    cumulative: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        """One length, by the inverse of the cumulative distribution: one random number a draw, on any platform."""
        return self.quantile(rng.random())

    def quantile(self, q: float) -> int:
        """The smallest length that at least the share `q` does not exceed."""
        return self.values[min(bisect_left(self.cumulative, q), len(self.values) - 1)]

    @property
    def mean(self) -> float:
        """E[L], in tokens."""
        return self.mean_of_longest(1)

    def mean_of_longest(self, batch: int) -> float:
        """E[max of `batch` independent lengths], in tokens: how many steps a batch run to completion takes."""
        below, total = 0.0, 0.0
        for value, upto in zip(self.values, self.cumulative, strict=True):
            total += value * (upto**batch - below**batch)
            below = upto
        return total

    def padded_waste(self, batch: int) -> float:
        """1 - E[L] / E[max_b L]: the share of decode slots nobody asked for in a batch run to completion."""
        return 1 - self.mean / self.mean_of_longest(batch)


def parse_lengths(spec: str) -> Lengths:
    """A distribution from its spec.

    `lognormal:median=100,sigma=0.9,min=1,max=1000` (rounded, and clamped into min..max), `fixed:tokens=100`, or
    `empirical:FILE` with one length a line, drawn uniformly. Raises ValueError, or OSError for the file.
    """
    kind, _, rest = spec.partition(":")
    if kind == "empirical":
        return _empirical(spec, Path(rest))
    kind, values = parse_spec(spec, _KINDS | {"empirical": {}}, what="lengths")
    if kind == "fixed":
        check_least("fixed:tokens", values["tokens"], 1)
        return Lengths(spec, (int(values["tokens"]),), (1.0,))
    median, sigma, low, high = (values[key] for key in ("median", "sigma", "min", "max"))
    check_least("lognormal:median", median, 1)
    check_least("lognormal:sigma", sigma, 0, above=True)
    check_least("lognormal:min", low, 1)
    check_least("lognormal:max", high, low)
    # Nothing worth a slot comes beyond six sigma.
    last = min(int(high), int(median * exp(6 * sigma)) + 1)
    support = tuple(range(int(low), last + 1))
    cumulative = [_lognormal_cdf(value + 0.5, median, sigma) for value in support[:-1]]
    return Lengths(spec, support, (*cumulative, 1.0))


def _lognormal_cdf(value: float, median: float, sigma: float) -> float:
    return (1 + erf(log(value / median) / (sigma * sqrt(2)))) / 2


def _empirical(spec: str, path: Path) -> Lengths:
    lengths = []
    for number, line in enumerate(path.read_text().split(), 1):
        if not line.isdecimal() or int(line) < 1:
            raise ValueError(f"lengths {spec!r}: line {number} is {line!r}: must be a whole number of at least 1")
        lengths.append(int(line))
    if not lengths:
        raise ValueError(f"lengths {spec!r}: the file holds no length")
    return lengths_of(spec, lengths)


def lengths_of(spec: str, lengths: Sequence[int]) -> Lengths:
    """The distribution of these lengths, at least one; `spec` says where they come from."""
    counts = Counter(lengths)
    values = tuple(sorted(counts))
    return Lengths(spec, values, tuple(n / len(lengths) for n in accumulate(counts[value] for value in values)))
