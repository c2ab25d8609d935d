"""The engine's loop without everything around it: decide, run, complete. No event loop, no thread, no text, no socket.

What a scheduler and a model cost by themselves; the difference to the engine is what the rest costs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, Protocol

from wsbatch.batching.costs import CostModel, StepCost
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Decision, Scheduler, Step, StepOutcome
from wsbatch.config import EngineConfig
from wsbatch.messages import DEFAULT_PRIORITY, SamplingParams
from wsbatch.model.simulated import SimulatedModel
from wsbatch.steps import PaddedDecode, PaddedStart, PagedStep, StepPlan, StepResult
from wsbatch_bench.sampling import GREEDY, seeded

Clock = Callable[[], float]


class Runs(Protocol):
    """All that the loop needs of a model."""

    def run(self, plan: StepPlan) -> StepResult:
        """See `steps.Model.run`."""
        ...


@dataclass(frozen=True, slots=True)
class LoopRequest:
    """A prompt, exactly how many tokens to generate, and how they are chosen."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    sampling: SamplingParams = GREEDY


def sampled(requests: Sequence[LoopRequest], sampling: SamplingParams) -> list[LoopRequest]:
    """The same requests with their tokens chosen so, each with a seed of its own."""
    return [replace(request, sampling=seeded(sampling, index)) for index, request in enumerate(requests)]


@dataclass(slots=True)
class LoopRow:
    """What became of one request; times in seconds from the loop's start.

    Attributes:
        started_s: its first step began; `first_s` its first token came, `ended_s` its last.
        released_s: its slot was free again.
        token_ids: the output.
    """

    request: LoopRequest
    started_s: float = nan
    first_s: float = nan
    ended_s: float = nan
    released_s: float = nan
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One step. `model_s` is the time in the model, `kv_tokens` how many cached tokens its rows attended to."""

    start_s: float
    end_s: float
    model_s: float
    cost: StepCost
    kv_tokens: int
    samples: int


@dataclass(frozen=True, slots=True)
class LoopRun:
    """Rows in the order of the requests, steps in the order they ran, and the whole time in seconds."""

    rows: list[LoopRow]
    steps: list[LoopStep]
    total_s: float

    @property
    def output_tokens(self) -> int:
        """Tokens that somebody asked for."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def model_s(self) -> float:
        """Time in the model."""
        return sum(step.model_s for step in self.steps)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step brought: its outcome; the requests (by key) whose first and whose last token came; freed slots."""

    outcome: StepOutcome
    first: list[int]
    ended: list[int]
    released: list[int]


class BareEngine:
    """`EngineCore` without text, events, admission and metrics: a scheduler, and the budget of each request.

    A turn is `next`, the model's step, `complete`, as with the core. Outputs have exact lengths.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._budget: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def add(self, key: int, request: LoopRequest, *, arrived_s: float) -> None:
        """Put a request in the queue, under a key of its own."""
        self._budget[key] = self._left[key] = request.output_tokens
        self.scheduler.add(
            ScheduledRequest(
                key=key,
                token_ids=request.prompt_ids,
                max_new_tokens=request.output_tokens,
                sampling=request.sampling,
                priority=DEFAULT_PRIORITY,
                arrived_s=arrived_s,
            )
        )

    def next(self, now_s: float) -> Decision:
        """What to do now. After a `Step`, `complete` must come before the next `next`."""
        return self.scheduler.decide(now_s)

    def complete(self, result: StepResult, now_s: float) -> Turn:
        """The step in flight has this result; requests that have all their tokens end."""
        outcome = self.scheduler.complete(result, now_s)
        first, ended, left = [], [], self._left
        for token in outcome.tokens:
            key = token.key
            if left[key] == self._budget[key]:
                first.append(key)
            left[key] -= 1
            if not left[key]:
                ended.append(key)
                del left[key], self._budget[key]
                self.scheduler.end(key, now_s)
        return Turn(outcome, first, ended, [release.key for release in self.scheduler.releases()])


def run_loop(
    model: Runs, scheduler: Scheduler, requests: Sequence[LoopRequest], *, clock: Clock = time.perf_counter
) -> LoopRun:
    """Put all requests in the queue at once and run until the last is done; rows stop on their budget.

    The scheduler's policy must not wait for company (`max_wait_ms` 0): no more will come.
    """
    begin_s = clock()
    engine = BareEngine(scheduler)
    rows = {key: LoopRow(request) for key, request in enumerate(requests, 1)}
    for key, row in rows.items():
        engine.add(key, row.request, arrived_s=0.0)
    steps: list[LoopStep] = []
    columns = 0  # of a padded batch's cache
    while isinstance(decision := engine.next(clock() - begin_s), Step):
        start_s = clock() - begin_s
        for key in decision.started:
            rows[key].started_s = start_s
        result = model.run(decision.plan)
        now_s = clock() - begin_s
        turn = engine.complete(result, now_s)
        _write_down(turn, rows, now_s)
        cost = turn.outcome.cost
        match decision.plan:
            case PagedStep(rows=paged):
                kv_tokens = sum(row.start + len(row.token_ids) for row in paged)
            case PaddedStart(rows=padded):
                columns = max(len(row.token_ids) for row in padded)
                kv_tokens = columns * len(padded)
            case PaddedDecode():
                columns += 1
                kv_tokens = columns * cost.rows
        steps.append(LoopStep(start_s, now_s, result.model_ms / 1000, cost, kv_tokens, len(result.token_ids)))
    return LoopRun(list(rows.values()), steps, clock() - begin_s)


def _write_down(turn: Turn, rows: dict[int, LoopRow], now_s: float) -> None:
    for token in turn.outcome.tokens:
        rows[token.key].token_ids.append(token.token_id)
    for key in turn.first:
        rows[key].first_s = now_s
    for key in turn.ended:
        rows[key].ended_s = now_s
    for key in turn.released:
        rows[key].released_s = now_s


class SteppedModel:
    """A simulated model with a clock of its own, which only its steps move."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model
        self._now_s = 0.0

    def clock(self) -> float:
        """Seconds of computing so far."""
        return self._now_s

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the step; the clock moves by what it costs."""
        self._now_s += self._model.step_s(plan)
        return self._model.compute(plan)


Breakdown = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class BareModel:
    """What is needed to run and to time it.

    Attributes:
        model: runs plans.
        clock: seconds.
        breakdown_ms: milliseconds by part of a step since the last call; empty where they are not told apart.
        module: the transformers module, for its sizes; None for the simulated model.
        description: for the report.
    """

    model: Runs
    clock: Clock
    breakdown_ms: Breakdown
    module: Any
    description: str


def load_bare(config: EngineConfig, *, costs: CostModel) -> BareModel:
    """Load the model that the configuration names, for its scheduler. `costs` are the simulated model's.

    Raises what loading raises: OSError or ValueError, naming the model.
    """
    if config.model == "simulated":
        stepped = SteppedModel(SimulatedModel(costs, block_tokens=config.block_tokens))
        tau_ms, alpha_ms, beta_ms = (1000 * each for each in (costs.tau_s, costs.alpha_s, costs.beta_s))
        described = f"simulated, {tau_ms:g} ms a step + {alpha_ms:g} a row + {beta_ms:g} a prompt token"
        return BareModel(stepped, stepped.clock, dict, None, described)
    # torch takes seconds to import, and a simulated model needs none of it.
    import torch

    from wsbatch.model.loading import load
    from wsbatch.model.padded import PaddedModel
    from wsbatch.model.paged import PagedModel

    loaded = load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_model_len=config.max_model_len,
    )
    described = f"{config.model} {loaded.info.dtype} on {loaded.info.device}, {torch.get_num_threads()} threads"
    if config.scheduler == "dynamic":
        return BareModel(PaddedModel(loaded), time.perf_counter, dict, loaded.model, f"{described}, padded")
    blocks = config.max_batch_total_tokens // config.block_tokens
    paged = PagedModel(loaded, total_blocks=blocks, block_tokens=config.block_tokens)
    return BareModel(
        paged, time.perf_counter, paged.breakdown_ms, loaded.model, f"{described}, paged, {paged.runner} runner"
    )
