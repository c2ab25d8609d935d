"""A trace: which request comes when, and how long it is. Drawn once at unit rate, saved with its hash, rescaled."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import inf, isinf
from operator import itemgetter
from pathlib import Path

from wsbatch_bench.load.specs import (
    DEFAULT_OUTPUTS,
    DEFAULT_PROMPTS,
    Arrivals,
    ClosedLoop,
    Lengths,
    parse_arrivals,
    parse_lengths,
)
from wsbatch_bench.numbers import RATE, SEED, TOKENS, Number
from wsbatch_bench.stability import dispersion

REPLAY = "replay"
"""What stands for the arrival process of a trace that was not drawn here."""

_FORMAT = "wsbatch-trace-1"
_TIME = Number(-1e12, 1e12)  # seconds, perhaps since 1970; or mean gaps
_OFFSET_S = Number(0, 86_400)
_OWN_RATE = replace(RATE, infinite=True)
# Prompt ids: printable ASCII in byte-level vocabularies, no special token in any.
_PROMPT_IDS = range(32, 127)


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. `unit` is its time in mean gaps, `offset_s` is added after rescaling; lengths in tokens."""

    unit: float
    offset_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a schedule: send `entry` at `at_s`, counted from the schedule's start."""

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Offered:
    """What a stretch of a schedule asks for: its requests, and per second; infinite where they come all at once."""

    requests: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True)
class Trace:
    """Entries, and how they were made.

    Attributes:
        arrivals: the spec of the arrival process, or `replay`.
        prompts: the spec of the prompt lengths; likewise for `outputs`.
        seed: of everything that was drawn, and of the prompts' contents.
        entries: in the order in which they were drawn.
        natural_rate: requests a second of a replayed trace; infinite where all of its times are equal; None where a
            rate must be given.
    """

    arrivals: str
    prompts: str
    outputs: str
    seed: int
    entries: tuple[Entry, ...]
    natural_rate: float | None = None

    @property
    def closed(self) -> ClosedLoop | None:
        """The closed loop, where the trace has no schedule of its own."""
        return None if self.arrivals == REPLAY else parse_arrivals(self.arrivals).closed

    @property
    def dispersion(self) -> float:
        """Of its arrivals: 1 for a Poisson process, more for bursts."""
        return dispersion([entry.unit for entry in self.entries])

    def longer(self, count: int) -> "Trace":
        """At least so many requests, of which these are the first; a replayed trace has no more."""
        if self.arrivals == REPLAY or len(self.entries) >= count:
            return self
        return self._drawn_anew(count, self.seed)

    def another(self, seed: int) -> "Trace":
        """Of the same law and length with another seed. ValueError for a replayed trace."""
        if self.arrivals == REPLAY:
            raise ValueError("a replayed trace cannot be drawn with another seed")
        return self._drawn_anew(len(self.entries), seed)

    def _drawn_anew(self, count: int, seed: int) -> "Trace":
        prompts, outputs = parse_lengths(self.prompts), parse_lengths(self.outputs)
        return draw_trace(count, parse_arrivals(self.arrivals), prompts=prompts, outputs=outputs, seed=seed)

    @property
    def at_once(self) -> bool:
        """Whether all of several requests come at one time, so that there is no rate to change."""
        times = {(entry.unit, entry.offset_s) for entry in self.entries}
        return self.closed is None and len(self.entries) > 1 and len(times) == 1

    @property
    def sha256(self) -> str:
        """Of the saved file's bytes."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def save(self, path: Path) -> str:
        """Write it as JSON lines; returns the hash."""
        path.write_text(self._text())
        return self.sha256

    def schedule(self, rate: float) -> Iterator[Planned]:
        """Its requests at `rate` a second, by time, without end: after the last entry the trace begins anew.

        At an infinite rate everything comes at once. Raises ValueError for any other where all times are equal.
        """
        if isinf(rate):
            return (_planned(index, 0.0, entry) for index, entry in enumerate(cycle(self.entries)))
        if self.at_once:
            raise ValueError(f"a rate of {rate:g} requests/s: all times of the trace are equal, it comes at once")
        return self._rescaled(rate)

    def offered(self, rate: float, first: int, count: int) -> Offered:
        """What `count` requests of the schedule, from `first` on, ask for: over the time until the next one's."""
        return offered_by(list(islice(self.schedule(rate), first, first + count + 1)))

    def _rescaled(self, rate: float) -> Iterator[Planned]:
        # One mean gap after the last: the rate stays what it is across the seam.
        period_s = (max(entry.unit for entry in self.entries) + 1) / rate
        timed = sorted(((entry.unit / rate + entry.offset_s, entry) for entry in self.entries), key=itemgetter(0))
        start_s, index = 0.0, 0
        while True:
            for at_s, entry in timed:
                yield _planned(index, start_s + at_s, entry)
                index += 1
            start_s += period_s

    def prompt_ids(self, index: int, tokens: int) -> tuple[int, ...]:
        """The prompt of request `index`: of exactly this length, and sharing no prefix with one of another.

        Not with another index's, nor with that of the same index in another length: no server finds it in its cache.
        """
        return tuple(random.Random(f"{self.seed}/{index}/{tokens}").choices(_PROMPT_IDS, k=tokens))

    def _text(self) -> str:
        head = {
            "format": _FORMAT,
            "arrivals": self.arrivals,
            "prompts": self.prompts,
            "outputs": self.outputs,
            "seed": self.seed,
            "natural_rate": "inf" if self.natural_rate == inf else self.natural_rate,
        }
        lines = [head, *({name: getattr(entry, name) for name in Entry.__slots__} for entry in self.entries)]
        return "".join(json.dumps(line) + "\n" for line in lines)


def draw_trace(
    count: int,
    arrivals: Arrivals | None = None,
    *,
    prompts: Lengths | None = None,
    outputs: Lengths | None = None,
    seed: int = 0,
) -> Trace:
    """Draw `count` requests; by default the standard workload: Poisson, prompts of 200 and outputs of 100 tokens."""
    if count < 1:
        raise ValueError(f"a trace of {count} requests: must be at least 1")
    arrivals = arrivals or parse_arrivals("poisson")
    prompts = prompts or parse_lengths(DEFAULT_PROMPTS)
    outputs = outputs or parse_lengths(DEFAULT_OUTPUTS)
    # A generator for each: another arrival process then leaves the lengths as they are.
    times, lengths, ends = (random.Random(f"{seed}/{name}") for name in ("arrivals", "prompts", "outputs"))
    entries = tuple(
        Entry(round(unit, 9), round(offset_s, 9), prompts.draw(lengths), outputs.draw(ends))
        for unit, offset_s in islice(arrivals.draw(times), count)
    )
    return Trace(arrivals.spec, prompts.spec, outputs.spec, seed, entries)


def load_trace(path: Path) -> Trace:
    """Read a trace: one that was saved, or bare lines `{"at_s": …, "prompt_tokens": …, "output_tokens": …}`.

    Raises OSError, or ValueError naming the line.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    head: dict[str, object] = {}
    times: list[float] = []
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if number == 1 and record.get("format") == _FORMAT:
                head = record
                continue
            time = "unit" if head else "at_s"
            times.append(_TIME.check(time, record[time]))
            entries.append(
                Entry(
                    times[-1],
                    _OFFSET_S.check("offset_s", record.get("offset_s", 0.0)),
                    *(int(TOKENS.check(name, record[name])) for name in ("prompt_tokens", "output_tokens")),
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not a trace entry ({type(error).__name__}: {error})") from None
    if not entries:
        raise ValueError(f"{path}: a trace needs at least one entry")
    if head:
        return _saved(path, head, tuple(entries))
    # Seconds become mean gaps, so that a foreign trace can be rescaled like any other.
    first_s, last_s = min(times), max(times)
    rate = (len(times) - 1) / (last_s - first_s) if last_s > first_s else inf
    _OWN_RATE.check(f"{path}: the trace's own rate", rate)
    unified = tuple(
        Entry((at_s - first_s) * rate if last_s > first_s else 0.0, 0.0, entry.prompt_tokens, entry.output_tokens)
        for at_s, entry in zip(times, entries, strict=True)
    )
    return Trace(REPLAY, str(path), str(path), 0, unified, rate)


def offered_by(stretch: Sequence[Planned]) -> Offered:
    """What all but the last of these ask for, over the time until the last one: so many gaps as requests."""
    requests = stretch[:-1]
    span_s = stretch[-1].at_s - stretch[0].at_s if requests else 0.0
    sums = (len(requests), sum(each.prompt_tokens for each in requests), sum(each.output_tokens for each in requests))
    return Offered(len(requests), *(value / span_s if span_s > 0 else inf for value in sums))


def _planned(index: int, at_s: float, entry: Entry) -> Planned:
    return Planned(index, at_s, entry.prompt_tokens, entry.output_tokens)


def _saved(path: Path, head: dict[str, object], entries: tuple[Entry, ...]) -> Trace:
    """What `Trace.save` wrote."""
    try:
        arrivals, rate = str(head["arrivals"]), head["natural_rate"]
        if arrivals != "replay":
            parse_arrivals(arrivals)
        return Trace(
            arrivals,
            str(head["prompts"]),
            str(head["outputs"]),
            int(SEED.check("seed", head["seed"])),
            entries,
            None if rate is None else inf if rate == "inf" else RATE.check("natural_rate", rate),
        )
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}, line 1: not the head of a trace ({type(error).__name__}: {error})") from None
