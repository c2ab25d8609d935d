"""When requests arrive: processes of unit rate, which a trace rescales to any rate."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from wsbatch_bench.spec import check_least, parse_spec

_KINDS: dict[str, dict[str, float | None]] = {
    "poisson": {},
    "gamma": {"burstiness": None},
    "constant": {},
    "bursts": {"k": None, "spread_ms": None},
    "on-off": {"requests": None, "duty": None},
    "closed": {"clients": None, "think_ms": 0},
}

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
    kind, values = parse_spec(spec, _KINDS, what="arrivals")
    if "burstiness" in values:
        check_least("gamma:burstiness", values["burstiness"], 0, above=True)
    if kind == "bursts":
        check_least("bursts:k", values["k"], 1)
        check_least("bursts:spread_ms", values["spread_ms"], 0)
    if kind == "on-off":
        check_least("on-off:requests", values["requests"], 1)
        check_least("on-off:duty", values["duty"], 0, above=True)
        if values["duty"] > 1:
            raise ValueError(f"on-off:duty is {values['duty']:g}: must be at most 1")
    if kind == "closed":
        check_least("closed:clients", values["clients"], 1)
        check_least("closed:think_ms", values["think_ms"], 0)
    return Arrivals(spec, kind, values)


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
