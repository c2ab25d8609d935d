"""What a workload is made of, as the command line spells it: `kind:key=value,…`. Arrival processes and lengths."""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import erf, exp, log, sqrt
from pathlib import Path
from typing import TypeAlias

from wsbatch_bench.numbers import MILLISECONDS, TOKENS, Number

Kinds: TypeAlias = Mapping[str, Mapping[str, Number]]
"""For each kind of a spec its keys, and what each may be."""

_ARRIVALS: Kinds = {
    "poisson": {},
    "gamma": {"burstiness": Number(0.001, 1_000_000)},
    "constant": {},
    "bursts": {"k": Number(1, 10_000, whole=True), "spread_ms": MILLISECONDS},
    "on-off": {"requests": Number(1, 1_000_000), "duty": Number(0.001, 1)},
    "closed": {"clients": Number(1, 10_000, whole=True), "think_ms": replace(MILLISECONDS, default=0)},
}

DEFAULT_PROMPTS = "lognormal:median=200,sigma=0.6,min=8,max=1024"
DEFAULT_OUTPUTS = "lognormal:median=100,sigma=0.9,max=1000"

_LENGTHS: Kinds = {
    "lognormal": {
        "median": Number(1, TOKENS.most),
        "sigma": Number(0, 10, above=True),
        "min": replace(TOKENS, default=1),
        "max": replace(TOKENS, default=TOKENS.most),
    },
    "fixed": {"tokens": TOKENS},
    "empirical": {},
}


def parse_spec(text: str, kinds: Kinds, *, what: str) -> tuple[str, dict[str, float]]:
    """The kind, and a number for each of its keys.

    Args:
        text: the spec.
        kinds: the kinds that there are.
        what: what the spec describes, for error messages.

    Raises:
        ValueError: naming the part that is wrong, and what is allowed.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in kinds:
        raise ValueError(f"{what} {text!r}: {kind!r} is none of {', '.join(sorted(kinds))}")
    known = kinds[kind]
    values = {key: number.default for key, number in known.items() if number.default is not None}
    for item in filter(None, rest.split(",")):
        key, _, number = item.partition("=")
        if key not in known:
            raise ValueError(f"{what} {text!r}: {key!r} is none of {', '.join(known) or '(no keys)'}")
        values[key] = known[key].read(f"{kind}:{key}", number)
    missing = [key for key in known if key not in values]
    if missing:
        raise ValueError(f"{what} {text!r}: {missing[0]} is required")
    return kind, values


Arrival: TypeAlias = tuple[float, float]
"""When one request arrives: (time in mean gaps, offset in seconds). Rescaling divides the first, keeps the second."""


@dataclass(frozen=True)
class ClosedLoop:
    """No schedule: each of `clients` sends its next request `think_s` after the answer to its last one."""

    clients: int
    think_s: float


@dataclass(frozen=True)
class Arrivals:
    """An arrival process of one request per unit of time on average.

    Attributes:
        spec: as it was given.
        kind: poisson, gamma, constant, bursts, on-off or closed.
        values: the numbers of the spec.
    """

    spec: str
    kind: str
    values: dict[str, float]

    @property
    def closed(self) -> ClosedLoop | None:
        """The closed loop, where it is one."""
        if self.kind != "closed":
            return None
        return ClosedLoop(int(self.values["clients"]), self.values["think_ms"] / 1000)

    def draw(self, rng: random.Random) -> Iterator[Arrival]:
        """Arrivals without end. Bursts may overlap: times are not sorted there."""
        match self.kind:
            case "poisson":
                yield from _gamma(rng, 1.0)
            case "gamma":
                yield from _gamma(rng, self.values["burstiness"])
            case "constant":
                number = 0
                while True:
                    yield float(number), 0.0
                    number += 1
            case "bursts":
                yield from _bursts(rng, int(self.values["k"]), self.values["spread_ms"] / 1000)
            case "on-off":
                yield from _on_off(rng, self.values["requests"], self.values["duty"])
            case _:
                while True:
                    yield 0.0, 0.0


def parse_arrivals(spec: str) -> Arrivals:
    """An arrival process from its spec.

    - `poisson`
    - `gamma:burstiness=0.5`: gaps are gamma distributed with this shape; 1 is Poisson, below 1 is burstier
    - `constant`
    - `bursts:k=4,spread_ms=10`: fan-outs. Bursts are Poisson; the k requests of one fall uniformly within the spread,
      which is a time of the client's program and stays as it is when the trace is rescaled
    - `on-off:requests=20,duty=0.25`: Poisson during a quarter of the time, 20 requests on average, then nothing
    - `closed:clients=8,think_ms=0`: a closed loop

    Raises ValueError.
    """
    return Arrivals(spec, *parse_spec(spec, _ARRIVALS, what="arrivals"))


def _gamma(rng: random.Random, shape: float) -> Iterator[Arrival]:
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1 / shape)
        yield now, 0.0


def _bursts(rng: random.Random, k: int, spread_s: float) -> Iterator[Arrival]:
    now = 0.0
    while True:
        now += rng.expovariate(1 / k)
        for offset_s in sorted(rng.uniform(0, spread_s) for _ in range(k)):
            yield now, offset_s


def _on_off(rng: random.Random, requests: float, duty: float) -> Iterator[Arrival]:
    # A Poisson process on the time that is "on", stretched by the pauses: period = requests, on for duty * period.
    on, busy = duty * requests, 0.0
    while True:
        busy += rng.expovariate(1 / duty)
        period, within = divmod(busy, on)
        yield period * requests + within, 0.0


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
    kind, values = parse_spec(spec, _LENGTHS, what="lengths")
    if kind == "fixed":
        return Lengths(spec, (int(values["tokens"]),), (1.0,))
    median, sigma, low, high = (values[key] for key in ("median", "sigma", "min", "max"))
    if high < low:
        raise ValueError(f"lognormal:max is {high}: must be at least lognormal:min, which is {low}")
    # Nothing worth a slot comes beyond six sigma.
    last = min(int(high), max(int(low), int(median * exp(6 * sigma)) + 1))
    support = tuple(range(int(low), last + 1))
    cumulative = [_lognormal_cdf(value + 0.5, median, sigma) for value in support[:-1]]
    return Lengths(spec, support, (*cumulative, 1.0))


def _lognormal_cdf(value: float, median: float, sigma: float) -> float:
    return (1 + erf(log(value / median) / (sigma * sqrt(2)))) / 2


def _empirical(spec: str, path: Path) -> Lengths:
    lengths = []
    for number, line in enumerate(path.read_text().split(), 1):
        lengths.append(int(TOKENS.read(f"lengths {spec!r}: line {number}", line)))
    if not lengths:
        raise ValueError(f"lengths {spec!r}: the file holds no length")
    return lengths_of(spec, lengths)


def lengths_of(spec: str, lengths: Sequence[int]) -> Lengths:
    """The distribution of these lengths, at least one; `spec` says where they come from."""
    counts = Counter(lengths)
    values = tuple(sorted(counts))
    return Lengths(spec, values, tuple(n / len(lengths) for n in accumulate(counts[value] for value in values)))
