"""Numbers as people give them, on the command line, in a spec or in a file: each is checked against stated bounds."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Number:
    """What a number may be. It is finite, unless `infinite` allows `inf` besides.

    Attributes:
        least, most: its bounds, inclusive; with `above`, `least` itself is too little.
        whole: only whole numbers.
        default: of a key that need not be given; None where it must be.
    """

    least: float
    most: float
    above: bool = False
    whole: bool = False
    infinite: bool = False
    default: float | None = None

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        least = f"above {self.least:,g}" if self.above else f"of at least {self.least:,.12g}"
        return f"{kind} {least} and at most {self.most:,.12g}{', or inf' if self.infinite else ''}"

    def read(self, name: str, text: str) -> float:
        """The number that `text` spells; an int where it must be whole. Raises ValueError: the name and the bounds."""
        for kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                continue
            return self.check(name, value, shown=text)
        raise self._refusal(name, text)

    def check(self, name: str, value: object, *, shown: object = None) -> float:
        """The same of a value that was read already, as from JSON. Raises ValueError."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            fits = self.least < value if self.above else self.least <= value
            if (fits and value <= self.most and (not self.whole or value == int(value))) or (
                self.infinite and value == inf
            ):
                return int(value) if self.whole else value
        raise self._refusal(name, value if shown is None else shown)

    def flag(self, text: str) -> float:
        """As an argparse type, which names the flag itself."""
        # Here, because only a command line needs it.
        from argparse import ArgumentTypeError

        try:
            return self.read("", text)
        except ValueError:
            raise ArgumentTypeError(f"is {_short(text)}: must be {self}") from None

    def _refusal(self, name: str, shown: object) -> ValueError:
        return ValueError(f"{name} is {_short(shown)}: must be {self}")


def numbers(each: Number) -> Callable[[str], tuple[float, ...]]:
    """An argparse type: several of them, separated by commas."""

    def read(text: str) -> tuple[float, ...]:
        return tuple(each.flag(part) for part in text.split(","))

    return read


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


MILLISECONDS = Number(0, 86_400_000)
"""A span of time, at most a day."""
RATE = Number(1e-6, 1e6)
"""Requests a second."""
BATCH = Number(1, 4096, whole=True)
"""Rows of a batch."""
TOKENS = Number(1, 1_000_000, whole=True)
"""Of a prompt or an output."""
COUNT = Number(1, 10_000_000, whole=True)
"""Of requests, or of anything else that is counted."""
SEED = Number(-(2**63), 2**63, whole=True)
