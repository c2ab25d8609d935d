"""Clients of several classes that give up when an answer takes too long, and may come back."""

import random
from collections import Counter
from dataclasses import dataclass, field, fields

import trio

from wsbatch_bench.load.record import Record
from wsbatch_bench.load.server import ServerTotals
from wsbatch_bench.load.target import Target

GAVE_UP = "gave_up"
"""The error of requests whose client did not wait any longer."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How clients behave.

    Attributes:
        patience_s: a client leaves when it has not got its whole answer by then.
        tries: how often it asks in all, after having given up or having been refused.
        pause_s: before it asks again, on average. It does not do what the server's `retry_after_ms` says.
        classes: the share of each priority among the clients, by weight.
    """

    patience_s: float
    tries: int = 1
    pause_s: float = 0.5
    classes: tuple[tuple[int, float], ...] = ((0, 1.0),)

    def priority(self, source: random.Random) -> int:
        """The class of one client."""
        priorities, weights = zip(*self.classes, strict=True)
        return int(source.choices(priorities, weights)[0])


@dataclass
class ImpatientTarget:
    """Implements `Target` over another one.

    A record tells of the last attempt, counted from when the client was due; `outcomes` counts how attempts ended.
    """

    target: Target
    manners: Manners
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def backend(self) -> str:
        """See `Target.backend`."""
        return self.target.backend

    @property
    def model(self) -> str:
        """See `Target.model`."""
        return self.target.model

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        """See `Target.send`."""
        source = random.Random(f"{self.seed}/{record.index}/client")  # of its own: what others do changes nothing
        record.priority = self.manners.priority(source)
        for attempt in range(self.manners.tries):
            if attempt:
                await trio.sleep(2 * self.manners.pause_s * source.random())
            trial = Record(
                record.index,
                record.prompt_tokens,
                record.output_tokens,
                record.scheduled_s,
                priority=record.priority,
                sampling=record.sampling,
            )
            with trio.move_on_after(self.manners.patience_s) as patience:
                await self.target.send(trial, prompt_ids, start_s)
            if patience.cancelled_caught:
                trial.failed(GAVE_UP, trio.current_time() - start_s)
            self.outcomes[trial.error or "answered"] += 1
            if trial.ok:
                break
        for spec in fields(Record):
            setattr(record, spec.name, getattr(trial, spec.name))

    async def totals(self) -> ServerTotals | None:
        """See `Target.totals`."""
        return await self.target.totals()
